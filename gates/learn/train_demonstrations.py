"""Skills from demonstrations and from a teacher, at full length.

    python -m gates.learn.train_demonstrations --part states [--seeds 1]
    python -m gates.learn.train_demonstrations --part pictures [--seeds 2]
    python -m gates.learn.train_demonstrations --part rlpd [--seeds 3]
    python -m gates.learn.train_demonstrations --part student [--seeds 1]

Records and trains by the real commands, then plays 200 fresh episodes.

states    200 demonstrations of pick-and-place with cube and target anywhere in 20 x 20 cm, cloned
          from states: 90 % must succeed, after 5 minutes from command to exit.
pictures  the same from images of 84 pixels and the state of the arm, without the positions of cube
          and target: 60 % after 60 minutes. The same policy with black images must stay below
          15 %.
rlpd      50 demonstrations, without shaped rewards: RLPD must succeed 10 points more often than SAC
          alone after the same number of environment steps.
student   a Go1 on rough ground that observes only its joints and its trunk, with a teacher that
          also observes velocities, contacts and heights: it must keep 85 % of the teacher's return
          and of the tiles that the teacher walks. --teacher RUN uses a trained teacher.

Datasets and runs are kept in --folder and used again, so that a part can be spread over several
days.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import etude
from gates.learn.train import played, tiles
from gates.lib.command import etude as command
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

BLACK, GAIN, KEPT = 0.15, 0.1, 0.85
Part = Callable[[Gate, argparse.Namespace], None]
SHOWN = ("--fail-share", "0", "--noise", "0", "0.2", "0.4", "--labels", "intended")
"""Demonstrations that all succeed, of an expert with noise on its actions; the labels are the
actions without noise."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=tuple(PARTS), default="states")
    parser.add_argument("--seeds", type=int, help="default 1; 2 of pictures, 3 of rlpd")
    parser.add_argument("--demonstrations", type=int, default=200, help="of states and pictures")
    parser.add_argument("--episodes", type=int, default=200, help="played by every policy")
    parser.add_argument("--teacher", type=Path, help="a run of a teacher of --part student")
    parser.add_argument("--folder", type=Path, default=Path("runs/train_demonstrations"))
    parser.add_argument("--success", type=float, help="default what the part must reach")
    parser.add_argument("--short", action="store_true", help="train for seconds only")
    with tempfile.TemporaryDirectory() as scratch:
        # Trained for seconds: only completion is judged, not learning.
        smallest: dict[str, Any] = {"seeds": 1, "demonstrations": 4, "episodes": 4, "success": 0.0}
        smallest |= {"folder": Path(scratch), "short": True}
        options = parse(parser, smallest, arguments)
        options.seeds = options.seeds or {"pictures": 2, "rlpd": 3}.get(options.part, 1)
        needs = {"trainings": options.seeds * (2 if options.part == "rlpd" else 1)}
        with Gate("train_demonstrations", options, needs=needs, variant=options.part) as gate:
            report_load(gate)
            options.folder.mkdir(parents=True, exist_ok=True)
            PARTS[options.part](gate, options)
    return gate.code


def cloning(recipe: str, pixels: int, success: float, seconds: float) -> Part:
    """A part that clones demonstrations, from images of `pixels` or, if 0, from states."""

    def part(gate: Gate, options: argparse.Namespace) -> None:
        flags = ("--image-size", str(pixels), *SHOWN)
        data = recorded(gate, options, "pick-place-bc", f"{pixels}-pixels", *flags)
        least = success if options.success is None else options.success
        for seed in range(options.seeds):
            run = trained(gate, options, recipe, seed, "--algorithm.dataset", str(data))
            found = played(gate, run, options.episodes)
            gate.figure(f"success of seed {seed}", found["eval/success_rate"], at_least=least)
            if pixels:
                blind = in_the_dark(run, options.episodes)
                gate.figure(f"black pictures, success of seed {seed}", blind, at_most=BLACK)
            seconds_of(gate, run, seed, seconds)

    return part


def rlpd(gate: Gate, options: argparse.Namespace) -> None:
    options.demonstrations = min(options.demonstrations, 50)
    flags = ("--fail-share", "0", "--image-size", "0", "--reward", "task")
    data = recorded(gate, options, "pick-place-rlpd", "rewarded", *flags)
    steps = etude.recipes.find("pick-place-rlpd").clock.total_timesteps
    alone = ("--env.shaping", "0", "--clock.total-timesteps", str(steps))
    found: dict[str, list[float]] = {"pick-place-rlpd": [], "pick-place-sac": []}
    for seed in range(options.seeds):
        for recipe, more in (
            ("pick-place-rlpd", ("--algorithm.dataset", str(data))),
            ("pick-place-sac", alone),
        ):
            run = trained(gate, options, recipe, seed, *more)
            found[recipe].append(played(gate, run, options.episodes)["eval/success_rate"])
            gate.figure(f"{recipe}, success of seed {seed}", found[recipe][-1])
            if recipe == "pick-place-rlpd":
                seconds_of(gate, run, seed, None)
    gain = float(np.mean(found["pick-place-rlpd"]) - np.mean(found["pick-place-sac"]))
    least = GAIN if options.success is None else options.success
    gate.figure("success of RLPD beyond SAC's", gain, at_least=least)


def student(gate: Gate, options: argparse.Namespace) -> None:
    teacher = options.teacher
    if teacher is None:
        knows = ("--env.no-observe-velocity", "--policy.actor-reads", "state,scan,critic")
        teacher = trained(gate, options, "walk-go1-rough", 0, *knows, counts=False)
    best = played(gate, teacher, options.episodes)
    walked = tiles(teacher)
    gate.figure("return of the teacher", best["eval/mean_reward"])
    gate.figure("share of tiles walked by the teacher", walked)
    least = KEPT if options.success is None else options.success
    for seed in range(options.seeds):
        more = ("--algorithm.teacher", str(teacher))
        run = trained(gate, options, "walk-go1-student", seed, *more)
        kept = played(gate, run, options.episodes)["eval/mean_reward"] / best["eval/mean_reward"]
        judged = None if options.short else least
        gate.figure(f"share of the return kept by seed {seed}", kept, at_least=judged)
        share = tiles(run) / walked if walked else 0.0
        gate.figure(f"share of the tiles kept by seed {seed}", share, at_least=judged)
        seconds_of(gate, run, seed, None)


PARTS: dict[str, Part] = {
    "states": cloning("pick-place-bc", 0, 0.9, 300.0),
    "pictures": cloning("pick-place-pictures", 84, 0.6, 3600.0),
    "rlpd": rlpd,
    "student": student,
}


def recorded(gate: Gate, options: argparse.Namespace, recipe: str, name: str, *flags: str) -> Path:
    """The folder of a dataset of demonstrations, recorded if it is missing."""
    folder: Path = options.folder / f"{name}-{options.demonstrations}"
    if not folder.exists():
        number = str(options.demonstrations)
        command(gate, "data", "record", recipe, str(folder), "--episodes", number, *flags)
    return folder


def trained(
    gate: Gate,
    options: argparse.Namespace,
    recipe: str,
    seed: int,
    *flags: str,
    counts: bool = True,
) -> Path:
    """The folder of a run of a recipe, which is trained or resumed if it is not complete."""
    run: Path = options.folder / f"{recipe}-{options.demonstrations}-{seed}"
    begin = time.perf_counter()
    if not run.exists():
        short = SHORT[recipe] if options.short else ()
        command(gate, "train", recipe, "--seed", str(seed), "--folder", str(run), *flags, *short)
        took(run).write_text(json.dumps(time.perf_counter() - begin))
    elif not (run / "summary.json").exists():
        command(gate, "resume", str(run))
    if counts:
        gate.count("trainings")
    return run


CLONED = (
    *("--clock.epochs", "1", "--algorithm.train-batches", "2"),
    *("--evaluation.final-episodes", "0"),
)
SHORT = {
    "pick-place-bc": CLONED,
    "pick-place-pictures": CLONED,
    "pick-place-rlpd": ("--clock.total-timesteps", "2560"),
    "pick-place-sac": ("--clock.total-timesteps", "2560"),
    "walk-go1-rough": ("--clock.total-timesteps", "24576"),
    "walk-go1-student": ("--clock.total-timesteps", "24576"),
}
"""{recipe: options of a training of seconds}."""


def took(run: Path) -> Path:
    """The file with the seconds from command to exit of a run that was not interrupted."""
    return run.with_suffix(".seconds.json")


def seconds_of(gate: Gate, run: Path, seed: int, most: float | None) -> None:
    """Add the seconds of a training; of an interrupted one, the sum of its parts."""
    if took(run).exists():
        seconds = json.loads(took(run).read_text())
    else:
        rows = (run / "metrics.jsonl").read_text().splitlines()
        seconds = json.loads(rows[-1])["time/time_elapsed"]
    gate.figure(f"seconds of seed {seed}", seconds, at_most=most, timing=True)


def in_the_dark(run: Path, episodes: int) -> float:
    """The success rate of a policy on black images."""
    kept = etude.Run(run)
    policy = kept.policy()
    env = etude.make_vec(kept.recipe.task, min(episodes, 50), observations=None)
    succeeded = 0
    rounds = -(-episodes // env.num_envs)
    for number in range(rounds):
        obs, _ = env.reset(seed=1_000_000 + number)
        policy.reset()
        done = np.zeros(env.num_envs, bool)
        while not done.all():
            shown = {**obs, "image": np.zeros_like(obs["image"])}
            obs, _, _, _, infos = env.step(policy.act(shown))
            if "final_info" in infos:
                first = infos["_final_info"] & ~done
                succeeded += int(infos["final_info"]["is_success"][first].sum())
                done |= first
    env.close()
    return succeeded / (rounds * env.num_envs)


if __name__ == "__main__":
    sys.exit(main())
