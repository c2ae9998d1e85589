"""Collector steps/s with the policy acting, against bare `Batch.step` of the same model.

    python gates/rollout_speed.py [--rows 256] [--threads 2] [--rounds 15]

Both sides have the same rows, threads, substeps and stage, and alternate in one process. Prints
the median of the rounds' ratios last; exits 1 when it is below 0.85, or 2
when the machine was too busy to judge.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch

import etude
from etude.app.build import build
from etude.app.recipes import Recipe
from etude.app.run import RunFolder
from machine import report_load

GOAL = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--group-rows", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine-threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="control steps of a round")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    judged = report_load()
    recipe = etude.recipes.reach()
    recipe = recipe.model_copy(
        update={
            "collector": recipe.collector.model_copy(
                update={
                    "rows": options.rows,
                    "group_rows": options.group_rows,
                    "threads": options.threads,
                    "engine_threads": options.engine_threads,
                }
            ),
            "algorithm": recipe.algorithm.model_copy(update={"rollout_steps": options.steps}),
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        ratio = measure(recipe, options.rounds, Path(scratch))
    print(f"rollout_speed {ratio:.3f} (goal {GOAL})")
    return 0 if ratio >= GOAL else (1 if judged else 2)


class Bare:
    """`Batch.step` and nothing else: same model, rows, substeps and stage."""

    def __init__(self, model: mujoco.MjModel, start: np.ndarray, threads: int) -> None:
        self._batch = Batch(model, len(start), threads)
        for name in ("qpos", "qvel", "ctrl", "site_xpos"):  # What the task reads and writes.
            self._batch.bind(name)
        self._start = start
        self.threads = threads
        self.seconds: list[float] = []

    def run(self, steps: int, substeps: int) -> None:
        batch = self._batch
        batch.state[...] = self._start
        home = batch.bind("qpos")[:, : batch.bind("ctrl").shape[1]].copy()
        rng = np.random.default_rng(0)
        begin = time.perf_counter()
        for _ in range(steps):
            # The arm moves about as it does under the policy: joint targets around its start.
            batch.bind("ctrl")[...] = home + rng.uniform(-0.3, 0.3, home.shape)
            batch.step(nstep=substeps, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        self.seconds.append(time.perf_counter() - begin)


def measure(recipe: Recipe, rounds: int, scratch: Path) -> float:
    """Alternate both sides; the median of the rounds' ratios.

    The bare side runs with as many threads as the collector has in all, and with one per core;
    whichever is faster is the one to beat.
    """
    folder = RunFolder.create(scratch / "run", "", "", {}, {})
    parts = build(recipe, folder)
    loop, collector = parts.loop, recipe.collector
    env = loop.collector._groups[0].env
    groups = loop.collector.state_dict()["groups"].values()
    start = np.concatenate([s["env"]["simulation"]["state"] for s in groups])
    counts = {collector.threads * collector.engine_threads, os.cpu_count() or 1}
    rivals = [Bare(env.simulation.model, start, threads) for threads in sorted(counts)]
    steps, ours = recipe.algorithm.rollout_steps, []
    for i in range(rounds + 1):
        begin = time.perf_counter()
        loop.collector.collect(loop.algorithm.broadcast(loop.clock), i)
        ours.append(time.perf_counter() - begin)
        for rival in rivals:
            rival.run(steps, env.spec.substeps)
    parts.close()
    count = collector.rows * steps
    best = min(rivals, key=lambda rival: float(np.median(rival.seconds[1:])))
    print(
        f"collector {count / np.median(ours[1:]):10,.0f} steps/s  "
        f"({collector.threads} threads x {collector.engine_threads}, groups of "
        f"{collector.group_rows}, median of {rounds})"
    )
    for rival in rivals:
        speed = count / np.median(rival.seconds[1:])
        print(f"bare      {speed:10,.0f} steps/s  ({rival.threads} threads)")
    # Round by round: the machine's speed drifts more than the two sides differ.
    ratios = np.array(best.seconds[1:]) / np.array(ours[1:])
    print(f"ratio by round: {np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f}")
    return float(np.median(ratios))


if __name__ == "__main__":
    sys.exit(main())
