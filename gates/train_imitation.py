"""`etude train imitate-walk` from the command line: does the humanoid move as it should.

    python gates/train_imitation.py [--seeds 3] [--recipe imitate-walk]
    python gates/train_imitation.py --recipe imitate-all --run RUN

Each run is the plain command with nothing but the seed set; `--run` judges one that is done.
Every clip is played by the best policy from its first frame, with the physics it learned in and
with checked physics: 8 substeps, another integrator, limited torques.

    imitate-walk      10 s without falling in both, a root-relative error of at most 30 mm
    imitate-backflip  one whole flip, landing included
    imitate-all       at least 10 of the 15 clips to their end
    amp-walk          10 s without falling, from most of 8 places in the clip, and not on the spot

within 5, 30, 90 and 30 minutes from command to exit. Exits 1 when a run is not good, or 2 when
the machine was too busy to judge.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from etude.app import fresh
from etude.app.motion_report import MotionReport
from etude.app.run import Run
from etude.core.contracts import Array
from machine import report_load

Played = dict[str, Array]


class Goal(NamedTuple):
    """What a recipe is held to."""

    seconds: float
    reached: Callable[[Played, Played], bool]
    """Of the episodes in the physics learned in, and in checked physics."""


def walks(plain: Played, checked: Played) -> bool:
    all_the_way = plain["is_success"].all() and checked["is_success"].all()
    return bool(all_the_way and plain["mpjpe_l"].mean() <= 30.0)


def strolls(plain: Played, _: Played) -> bool:
    return bool((plain["is_success"] * (plain["travelled"] > 5.0)).mean() > 0.5)


GOALS = {
    "imitate-walk": Goal(300.0, walks),
    "imitate-backflip": Goal(1800.0, lambda plain, _: bool(plain["once"].all())),
    "imitate-all": Goal(5400.0, lambda plain, _: bool(plain["once"].sum() >= 10)),
    "amp-walk": Goal(1800.0, strolls),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="imitate-walk", choices=list(GOALS))
    parser.add_argument("--run", type=Path, help="judge this run instead of training any")
    options = parser.parse_args()
    goal = GOALS[options.recipe]
    if options.run:
        reached = judge(options.run, goal)
        print(f"train_imitation {options.recipe}: {'reached' if reached else 'not reached'}")
        return 0 if reached else 1
    idle, good = report_load(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            folder = Path(scratch) / f"seed{seed}"
            start = time.perf_counter()
            train(options.recipe, seed, folder)
            seconds = time.perf_counter() - start
            print(f"seed {seed}: {seconds:.0f} s from command to exit")
            good += judge(folder, goal) and seconds <= goal.seconds
    print(f"train_imitation {good} of {options.seeds} seeds (within {goal.seconds:.0f} s)")
    return 0 if good == options.seeds else (1 if idle else 2)


def train(recipe: str, seed: int, folder: Path) -> None:
    command = [sys.executable, "-m", "etude", "train", recipe]
    command += ["--seed", str(seed), "--folder", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def judge(folder: Path, goal: Goal) -> bool:
    """Print what became of a run."""
    print(f"  {curve(folder)}")
    plain, checked = play(folder, "fast"), play(folder, "checked")
    Console(width=160).print(MotionReport(plain).table())
    print(f"  {told(plain.episodes)}\n  checked physics: {told(checked.episodes)}", flush=True)
    return goal.reached(plain.episodes, checked.episodes)


def curve(folder: Path) -> str:
    """The evaluations of a run: at which step how much of the clips was played, and the error."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return "; ".join(
        f"{row['timesteps']:,}: {row['eval/success_rate']:.0%}, "
        f"{row['eval/mean_ep_length'] / 30:.1f} s, {row['eval/mpjpe_l']:.0f} mm"
        for row in rows
        if "eval/mpjpe_l" in row
    )


def play(folder: Path, physics: str) -> fresh.Fresh:
    """The episodes of the best policy's evaluation."""
    run = Run(folder)
    env: Any = run.recipe.env
    recipe = run.recipe.model_copy(update={"env": env.model_copy(update={"physics": physics})})
    return fresh.play(recipe, folder, recipe.evaluation.final_episodes)


def told(played: Played) -> str:
    means = {name: float(values.mean()) for name, values in played.items()}
    return (
        f"{means['is_success']:.0%} to the end, {means['success_25']:.0%} within 0.25 m; once "
        f"through {played['once'].sum():.0f} of {len(played['once'])}, within 0.25 m "
        f"{played['once_25'].sum():.0f}; {means['length'] / 30:.1f} s, {means['travelled']:.1f} m; "
        f"mpjpe_g {means['mpjpe_g']:.1f}, mpjpe_l {means['mpjpe_l']:.1f}, "
        f"mpjpe_pa {means['mpjpe_pa']:.1f} mm, vel_dist {means['vel_dist']:.2f}, "
        f"accel_dist {means['accel_dist']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
