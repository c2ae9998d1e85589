"""Cost per step at different sizes: rows of the collector, steps of the buffer.

    python -m gates.speed.scaling [--part collection|learning|all] [--rounds 5]

collection  seconds per environment step of the local collector with the policy of `reach`, at 64
            to 8,192 rows, beside `Batch.step` of the same model at the same rows. Groups are half
            of the rows but at most 512, as in recipes: two threads need two groups, and beyond 512
            rows the cost of calls is negligible. 64 rows are one group on two engine threads,
            because the calls of a group take about .4 ms. Episodes are staggered, so that resets
            are spread evenly at every size.
learning    seconds per step of an update (ingest and every minibatch) by PPO with the MLP of
            `reach`, of buffers of 2^14 to 2^19 steps in segments of 64 and minibatches of 16,384.

Sizes take turns in every round and a cost is the median of its rounds. Collection is timed by
the wall clock on two threads, learning in processor time on one. The largest deviation from the
median of a column may be 15 %. About five minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from time import perf_counter, process_time

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch

import etude
from etude.core.contracts import Array, Broadcast
from etude.core.keys import Key
from etude.core.trees import copy_arrays
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.envs.mujoco.env import MujocoEnv
from etude.models.policies import make_policy
from etude.rl.ppo import PPO
from etude.rollout.local import LocalCollector, Workers
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse
from gates.speed.update_speed import at_scale, learner

GOAL = 0.15
STEPS = 16
"""Control steps of a rollout, like `reach`."""


class Collection:
    """The collector of one size, and the bare physics."""

    def __init__(self, rows: int, options: argparse.Namespace) -> None:
        recipe, key = etude.recipes.reach(), Key(0)
        self.rows, self.envs_per_group = rows, group_of(rows, options.largest_group)
        envs_per_group, threads = self.envs_per_group, options.engine_threads
        # A round has several rollouts if they are small.
        self.repeats = max(1, max(options.rows) // 4 // rows)
        envs = [recipe.env.make(envs_per_group, threads) for _ in range(rows // envs_per_group)]
        first = envs[0]
        assert isinstance(first, MujocoEnv)
        policy = make_policy(recipe.policy, first.spec, key.child("policy"))
        buffer = SegmentBuffer(BufferSpec(first.spec, {}, rows, STEPS, 1))
        parts = [buffer.part(slice(r, r + envs_per_group)) for r in range(0, rows, envs_per_group)]
        self._collector = LocalCollector(envs, policy, key, Workers(options.threads), [parts])
        self._broadcast = Broadcast(0, copy_arrays(dict(policy.state_dict())))
        self._iteration = 0
        self._collect()
        start = self._stagger(first.spec.max_episode_steps or 1)
        self._substeps, self._bare = first.spec.substeps, Batch(first.simulation.model, rows, 2)
        for name in ("qpos", "qvel", "ctrl", "site_xpos"):  # fields that the task reads and writes
            self._bare.bind(name)
        self._bare.state[...] = start
        self._home = self._bare.bind("qpos")[:, : self._bare.bind("ctrl").shape[1]].copy()

    def _stagger(self, limit: int) -> Array:
        """Give the episodes of neighbouring rows different ages; return the simulator's state."""
        state = self._collector.state_dict()
        for number, snapshot in enumerate(state["groups"].values()):
            rows = number * self.envs_per_group + np.arange(self.envs_per_group)
            snapshot["env"]["elapsed"][:] = rows * 19 % limit
        self._collector.load_state_dict(
            {"groups": {name: copy_arrays(s) for name, s in state["groups"].items()}}
        )
        snapshots = state["groups"].values()
        return np.concatenate([s["env"]["simulation"]["state"] for s in snapshots])

    def _collect(self) -> None:
        self._collector.collect(self._broadcast, self._iteration)
        self._iteration += 1

    def seconds(self) -> tuple[float, float]:
        """Wall-clock and processor seconds per environment step of the collector."""
        begin = perf_counter(), process_time()
        for _ in range(self.repeats):
            self._collect()
        return self._per_step(begin)

    def _per_step(self, begin: tuple[float, float]) -> tuple[float, float]:
        count = self.repeats * STEPS * self.rows
        return (perf_counter() - begin[0]) / count, (process_time() - begin[1]) / count

    def bare_seconds(self) -> tuple[float, float]:
        """Wall-clock and processor seconds per step of the physics alone."""
        control, random = self._bare.bind("ctrl"), np.random.default_rng(0)
        begin = perf_counter(), process_time()
        for _ in range(self.repeats * STEPS):
            # Joint targets around the start, with which the arm moves about like with the policy.
            control[...] = self._home + random.uniform(-0.3, 0.3, self._home.shape)
            self._bare.step(nstep=self._substeps, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        return self._per_step(begin)

    def close(self) -> None:
        self._collector.close()


class Learning:
    """The update from a buffer of one size."""

    def __init__(self, steps: int, largest: int) -> None:
        recipe = at_scale("mlp", steps // 64)
        self.steps = steps
        self.ppo: PPO
        self.ppo, self._fragments, self._clock = learner(recipe, real=False)
        self.repeats = max(1, largest // 4 // steps)

    def seconds(self) -> float:
        """Seconds of a whole update per step of the buffer."""
        begin = process_time()
        for i in range(self.repeats):
            self.ppo.ingest(self._fragments, self._clock)
            for _ in self.ppo.batches(self._clock, Key(i)):
                pass
            self.ppo.end_iteration()
        return (process_time() - begin) / (self.repeats * self.steps)


def in_turns(measures: Sequence[Callable[[], float | tuple[float, ...]]], rounds: int) -> Array:
    """Medians [measures, ...] over the rounds after a warm-up round."""
    taken = [[measure() for measure in measures] for _ in range(rounds + 1)]
    return np.median(taken[1:], axis=0)


def deviations(costs: Array) -> Array:
    """Relative deviations from the median."""
    return costs / np.median(costs) - 1.0


def group_of(rows: int, largest: int) -> int:
    """Rows of a group, like in recipes."""
    return rows if rows < 128 else min(rows // 2, largest)


def collection(options: argparse.Namespace) -> float:
    sizes = [Collection(rows, options) for rows in options.rows]
    measures = [m for size in sizes for m in (size.seconds, size.bare_seconds)]
    costs = in_turns(measures, options.rounds)
    ours, bare = costs[::2], costs[1::2]
    threads = f"{options.threads} threads x {options.engine_threads}"
    print(f"collection: {threads}; microseconds per step")
    print(f"{'':>8} {'':>6} {'on the wall':^35} {'of the processors':^26}")
    print(
        f"{'rows':>8} {'group':>6} {'collector':>9} {'':>8} {'bare':>8} {'':>8} "
        f"{'collector':>9} {'':>8} {'bare':>8}"
    )
    for i, size in enumerate(sizes):
        (wall, processor), (bare_wall, bare_processor) = ours[i] * 1e6, bare[i] * 1e6
        off, processor_off = (deviations(ours[:, clock])[i] for clock in (0, 1))
        print(
            f"{size.rows:8,} {size.envs_per_group:6} {wall:9.2f} {off:+8.1%} {bare_wall:8.2f} "
            f"{deviations(bare[:, 0])[i]:+8.1%} {processor:9.2f} {processor_off:+8.1%} "
            f"{bare_processor:8.2f}"
        )
        size.close()
    sys.stdout.flush()
    return float(np.abs(deviations(ours[:, 0])).max())


def learning(options: argparse.Namespace) -> float:
    torch.set_num_threads(1)
    sizes = [Learning(steps, max(options.buffers)) for steps in options.buffers]
    costs = in_turns([size.seconds for size in sizes], options.rounds)
    print("learning: microseconds per step of the buffer")
    print(f"{'steps':>8} {'batches':>8} {'update':>8}")
    for size, cost, off in zip(sizes, costs, deviations(costs), strict=True):
        count = size.ppo.geometry.num_minibatches
        print(f"{size.steps:8,} {count:8} {cost * 1e6:8.3f} {off:+8.1%}")
    return float(np.abs(deviations(costs)).max())


PARTS = {"collection": collection, "learning": learning}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine-threads", type=int, default=2)
    parser.add_argument("--largest-group", type=int, default=512)
    sizes = {"rows": [64, 256, 1024, 4096, 8192], "buffers": [2**k for k in range(14, 20)]}
    parser.add_argument("--rows", type=int, nargs="+", default=sizes["rows"])
    parser.add_argument("--buffers", type=int, nargs="+", default=sizes["buffers"])
    smallest = {"rounds": 1, "rows": [16, 64], "buffers": [2**14, 2**15]}
    options = parse(parser, smallest, arguments)
    parts = tuple(PARTS) if options.part == "all" else (options.part,)
    wanted = {"collection": len(options.rows), "learning": len(options.buffers)}
    needs = {f"sizes of {part}": wanted[part] for part in parts}
    with Gate("scaling", options, needs=needs) as gate:
        report_load(gate)
        for part in parts:
            off = PARTS[part](options)
            gate.count(f"sizes of {part}", wanted[part])
            gate.figure(f"{part} off its median", off, at_most=GOAL, timing=True)
        report_load(gate)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
