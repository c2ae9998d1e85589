"""Measure the constants of the cost model of docs/scale.md, and check it at 1, 2 and 4 actors.

    python -m gates.speed.scale [--num-envs 1024] [--envs-per-group 128] [--rounds 3]

Measures `reach-at-scale` with a smaller buffer: rollout and learner alone in processor time; the
work of the head, bytes and transfer on a Ray cluster of two nodes on 127.0.0.1, the learner on the
first and all actors on the second, so that everything crosses a socket; ranks with gloo. From these
the model predicts the seconds of an iteration with 1, 2 and 4 actors, with lag 0 and 1, which are
measured in turn. Prints the constants, predictions beside measurements, and predictions for 10^2 to
10^4 cores; no prediction may be more than 20 % off. Under four minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import etude
from etude.building.build import build, joined
from etude.core.keys import Key
from etude.planning.recipes import Recipe
from etude.planning.resolve import resolve
from etude.rollout.host import packed
from etude.rollout.schedule import Schedule
from etude.runs.folder import RunFolder
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse
from gates.speed.scale_model import (
    STEPS,
    Constants,
    Setup,
    check_text,
    constants_text,
    iteration,
    tables_text,
)
from rank_driver import free_port
from ray_nodes import node, start

GOAL = 0.20
MINIBATCHES = 8
BLOCK = 4
"""Iterations of a run in the check: the first only collects, the last only learns."""


def recipe_of(
    num_envs: int,
    envs_per_group: int,
    steps: int = STEPS,
    minibatches: int = MINIBATCHES,
    **collector: Any,
) -> Recipe:
    """`reach-at-scale` with another buffer, without evaluation and checkpoints."""
    full = etude.recipes.reach_at_scale()
    sizes = {"num_envs": num_envs, "envs_per_group": envs_per_group, "threads": 1} | collector
    return full.replace(
        algorithm__rollout_steps=steps,
        algorithm__horizon=steps,
        algorithm__minibatch_size=num_envs * steps // minibatches,
        learner__shards=1,
        **{f"collector__{name}": value for name, value in sizes.items()},
    )


class Timed:
    """A run whose iterations are timed one by one."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.parts = build(resolve(recipe), RunFolder.create(folder, "", "", {}, {}))
        self.loop = self.parts.loop
        self.loop.clock.skip_idle()
        self.fragments: list[Any] = []

    def collect(self) -> None:
        loop = self.loop
        broadcast = loop.algorithm.broadcast(loop.clock)
        self.fragments = loop.collector.collect(broadcast, loop.clock.now.iterations)

    def learn(self) -> None:
        algorithm, clock = self.loop.algorithm, self.loop.clock
        algorithm.ingest(self.fragments, clock)
        for _ in algorithm.batches(clock, Key(clock.now.iterations)):
            pass
        algorithm.end_iteration()
        clock.advance(0, 0)

    def block(self, count: int) -> tuple[float, list[float]]:
        """Run with lag 1; return the seconds of an iteration without lag, and of those with it."""
        clock = self.loop.clock
        clock.continue_to(replace(clock.loops, iterations=clock.now.iterations + count))
        times = [time.perf_counter()]
        for _ in range(count):
            for part in (self.collect, self.learn):
                part()
                times.append(time.perf_counter())
        collect, learn = np.diff(times)[::2], np.diff(times)[1::2]
        return float(collect[0] + learn[-1]), list((collect + learn)[1:-1])

    def close(self) -> None:
        self.parts.close()


def spent(work: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return clock() - begin


def in_turns(works: list[Callable[[], float]], rounds: int) -> list[float]:
    """The medians over the rounds after a warm-up round."""
    taken = [[work() for work in works] for _ in range(rounds + 1)]
    return [float(value) for value in np.median(taken[1:], axis=0)]


def measure_alone(options: argparse.Namespace, cores: int, scratch: Path) -> dict[str, float]:
    """Measure rollout and learner alone in this process, in processor time."""
    rows, envs_per_group, small = options.num_envs, options.envs_per_group, 16 * MINIBATCHES
    one = Timed(recipe_of(rows, envs_per_group, lag=0), scratch / "one")
    all_cores = Timed(
        recipe_of(rows, envs_per_group, minibatches=small, lag=0, threads=cores), scratch / "all"
    )
    works = [one.collect, all_cores.collect, one.learn, all_cores.learn]
    found = in_turns([lambda w=w: spent(w, time.process_time) for w in works], options.rounds)
    for run in (one, all_cores):
        run.close()
    steps = rows * STEPS
    update = max(found[3] - found[2], 0.0) / (small - MINIBATCHES)
    return {
        "step": found[0] / steps,
        "crowding": max(found[1] / found[0], 1.0),
        "sample": (found[2] - MINIBATCHES * update) / steps,
        "update": update,
    }


def exchange(rank: int, port: int, sizes: list[int], results: Any) -> None:
    """The process of one of two ranks that add gradients of these sizes in shard order."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**where, "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    found = []
    with joined() as ranks:
        for size in sizes:
            total, taken = torch.zeros(size), []
            for _ in range(50):
                begin = time.perf_counter()
                for part in ranks.ordered_sum((total,), [1.0]):
                    total += part
                taken.append(time.perf_counter() - begin)
            found.append(float(np.median(taken)))
    if rank == 0:
        results.put(found)


def measure_ranks(gradient_bytes: float) -> dict[str, float]:
    """Seconds per message and per byte between two ranks, with gloo on the loopback address."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    results = context.Queue()
    sizes = [8, int(gradient_bytes)]  # float32 numbers: the second is 4 times the gradient
    two = [context.Process(target=exchange, args=(rank, port, sizes, results)) for rank in range(2)]
    for process in two:
        process.start()
    least, most = results.get(timeout=600)
    for process in two:
        process.join()
    # Two messages each: half of the gradient, then half of the sums.
    return {"message": least / 2, "rank_wire": max(most - least, 0.0) / (4 * gradient_bytes)}


def loopback_bytes() -> int:
    """Bytes sent on the loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def pickled_bytes(value: object) -> int:
    """Bytes of a value in Ray's format: its pickle and its arrays."""
    from ray import cloudpickle

    arrays: list[Any] = []
    size = len(cloudpickle.dumps(value, protocol=5, buffer_callback=arrays.append))
    return size + sum(array.raw().nbytes for array in arrays)


def lost_seconds(run: Timed, wall: float) -> float:
    """Seconds of a collection in which no actor worked, from the transport seconds of actors."""
    transport = sum(fragment.seconds["transport"] for fragment in run.fragments)
    worked = sum(sum(fragment.seconds.values()) for fragment in run.fragments) - transport
    return wall * transport / (transport + worked)


def measure_head(options: argparse.Namespace, address: str, scratch: Path) -> dict[str, float]:
    """Measure the work of the head and the transfer."""
    rows, envs_per_group = options.num_envs, options.envs_per_group
    ray = {"kind": "ray", "address": address, "lag": 0}
    small = {"num_envs": rows, "envs_per_group": max(envs_per_group // 8, 1), "steps": 4}
    runs = {
        "large": Timed(recipe_of(rows, envs_per_group, **ray, actors=1), scratch / "large"),
        "small": Timed(recipe_of(**small, **ray, actors=1), scratch / "small"),
        "spread": Timed(recipe_of(**small, **ray, actors=2), scratch / "spread"),
    }
    head: dict[str, list[float]] = {name: [] for name in runs}
    lost, crossed = [], []
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            for _ in range(1 if name == "large" else 5):
                wall, sent = time.perf_counter(), loopback_bytes()
                head[name].append(spent(run.collect, time.thread_time))
                run.loop.clock.advance(0, 0)
                if name == "large":
                    lost.append(lost_seconds(run, time.perf_counter() - wall))
                    crossed.append(loopback_bytes() - sent)
    cost = {name: float(np.median(taken[1:])) for name, taken in head.items()}
    large = runs["large"]
    groups, few = rows // small["envs_per_group"], rows // envs_per_group
    fragments = sum(pickled_bytes(fragment) for fragment in large.fragments)
    thin = sum(pickled_bytes(fragment) for fragment in runs["small"].fragments)
    snapshots = pickled_bytes(large.loop.collector.state_dict())
    broadcast = packed(large.loop.algorithm.broadcast(large.loop.clock))
    for run in runs.values():
        run.close()
    order = max(cost["spread"] - cost["small"], 0.0)
    # Two equations in seconds per fragment and per byte.
    amounts = [[few, fragments + snapshots], [groups, thin + snapshots]]
    fragment, byte = np.linalg.solve(amounts, [cost["large"] - order, cost["small"] - order])
    wire = max(float(np.median(lost[1:])) - cost["large"], 0.0) / (fragments + snapshots)
    return {
        "step_bytes": fragments / (rows * STEPS),
        "row_bytes": snapshots / rows,
        "broadcast_bytes": pickled_bytes(broadcast),
        "order": order,
        "fragment": max(float(fragment), 0.0),
        "byte": max(float(byte), 0.0),
        "wire": wire,
        "crossed": float(np.median(crossed[1:])) / (fragments + snapshots),
    }


def measure_look(workers: int = 1000) -> float:
    """Seconds per worker of one wait for all workers."""
    import ray

    @ray.remote(num_cpus=0)
    class Busy:
        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    schedule, busy = Schedule(workers), Busy.remote()
    for worker in range(workers):
        schedule.join(worker)
    schedule.begin(0)
    schedule.orders(0.0)
    flights = [busy.work.remote(2.0), *(busy.work.remote(0.0) for _ in range(workers - 1))]

    def look() -> None:
        ray.wait(flights, num_returns=1, timeout=0)
        schedule.overdue(1.0)
        for _ in schedule.busy():
            pass

    taken = [spent(look, time.thread_time) for _ in range(20)]
    ray.kill(busy)
    return float(np.median(taken)) / workers


def check(
    options: argparse.Namespace, k: Constants, cores: int, address: str, at: Path
) -> list[dict[str, Any]]:
    """Compare runs with 1, 2 and 4 actors with predictions of the model."""
    rows, envs_per_group = options.num_envs, options.envs_per_group
    ray = {"kind": "ray", "address": address, "lag": 1}
    runs = {
        actors: Timed(
            recipe_of(rows, envs_per_group, **ray, actors=actors), at / f"actors-{actors}"
        )
        for actors in options.actors
    }
    taken: dict[tuple[int, int], list[float]] = {}
    for round_number in range(options.rounds + 1):
        for actors, run in runs.items():
            # The first iteration starts the actors.
            without, within = run.block(BLOCK if round_number else 1)
            if round_number:
                taken.setdefault((0, actors), []).append(without)
                taken.setdefault((1, actors), []).extend(within)
    for run in runs.values():
        run.close()
    found = []
    for (lag, actors), seconds in sorted(taken.items()):
        setup = Setup(
            rows, envs_per_group, STEPS, MINIBATCHES, lag=lag, workers=actors, cores=cores
        )
        cost, measured = iteration(k, setup), float(np.median(seconds))
        predicted = {"predicted": cost.seconds, "measured": measured, "limit": cost.limit}
        found.append({"lag": lag, "actors": actors, **predicted})
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--envs-per-group", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4], help="of the check")
    smallest = {"num_envs": 128, "envs_per_group": 32, "rounds": 1, "actors": [1]}
    options = parse(parser, smallest, arguments)
    needs = {"predictions": 2 * len(options.actors)}
    with Gate("scale", options, needs=needs) as gate:
        report_load(gate)
        gate.details = measure(options)
        report_load(gate)
        errors = [abs(one["predicted"] / one["measured"] - 1.0) for one in gate.details["check"]]
        gate.count("predictions", len(errors))
        gate.figure("largest error of a prediction", max(errors), at_most=GOAL, timing=True)
    return gate.code


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the constants and check the predictions; print both."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        found = measure_alone(options, cores, scratch)
        policy = etude.plan(recipe_of(options.num_envs, options.envs_per_group)).bytes["model"]
        found |= measure_ranks(policy) | {"gradient_bytes": policy}
        import ray

        cluster = start(0)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.add_node(**node(2 * max(sum(options.actors), 3)))
        found |= measure_head(options, cluster.address, scratch)
        crossed = found.pop("crossed")
        constants = Constants(**found, look=measure_look())
        kept = {"constants": asdict(constants), "crossed": crossed, "cores": cores}
        kept |= {"steps": options.num_envs * STEPS, "envs_per_group": options.envs_per_group}
        print(constants_text(kept))
        kept["check"] = check(options, constants, cores, cluster.address, scratch)
        ray.shutdown()
        cluster.shutdown()
    print(f"\n{check_text(kept)}\n\n{tables_text(kept)}")
    return kept


if __name__ == "__main__":
    sys.exit(main())
