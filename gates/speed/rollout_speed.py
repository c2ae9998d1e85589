"""Steps per second of the collector with its policy, against bare `Batch.step` of the same model.

    python -m gates.speed.rollout_speed [--task reach] [--num-envs 512] [--threads 2] [--rounds 15]
    python -m gates.speed.rollout_speed --task imitate-walk
    python -m gates.speed.rollout_speed --task Ant-v5

The task is that of a recipe, or one of Gymnasium's on the batch engine. Both sides have the same
environments, threads, substeps and stage, and alternate in one process. The median of the rounds'
ratios must reach the bound of the task; the ratio in processor time, which load changes less, is
printed too. Gymnasium's tasks are also collected through Gymnasium's environments, and that ratio
is a figure. `--profile` prints the calls of a group step outside of the physics, with their number.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch

from etude.building.build import Parts, build
from etude.envs.adapters.gym import GymConfig
from etude.envs.mujoco.simulation import Simulation
from etude.planning.recipes import Recipe, find
from etude.planning.resolve import resolve
from etude.rollout.local import Workers
from etude.runs.folder import RunFolder
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GYMNASIUM = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
GOALS = {"reach": 0.90, "imitate-walk": 0.85, "walk-go1": 0.85, **dict.fromkeys(GYMNASIUM, 0.85)}
SIZES = {"reach": (512, 256), "imitate-walk": (512, 256), "walk-go1": (512, 256)}
"""Environments, and environments of a group; for Gymnasium's tasks 256 and 128."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="reach", choices=list(GOALS))
    parser.add_argument("--num-envs", type=int, help="default 512, of Gymnasium's tasks 256")
    parser.add_argument("--envs-per-group", type=int, help="default half of that")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine-threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="control steps of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="also print a profile")
    smallest = {"num_envs": 32, "envs_per_group": 16, "steps": 8, "rounds": 2}
    options = parse(parser, smallest, arguments)
    num_envs, envs_per_group = SIZES.get(options.task, (256, 128))
    options.num_envs = options.num_envs or num_envs
    options.envs_per_group = options.envs_per_group or envs_per_group
    needs = {"rounds": options.rounds}
    with Gate("rollout_speed", options, needs=needs, variant=options.task) as gate:
        report_load(gate)
        recipe = recipe_of(options)
        with tempfile.TemporaryDirectory() as scratch:
            ratios, speed = measure(recipe, options.rounds, Path(scratch), options.profile)
        gate.count("rounds", len(ratios))
        ratio, goal = float(np.median(ratios)), GOALS[options.task]
        gate.figure("collector over bare physics", ratio, at_least=goal, timing=True)
        if options.task in GYMNASIUM:
            with tempfile.TemporaryDirectory() as scratch:
                other = adapter_speed(recipe, max(1, options.rounds // 5), Path(scratch))
            gate.figure("batch engine over Gymnasium's environments", speed / other, timing=True)
    return gate.code


def recipe_of(options: argparse.Namespace) -> Recipe:
    if options.task in GYMNASIUM:
        recipe = find("ppo").replace(env=GymConfig(id=options.task, engine="batch"))
    else:
        recipe = find(options.task)
    return recipe.replace(
        collector__num_envs=options.num_envs,
        collector__envs_per_group=options.envs_per_group,
        collector__threads=options.threads,
        collector__engine_threads=options.engine_threads,
        algorithm__rollout_steps=options.steps,
        algorithm__minibatch_size=options.num_envs,
    )


class Bare:
    """`Batch.step` alone, from the states that the collector stepped.

    The cost of a step depends on contacts, which would differ without the policy.
    """

    def __init__(self, model: mujoco.MjModel, states: list[np.ndarray], threads: int) -> None:
        """states: fields [num_envs, n] with controls, including those that are set at resets."""
        self._batch = Batch(model, len(states[0]), threads)
        self._states = states
        self.threads = threads
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def bind(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            self._batch.bind(name)

    def run(self, substeps: int, stage: int) -> None:
        batch = self._batch
        begin, spent = time.perf_counter(), time.process_time()
        for state in self._states:
            batch.state[...] = state
            batch.step(nstep=substeps, stage=stage)
        self.seconds.append(time.perf_counter() - begin)
        self.processor.append(time.process_time() - spent)


class Recorded(NamedTuple):
    """The recorded calls of `Batch.step` in a rollout."""

    model: mujoco.MjModel
    substeps: int
    stage: int
    states: list[np.ndarray]
    """Fields [num_envs, n] before every step, for all groups."""


def record(collect: Callable[[], None]) -> Recorded:
    """Record the physics of one rollout."""
    recorded: dict[Simulation, list[np.ndarray]] = {}
    plain, seen = Simulation.step, set()

    def step(simulation: Simulation, substeps: int, lagged: bool = False) -> float:
        recorded.setdefault(simulation, []).append(simulation.state.copy())
        stage = mujoco.mjtStage.mjSTAGE_NONE if lagged else mujoco.mjtStage.mjSTAGE_VEL
        seen.add((substeps, int(stage)))
        return plain(simulation, substeps, lagged)

    with patch.object(Simulation, "step", step):
        collect()
    states = [np.concatenate(parts) for parts in zip(*recorded.values(), strict=True)]
    ((substeps, stage),) = seen
    return Recorded(next(iter(recorded)).model, substeps, stage, states)


@contextmanager
def binding() -> Iterator[set[str]]:
    """Collect the names of the fields that are read from simulations."""
    names, plain = set[str](), Simulation.bind

    def bind(simulation: Simulation, name: str) -> np.ndarray:
        names.add(name)
        return plain(simulation, name)

    with patch.object(Simulation, "bind", bind):
        yield names


def profile(collect: Callable[[], object], group_steps: int, lines: int = 40) -> None:
    """Print the calls of a group step and the functions with the longest own time."""
    torch.set_num_threads(1)

    def share(workers: Workers, tasks: Sequence[Iterator[None]]) -> None:
        """Run everything in this thread, because a profile covers only its own thread."""
        for task in tasks:
            for _ in task:
                pass

    with patch.object(Workers, "share", share), cProfile.Profile() as profiler:
        for _ in range(4):
            collect()
    found = pstats.Stats(profiler).stats
    each = 4 * group_steps
    print(f"{sum(entry[0] for entry in found.values()) / each:.0f} calls in a group step")
    for (file, line, name), entry in sorted(found.items(), key=lambda item: -item[1][2])[:lines]:
        calls, own = entry[1] / each, entry[2] / each * 1e6
        print(f"{own:9.1f} us {calls:6.2f} calls  {Path(file).name}:{line} {name}")


def measure(recipe: Recipe, rounds: int, scratch: Path, profiled: bool) -> tuple[np.ndarray, float]:
    """Run both sides in turn; return the rounds' ratios, and the collector's steps per second.

    The bare side runs with the collector's number of threads, and with one per core; the faster one
    is compared.
    """
    folder = RunFolder.create(scratch / "run", "", "", {}, {})
    with binding() as names:
        parts = build(resolve(recipe), folder)
        collect = collecting(parts)
        collect()
    collector, physics = recipe.collector, record(collect)
    threads = {collector.threads * collector.engine_threads, os.cpu_count() or 1}
    rivals = [Bare(physics.model, physics.states, many) for many in sorted(threads)]
    ours, spent = [], []
    for rival in rivals:
        rival.bind(names)
    for _ in range(rounds + 1):
        begin, before = time.perf_counter(), time.process_time()
        collect()
        ours.append(time.perf_counter() - begin)
        spent.append(time.process_time() - before)
        for rival in rivals:
            rival.run(physics.substeps, physics.stage)
    if profiled:
        profile(collect, collector.num_groups * recipe.algorithm.rollout_steps)
    parts.close()
    done = collector.num_envs * recipe.algorithm.rollout_steps
    best = min(rivals, key=lambda rival: float(np.median(rival.seconds[1:])))
    print(
        f"collector {done / np.median(ours[1:]):10,.0f} steps/s  "
        f"({collector.threads} threads x {collector.engine_threads}, groups of "
        f"{collector.envs_per_group}, median of {rounds})"
    )
    for rival in rivals:
        speed = done / np.median(rival.seconds[1:])
        print(f"bare      {speed:10,.0f} steps/s  ({rival.threads} threads)")
    # Ratios of each round: the speed of the machine drifts more than the sides differ.
    ratios = np.array(best.seconds[1:]) / np.array(ours[1:])
    processor = float(np.median(np.array(best.processor[1:]) / np.array(spent[1:])))
    print(f"ratio in processor time: {processor:.3f}")
    print(f"ratio by round: {np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f}")
    return ratios, float(done / np.median(ours[1:]))


def collecting(parts: Parts) -> Callable[[], object]:
    """Collect a rollout of a built run with its initial weights."""
    loop, number = parts.loop, itertools.count()
    weights = loop.algorithm.broadcast(loop.clock)
    return lambda: loop.collector.collect(weights, next(number))


def adapter_speed(recipe: Recipe, rounds: int, scratch: Path) -> float:
    """The collector's steps per second on Gymnasium's environments of the same task."""
    folder = RunFolder.create(scratch / "run", "", "", {}, {})
    parts = build(resolve(recipe.replace(env__engine="gymnasium")), folder)
    collect, seconds = collecting(parts), []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        collect()
        seconds.append(time.perf_counter() - begin)
    parts.close()
    speed = recipe.collector.num_envs * recipe.algorithm.rollout_steps / np.median(seconds[1:])
    print(f"gymnasium {speed:10,.0f} steps/s")
    return float(speed)


if __name__ == "__main__":
    sys.exit(main())
