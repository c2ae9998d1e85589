"""Collector steps/s with the policy acting, against bare `Batch.step` of the same model.

    python gates/rollout_speed.py [--rows 256] [--threads 2] [--rounds 9]

Both sides have the same rows, threads, substeps and stage, and alternate in one process. Prints
the ratio of medians last; exits 1 when it is below 0.85, or 2
when the machine was too busy to judge.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--steps", type=int, default=32, help="control steps of a round")
    parser.add_argument("--rounds", type=int, default=9)
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
                }
            ),
            "algorithm": recipe.algorithm.model_copy(update={"rollout_steps": options.steps}),
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        ratio = measure(recipe, options.rounds, Path(scratch))
    print(f"rollout_speed {ratio:.3f} (goal {GOAL})")
    return 0 if ratio >= GOAL else (1 if judged else 2)


def measure(recipe: Recipe, rounds: int, scratch: Path) -> float:
    """Alternate both sides; the ratio of their median speeds."""
    folder = RunFolder.create(scratch / "run", "", "", {}, {})
    parts = build(recipe, folder)
    loop = parts.loop
    env = loop.collector._groups[0].env
    batch = Batch(env.simulation.model, recipe.collector.rows, recipe.collector.threads)
    for name in ("qpos", "qvel", "ctrl", "site_xpos"):
        batch.bind(name)
    steps, rows = recipe.algorithm.rollout_steps, recipe.collector.rows
    rng = np.random.default_rng(0)
    joints = batch.bind("qpos").shape[1]
    controls = rng.uniform(-0.5, 0.5, (steps, rows, batch.bind("ctrl").shape[1]))
    start = np.concatenate(
        [s["env"]["simulation"]["state"] for s in loop.collector.state_dict()["groups"].values()]
    )
    ours, bare = [], []
    for i in range(rounds + 1):
        begin = time.perf_counter()
        loop.collector.collect(loop.algorithm.broadcast(loop.clock), i)
        ours.append(time.perf_counter() - begin)
        batch.state[...] = start
        home = batch.bind("qpos").copy()
        begin = time.perf_counter()
        for step in range(steps):
            # The arm moves as it does under the policy: small joint targets around where it is.
            batch.bind("ctrl")[...] = home[:, :joints] + controls[step]
            batch.step(nstep=env.spec.substeps, stage=int(mujoco.mjtStage.mjSTAGE_VEL))
        bare.append(time.perf_counter() - begin)
    parts.close()
    count = rows * steps
    print(f"collector {count / np.median(ours[1:]):10,.0f} steps/s  (median of {rounds})")
    print(f"bare      {count / np.median(bare[1:]):10,.0f} steps/s")
    return float(np.median(bare[1:]) / np.median(ours[1:]))


if __name__ == "__main__":
    sys.exit(main())
