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

within 5, 30, 90 and 30 minutes from command to exit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from command import etude
from etude.api import Run
from etude.core.contracts import Array
from etude.evaluate import fresh
from etude.evaluate.motion import MotionReport
from machine import report_load
from report import Gate, parse

Played = dict[str, Array]


class Goal(NamedTuple):
    """What a recipe is held to."""

    seconds: float
    measure: str
    least: float
    reached: Callable[[Played, Played], float]
    """Of the episodes in the physics learned in, and in checked physics: the measure."""


def walks(plain: Played, checked: Played) -> float:
    all_the_way = min(plain["is_success"].mean(), checked["is_success"].mean())
    return float(all_the_way * (plain["mpjpe_l"].mean() <= 30.0))


def strolls(plain: Played, _: Played) -> float:
    return float((plain["is_success"] * (plain["travelled"] > 5.0)).mean())


GOALS = {
    "imitate-walk": Goal(300.0, "episodes walked to their end within 30 mm", 1.0, walks),
    "imitate-backflip": Goal(1800.0, "flips", 1.0, lambda plain, _: float(plain["once"].mean())),
    "imitate-all": Goal(5400.0, "clips", 10.0, lambda plain, _: float(plain["once"].sum())),
    "amp-walk": Goal(1800.0, "episodes walked to their end", 0.5 + 1e-9, strolls),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="imitate-walk", choices=list(GOALS))
    parser.add_argument("--run", type=Path, help="judge this run instead of training any")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which else are deleted")
    parser.add_argument("--set", nargs="*", default=[], help="options of the training")
    parser.add_argument("--least", type=float, help="of the recipe's measure; default its goal")
    # Trained for an iteration or two: it must complete and be played, whatever it has learned.
    short = ["--collector.num_envs", "64", "--collector.envs-per-group", "32"]
    short += ["--algorithm.minibatch-size", "512", "--clock.total-timesteps", "4096"]
    options = parse(parser, {"seeds": 1, "least": 0.0, "set": short}, arguments)
    goal = GOALS[options.recipe]
    if options.least is not None:
        goal = goal._replace(least=options.least)
    needs = {"runs played": 1 if options.run else options.seeds}
    with Gate("train_imitation", options, needs=needs, variant=options.recipe) as gate:
        report_load(gate)
        if options.run:
            judge(gate, options.run, goal, "the run")
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(0 if options.run else options.seeds):
                folder = (options.keep or Path(scratch)) / f"{options.recipe}-{seed}"
                start = time.perf_counter()
                chosen = ["--seed", str(seed), "--folder", str(folder), *options.set]
                etude(gate, "train", options.recipe, *chosen)
                seconds = time.perf_counter() - start
                print(f"seed {seed}: {seconds:.0f} s from command to exit")
                judge(gate, folder, goal, f"seed {seed}")
                gate.figure(f"seconds of seed {seed}", seconds, at_most=goal.seconds, timing=True)
    return gate.code


def judge(gate: Gate, folder: Path, goal: Goal, name: str) -> None:
    """Print what became of a run, and hold it against its goal."""
    print(f"  {curve(folder)}")
    plain, checked = play(folder, "fast"), play(folder, "checked")
    Console(width=160).print(MotionReport(plain).table())
    print(f"  {told(plain.episodes)}\n  checked physics: {told(checked.episodes)}", flush=True)
    gate.count("runs played")
    found = goal.reached(plain.episodes, checked.episodes)
    gate.figure(f"{goal.measure}, {name}", found, at_least=goal.least)
    gate.details[name] = {
        physics: played.episodes["once"].astype(float).tolist()
        for physics, played in (("fast", plain), ("checked", checked))
    }


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
    recipe = run.recipe.replace(env__physics=physics)
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
