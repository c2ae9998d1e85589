"""Train a recipe by the real command, play fresh episodes and compare with bounds.

    python -m gates.learn.train reach [--seeds 3] [--keep FOLDER]
    python -m gates.learn.train walk-go1-rough [--flat RUN]
    python -m gates.learn.train imitate-all --run RUN

Each seed is `etude train RECIPE` in a fresh process; its best policy then plays fresh episodes.
`TASKS` lists the recipes with their seeds, episodes and bounds: of the success of every seed, and
of the seconds from command to exit. `--keep` keeps the runs, `--run` judges an existing one. What
is measured:

reach, seek-pictures   success in fresh episodes and in the last evaluation
cartpole, pendulum...  return in fresh episodes; `ALONE` of gates/lib/full.py lists these recipes
reach-memory           success with LSTM, and without memory, which must stay below 30 %
pick-place...          success, placement error, steps to 80 % and 95 % in evaluation, and the share
                       of the time spent in evaluation; -original has no bounds
spread                 return above random agents: the lower end of the 95 % interval
walk-go1...            falls and velocity errors, undisturbed and disturbed: friction and masses off
                       by up to 30 %, gains by up to 20 %, actions 40 ms late, pushes of 0.5 m/s;
                       -robust may lose 5 points by that; -rough also has the share of the 40 tiles
                       (8 levels of 5 kinds) on which most episodes succeed, without a bound
imitate-..., amp-walk  clips played from their first frame to their end; and what the policy asks of
                       the body: of no joint, torques may turn from one limit to the other in more
                       than 5 % of the physics steps
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import etude
from etude.core.contracts import Array
from etude.core.keys import Key
from etude.envs.probe import random_actions
from etude.evaluate import fresh
from etude.evaluate.motion import MotionReport
from gates.lib.command import etude as command
from gates.lib.full import ALONE
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

CHANCE = 0.3
"""Largest success of a policy without memory on reach-memory."""
EVALUATION = 0.1
"""Largest share of the time of pick-place spent in evaluation."""
ERRORS = {
    "settled_velocity_error": 0.12,
    "settled_turning_error": 0.15,
    "velocity_error": 0.2,
    "turning_error": 0.3,
}
"""Largest errors of walk-go1 in m/s and rad/s; "settled" leaves out 1 s after each new command."""
LOSS = 0.05
"""Largest increase of the share of falls of walk-go1-robust when disturbed."""
QUIET = (
    *("--env.random.joint-offset", "0", "--env.noise.gyro", "0", "--env.noise.gravity", "0"),
    *("--env.noise.velocity", "0", "--env.noise.joint-position", "0"),
    *("--env.noise.joint-velocity", "0", "--env.random.added-mass", "0", "0"),
)
"""Without the noise and the randomisation that only the training of walk-go1-robust has."""
UNDISTURBED = (
    *("--env.random.mass", "0", "--env.random.friction", "0", "--env.random.gains", "0"),
    *("--env.random.latency", "0", "0", "--env.random.push", "0"),
    *QUIET,
)
DISTURBED = (
    *("--env.random.mass", "0.3", "--env.random.friction", "0.3", "--env.random.gains", "0.2"),
    *("--env.random.latency", "2", "2", "--env.random.push", "0.5"),
    *("--env.random.push-every", "2", "4"),
    *QUIET,
)
ROUGH = (
    *("--env.ground", "rough", "--env.speed-x", "-1", "1", "--env.speed-y", "-0.5", "0.5"),
    *("--env.foot-height", "0.1", "--env.success-error", "0.4"),
)
"""The task of walk-go1-rough, for a policy of walk-go1."""
AGENTS = 3
"""Agents of an environment of spread, which share its reward: its episode is one sample."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One trained run, to be judged."""

    gate: Gate
    options: argparse.Namespace
    task: Task
    name: str
    """Part of the names of its figures: "seed 0" or "lstm, seed 0"."""
    folder: Path

    def rows(self) -> list[Row]:
        """The rows of its log."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def played(self, *changes: str) -> Row:
        """The metrics of fresh episodes of its best policy; changes: options of `etude eval`."""
        return played(self.gate, self.folder, self.options.episodes, changes)

    def figure(self, what: str, value: float, **bounds: Any) -> None:
        self.gate.figure(f"{what} {self.name}", value, **bounds)


def reached(trial: Trial) -> None:
    """Success in fresh episodes and in the last evaluation."""
    least, last = trial.options.least, trial.rows()[-1]
    trial.figure("success of", trial.played()["eval/success_rate"], at_least=least)
    trial.figure("last evaluation of", last["eval/success_rate"], at_least=least)


def returned(trial: Trial) -> None:
    """The mean return in fresh episodes."""
    trial.figure("return of", trial.played()["eval/mean_reward"], at_least=trial.options.least)


def remembered(trial: Trial) -> None:
    """Success with memory, and without."""
    with_memory = trial.name.startswith("lstm")
    bound = {"at_least": trial.options.least} if with_memory else {"at_most": CHANCE}
    trial.figure("success of", trial.played()["eval/success_rate"], **bound)


def placed(trial: Trial) -> None:
    """Success, accuracy, steps to a success rate and the time spent in evaluation."""
    rows, found = trial.rows(), trial.played()
    testing = sum(row.get("time/test", 0.0) for row in rows) / rows[-1]["time/time_elapsed"]

    def steps_to(rate: float) -> float | None:
        passed = (row["timesteps"] for row in rows if row.get("eval/success_rate", 0.0) >= rate)
        return next(passed, None)

    trial.gate.details[trial.name] = {
        "placement_error": found["eval/placement_error"],
        "drop_height": found["eval/drop_height"],
        "steps_to_80": steps_to(0.8),
        "steps_to_95": steps_to(0.95),
    }
    trial.figure("success of", found["eval/success_rate"], at_least=trial.options.least)
    most = EVALUATION if trial.options.recipe == "pick-place" else None
    trial.figure("share of evaluation of", testing, at_most=most, timing=True)


def beat_random(trial: Trial) -> None:
    """The return of an environment's agents beyond that of random ones."""
    trial.played()
    learned = np.array([float(row["return"]) for row in newest_episodes(trial.folder)])
    learned, chance = learned.reshape(-1, AGENTS).mean(1), at_random(trial.options.episodes)
    error = np.sqrt(sum(x.var(ddof=1) / len(x) for x in (learned, chance)))
    lower = float(learned.mean() - chance.mean() - 1.96 * error)
    print(f"{trial.name}: return {learned.mean():.2f}, of random agents {chance.mean():.2f}")
    trial.gate.figure(f"margin of {trial.name}, at least", lower, at_least=trial.options.least)


@cache
def at_random(episodes: int) -> np.ndarray:
    """Returns [episodes] of environments of spread, means over their agents, at random actions."""
    env = etude.recipes.spread().env.make(episodes)
    env.reset(Key(7))
    total = np.zeros(episodes)
    for actions in random_actions(env, env.spec.max_episode_steps or 0, Key(8)):
        total += env.step(actions).reward
    return total.reshape(-1, AGENTS).mean(1)


def walked(trial: Trial) -> None:
    """Falls and errors, undisturbed and disturbed; the tiles of rough ground."""
    options, recipe = trial.options, trial.options.recipe
    disturbed, plain = trial.played(*DISTURBED), trial.played(*UNDISTURBED)
    success, shaken = 1.0 - plain["eval/fell"], 1.0 - disturbed["eval/fell"]
    whole = not options.timesteps
    trial.figure("without a fall of", success, at_least=options.least)
    trial.figure("disturbed without a fall of", shaken)
    most = LOSS if whole and recipe == "walk-go1-robust" else None
    trial.figure("loss by disturbance of", success - shaken, at_most=most)
    for name, largest in ERRORS.items():
        most = largest if whole and recipe == "walk-go1" else None
        trial.figure(f"{name} of", plain[f"eval/{name}"], at_most=most)
    if recipe == "walk-go1-rough":
        trial.figure("share of tiles walked by", tiles(trial.folder))
        if options.flat is not None:
            played(trial.gate, options.flat, options.episodes, ROUGH)
            trial.gate.figure("share of tiles walked by the flat policy", tiles(options.flat))


def imitated(trial: Trial) -> None:
    """Episodes of every clip."""
    played = followed(trial.folder)
    report = MotionReport(played)
    Console(width=160).print(report.table())
    measure, score = SCORES[trial.options.recipe]
    found = score(played.episodes)
    trial.gate.figure(f"{measure}, {trial.name}", found, at_least=trial.options.least)
    most = REVERSALS if trial.options.least is not None else None
    reversals = float(played.episodes["reversals"].max())
    trial.gate.figure(f"reversed torques, {trial.name}", reversals, at_most=most)
    trial.gate.details[trial.name] = report.motions()


def followed(folder: Path) -> fresh.FreshEpisodes:
    """Episodes of a run's best policy, from the first frame of each clip."""
    recipe = etude.Run(folder).recipe
    return fresh.play(recipe, folder, recipe.evaluation.final_episodes)


REVERSALS = 0.05
"""Largest share of physics steps in which the full torque of a joint may turn round."""


Episodes = dict[str, Array]
"""{metric: values [episodes]}."""


def walks(played: Episodes) -> float:
    """The share of episodes that end well, if the error is at most 25 mm."""
    return float(played["is_success"].mean() * (played["mpjpe_l"].mean() <= 25.0))


SCORES: dict[str, tuple[str, Callable[[Episodes], float]]] = {
    "imitate-walk": ("episodes walked to their end within 25 mm", walks),
    "imitate-backflip": ("flips", lambda played: float(played["once"].mean())),
    "imitate-all": ("clips", lambda played: float(played["once"].sum())),
    "amp-walk": (
        "episodes walked to their end",
        lambda played: float((played["is_success"] * (played["travelled"] > 5.0)).mean()),
    ),
}
"""{recipe: (name, score of the episodes)}."""


@dataclass(frozen=True)
class Task:
    """A recipe to be trained, and its bounds."""

    gate: str
    """The name of the result."""
    judge: Callable[[Trial], None]
    least: float | None
    """Bound of what `judge` measures of every seed."""
    seconds: float | None
    """From command to exit, at most."""
    seeds: int = 3
    episodes: int = 200
    steps: tuple[float, float] | None = None
    """Environment steps that the log must report: at least, at most."""
    options: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    """{name: options of a training}: what is trained with each seed."""
    smallest: dict[str, Any] = field(default_factory=dict)
    """Options with --smallest: trained for seconds, it only must complete and be played."""


MINUTE = 60.0
SHORT = {"timesteps": 4_096}
RETURN = Task(
    "train_return",
    returned,
    least=None,
    seconds=None,
    episodes=100,
    steps=(1, math.inf),
    smallest=SHORT,
)
REACH = Task("train_reach", reached, least=0.99, seconds=MINUTE, smallest=SHORT)
PLACE = Task(
    "train_pick_place",
    placed,
    least=0.95,
    seconds=MINUTE,
    seeds=5,
    episodes=100,
    steps=(1, 200_000),
    smallest=SHORT,
)
UNBOUNDED = replace(PLACE, least=None, seconds=None, seeds=1)
WALK = Task(
    "train_walk",
    walked,
    least=0.99,
    seconds=10 * MINUTE,
    smallest={"timesteps": 24_576, "episodes": 8},
)
FEW_ENVS = ["--collector.num-envs", "64", "--collector.envs-per-group", "32"]
FEW_ENVS += ["--algorithm.minibatch-size", "512"]
IMITATE = Task(
    "train_imitation",
    imitated,
    least=1.0,
    seconds=4 * MINUTE,
    smallest={**SHORT, "set": FEW_ENVS},
)
TASKS = {
    "reach": replace(REACH, steps=(131_072, math.inf)),
    "seek-pictures": replace(
        REACH, least=0.9, seconds=10 * MINUTE, seeds=2, steps=(98_304, math.inf)
    ),
    "reach-memory": Task(
        "train_memory",
        remembered,
        least=0.9,
        seconds=10 * MINUTE,
        seeds=2,
        episodes=500,
        options={kind: ("--policy.kind", kind) for kind in ("lstm", "mlp")},
        smallest={"timesteps": 16_384, "episodes": 32},
    ),
    **dict.fromkeys(ALONE, RETURN),
    # Solved, as Gymnasium defines it.
    "cartpole": replace(RETURN, least=475.0),
    "lunarlander": replace(RETURN, least=200.0),
    "pick-place": PLACE,
    "pick-place-anywhere": replace(
        PLACE, seconds=45 * MINUTE, seeds=2, episodes=500, steps=(1, 5_000_000)
    ),
    "pick-place-original": UNBOUNDED,
    "pick-place-sac": replace(PLACE, seconds=None, steps=(1, 40_960)),
    "spread": Task(
        "train_spread",
        beat_random,
        least=0.0,
        seconds=5 * MINUTE,
        seeds=2,
        episodes=600,
        smallest={"timesteps": 6_144, "episodes": 60},
    ),
    "walk-go1": WALK,
    "walk-go1-robust": replace(WALK, least=None, seconds=None, seeds=1),
    "walk-go1-rough": replace(WALK, least=None, seconds=None, seeds=1),
    "imitate-walk": IMITATE,
    "imitate-backflip": replace(IMITATE, seconds=30 * MINUTE, seeds=1),
    "imitate-all": replace(IMITATE, least=10.0, seconds=90 * MINUTE, seeds=1),
    # More than half of the episodes, which start at 8 places in the clip.
    "amp-walk": replace(IMITATE, least=0.5 + 1e-9, seconds=30 * MINUTE, seeds=1),
}


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    task: Task = TASKS[options.recipe]
    trainings = 1 if options.run else options.seeds * len(task.options)
    # Results of a gate with one recipe have no variant.
    alone = [each.gate for each in TASKS.values()].count(task.gate) == 1
    variant = "" if alone else options.recipe
    with (
        Gate(task.gate, options, needs={"trainings": trainings}, variant=variant) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        report_load(gate)
        if options.run:
            judge(Trial(gate, options, task, "the run", options.run))
        for seed in range(options.first, options.first + (0 if options.run else options.seeds)):
            for kind, changes in task.options.items():
                name = f"{kind}, seed {seed}" if kind else f"seed {seed}"
                folder = f"{options.recipe}-{kind}{seed}"
                trial = Trial(gate, options, task, name, (options.keep or Path(scratch)) / folder)
                train(trial, "--seed", str(seed), *changes)
                judge(trial)
    return gate.code


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=TASKS)
    parser.add_argument("--seeds", type=int, help="default: that of the recipe in TASKS")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--timesteps", type=int, help="default: that of the recipe")
    parser.add_argument("--episodes", type=int, help="fresh ones; default: that in TASKS")
    parser.add_argument("--least", type=float, help="bound of every seed; default: that in TASKS")
    parser.add_argument("--set", nargs="*", default=[], help="options of the training")
    parser.add_argument(
        "--keep", type=Path, help="folder of the runs; finished ones are used again"
    )
    parser.add_argument(
        "--stopped", action="store_true", help="judge the runs in --keep as far as they are"
    )
    parser.add_argument("--run", type=Path, help="judge this run and train none")
    parser.add_argument("--flat", type=Path, help="a run of walk-go1, to walk on rough ground")
    task = TASKS[parser.parse_known_args(arguments)[0].recipe]
    parser.set_defaults(seeds=task.seeds, episodes=task.episodes, least=task.least)
    return parse(parser, {"seeds": 1, "least": -math.inf, **task.smallest}, arguments)


def train(trial: Trial, *changes: str) -> None:
    """Train by the real command; keep the seconds from command to exit, and the steps.

    A finished run that --keep has kept is not trained again, and has no seconds; with --stopped
    neither is one that was stopped.
    """
    options, start = trial.options, time.perf_counter()
    if options.timesteps:
        changes += ("--clock.total-timesteps", str(options.timesteps))
    kept = (trial.folder / "checkpoints" / ("best" if options.stopped else "final")).exists()
    if not kept:
        words = [options.recipe, "--folder", str(trial.folder), *changes, *options.set]
        command(trial.gate, "train", *words)
    seconds, steps = time.perf_counter() - start, trial.rows()[-1]["timesteps"]
    took = "kept" if kept else f"{seconds:.1f} s from command to exit"
    print(f"{trial.name}: {steps:,} steps, {took}", flush=True)
    if trial.task.steps is not None:
        least, most = trial.task.steps
        least = min(least, options.timesteps or least)
        trial.figure("steps of", steps, at_least=least, at_most=most)
    if kept:
        return
    limit = None if options.timesteps else trial.task.seconds
    trial.figure("seconds of", seconds, at_most=limit, timing=True)


def judge(trial: Trial) -> None:
    """Add the figures of a run to the gate, and print them."""
    known = set(trial.gate.figures)
    trial.task.judge(trial)
    trial.gate.count("trainings")
    new = {name: each for name, each in trial.gate.figures.items() if name not in known}
    print("  " + ", ".join(f"{name} {each['value']:.4g}" for name, each in new.items()), flush=True)


def played(gate: Gate, folder: Path, episodes: int, changes: tuple[str, ...] = ()) -> Row:
    """The metrics of `etude eval` over fresh episodes of a run's best policy."""
    words = [str(folder), "--episodes", str(episodes), "--json", *changes]
    found: Row = json.loads(command(gate, "eval", *words))
    gate.count("episodes", int(found["eval/episodes"]))
    return found


def newest_episodes(folder: Path) -> list[dict[str, str]]:
    """The rows, one for each episode, of the newest evaluation of a run."""
    files = folder.glob("evaluations/*/episodes.csv")
    with max(files, key=lambda file: file.stat().st_mtime).open() as lines:
        return list(csv.DictReader(lines))


def tiles(folder: Path) -> float:
    """The share of tiles on which most episodes of the run's newest evaluation succeeded."""
    found: dict[str, list[float]] = {}
    for row in newest_episodes(folder):
        found.setdefault(row["tile"], []).append(float(row["is_success"]))
    return sum(sum(each) > len(each) / 2 for each in found.values()) / len(found)


if __name__ == "__main__":
    sys.exit(main())
