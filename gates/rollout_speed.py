"""Collector steps/s with the policy acting, against bare `Batch.step` of the same model.

    python gates/rollout_speed.py [--recipe reach] [--rows 256] [--threads 2] [--rounds 15]
    python gates/rollout_speed.py --recipe imitate-walk

Both sides have the same rows, threads, substeps and stage, and alternate in one process. The
median of the rounds' ratios must reach the recipe's goal; the same in processor time, which a busy
machine changes less, is printed too. `--profile` prints what a group step calls beside the
physics, and how often.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch

from etude.api import RunFolder
from etude.building.build import build
from etude.envs.mujoco.simulation import Simulation
from etude.planning.recipes import Recipe, find
from etude.planning.resolve import resolve
from etude.rollout.local import Workers
from machine import report_load
from report import Gate, parse

GOALS = {"reach": 0.90, "imitate-walk": 0.85}
SIZES = {"reach": (256, 128), "imitate-walk": (512, 256)}
"""Rows, and those of a group. The humanoid's policy is larger and its physics shorter."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach", choices=sorted(GOALS))
    parser.add_argument("--rows", type=int, help="default 256, of the humanoid 512")
    parser.add_argument("--envs-per-group", type=int, help="default half of that")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine-threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="control steps of a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="also print a profile")
    smallest = {"num_envs": 32, "envs_per_group": 16, "steps": 8, "rounds": 2}
    options = parse(parser, smallest, arguments)
    rows, envs_per_group = SIZES[options.recipe]
    options.rows, options.envs_per_group = (
        options.rows or rows,
        options.envs_per_group or envs_per_group,
    )
    needs = {"rounds": options.rounds}
    with Gate("rollout_speed", options, needs=needs, variant=options.recipe) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            ratios = measure(recipe_of(options), options.rounds, Path(scratch), options.profile)
        gate.count("rounds", len(ratios))
        ratio, goal = float(np.median(ratios)), GOALS[options.recipe]
        gate.figure("collector over bare physics", ratio, at_least=goal, timing=True)
    return gate.code


def recipe_of(options: argparse.Namespace) -> Recipe:
    recipe = find(options.recipe)
    return recipe.model_copy(
        update={
            "collector": recipe.collector.model_copy(
                update={
                    "num_envs": options.rows,
                    "envs_per_group": options.envs_per_group,
                    "threads": options.threads,
                    "engine_threads": options.engine_threads,
                }
            ),
            "algorithm": recipe.algorithm.model_copy(
                update={"rollout_steps": options.steps, "minibatch_size": options.rows}
            ),
        }
    )


BOUND = {
    "reach": ("qpos", "qvel", "ctrl", "site_xpos"),
    "imitation": ("qpos", "qvel", "ctrl", "xpos", "xquat", "cvel", "subtree_com"),
}
"""What each task reads and writes."""


class Bare:
    """`Batch.step` and nothing else, from the very states that the collector stepped.

    Contacts decide what a step costs, and an arm or a figure left to itself would have others.
    """

    def __init__(self, model: mujoco.MjModel, states: list[np.ndarray], threads: int) -> None:
        """states: [rows, n] each, controls among them; what was set at resets is in them."""
        self._batch = Batch(model, len(states[0]), threads)
        self._states = states
        self.threads = threads
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def bind(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._batch.bind(name)

    def run(self, substeps: int) -> None:
        batch = self._batch
        begin, spent = time.perf_counter(), time.process_time()
        for state in self._states:
            batch.state[...] = state
            batch.step(nstep=substeps, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        self.seconds.append(time.perf_counter() - begin)
        self.processor.append(time.process_time() - spent)


def record(collect: Callable[[], None]) -> tuple[mujoco.MjModel, int, list[np.ndarray]]:
    """The model, its substeps and every state [rows, n] of a rollout, all groups side by side."""
    recorded: dict[Simulation, list[np.ndarray]] = {}
    plain, seen = Simulation.step, set()

    def step(simulation: Simulation, substeps: int, lagged: bool = False) -> float:
        recorded.setdefault(simulation, []).append(simulation.state.copy())
        seen.add(substeps)
        return plain(simulation, substeps, lagged)

    Simulation.step = step
    collect()
    Simulation.step = plain
    states = [np.concatenate(parts) for parts in zip(*recorded.values(), strict=True)]
    (substeps,) = seen
    return next(iter(recorded)).model, substeps, states


def profile(collect: Callable[[], None], group_steps: int, lines: int = 40) -> None:
    """Print the calls of a group step and the functions that take longest in themselves."""
    plain = Workers.share
    torch.set_num_threads(1)

    def share(workers: Workers, tasks: list[Iterator[None]]) -> None:
        """All in this thread, as a profile sees only its own."""
        for task in tasks:
            for _ in task:
                pass

    Workers.share = share
    with cProfile.Profile() as profiler:
        for _ in range(4):
            collect()
    Workers.share = plain
    found = pstats.Stats(profiler).stats
    each = 4 * group_steps
    print(f"{sum(entry[0] for entry in found.values()) / each:.0f} calls in a group step")
    for (file, line, name), entry in sorted(found.items(), key=lambda item: -item[1][2])[:lines]:
        calls, own = entry[1] / each, entry[2] / each * 1e6
        print(f"{own:9.1f} us {calls:6.2f} calls  {Path(file).name}:{line} {name}")


def measure(recipe: Recipe, rounds: int, scratch: Path, profiled: bool) -> np.ndarray:
    """Alternate both sides; the rounds' ratios.

    The bare side runs with as many threads as the collector has in all, and with one per core;
    whichever is faster is the one to beat.
    """
    folder = RunFolder.create(scratch / "run", "", "", {}, {})
    parts = build(resolve(recipe), folder)
    loop, collector = parts.loop, recipe.collector
    number, weights = itertools.count(), loop.algorithm.broadcast(loop.clock)

    def collect() -> None:
        loop.collector.collect(weights, next(number))

    collect()
    model, substeps, states = record(collect)
    threads = {collector.threads * collector.engine_threads, os.cpu_count() or 1}
    rivals = [Bare(model, states, many) for many in sorted(threads)]
    ours, spent = [], []
    for rival in rivals:
        rival.bind(BOUND[recipe.task.kind])
    for _ in range(rounds + 1):
        begin, before = time.perf_counter(), time.process_time()
        collect()
        ours.append(time.perf_counter() - begin)
        spent.append(time.process_time() - before)
        for rival in rivals:
            rival.run(substeps)
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
    # Round by round: the machine's speed drifts more than the two sides differ.
    ratios = np.array(best.seconds[1:]) / np.array(ours[1:])
    processor = float(np.median(np.array(best.processor[1:]) / np.array(spent[1:])))
    print(f"ratio in processor time: {processor:.3f}")
    print(f"ratio by round: {np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f}")
    return ratios


if __name__ == "__main__":
    sys.exit(main())
