"""A quadruped that walks, and one that walks disturbed.

    python gates/train_walk.py [--seeds 3] [--recipe walk-go1]
    python gates/train_walk.py --recipe walk-go1-robust --seeds 1
    python gates/train_walk.py --recipe walk-go1-rough --seeds 1 [--flat RUN]

Trains by the real command and plays 200 fresh episodes of 10 s, undisturbed and disturbed: friction
and masses off by up to 30 %, gains by up to 20 %, actions 40 ms late, pushes of 0.5 m/s every 2 to
4 s. The disturbance is the same for every policy.

walk-go1 must not fall in 99 % of undisturbed episodes, and follow planar velocities within 0.12 m/s
and turning rates within 0.15 rad/s, beyond the first second after each change of command (0.2 and
0.3 with it), within 10 minutes from command to exit. walk-go1-robust may lose 5 points of success
by the disturbance. walk-go1-rough is not judged: on how many of the 40 tiles (8 levels of 5 kinds)
most of its episodes succeed is a figure, and the same of a policy that was trained on flat ground.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command import etude
from machine import report_load
from report import Gate, parse

SECONDS = 600.0
ERRORS = {
    "settled_velocity_error": 0.12,
    "settled_turning_error": 0.15,
    "velocity_error": 0.2,
    "turning_error": 0.3,
}
"""m/s and rad/s, at most."""
QUIET = (
    *("--env.random.joint-offset", "0", "--env.noise.gyro", "0", "--env.noise.gravity", "0"),
    *("--env.noise.velocity", "0", "--env.noise.joint-position", "0"),
    *("--env.noise.joint-velocity", "0", "--env.random.added-mass", "0", "0"),
)
"""None of what only the training of a randomised policy has."""
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
"""What walk-go1-rough has and walk-go1 has not."""
LOSS = 0.05
"""More falls by the disturbance, as a share, for a policy trained with randomisation."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--recipe", choices=("walk-go1", "walk-go1-robust", "walk-go1-rough"), default="walk-go1"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--timesteps", type=int, help="default the recipe's own")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--flat", type=Path, help="a run of walk-go1, to walk on rough ground")
    parser.add_argument("--success", type=float, default=0.99, help="of every seed, at least")
    # Trained for seconds: it must complete and be played, whatever it has learned.
    smallest = {"seeds": 1, "timesteps": 24_576, "episodes": 8, "success": 0.0}
    options = parse(parser, smallest, arguments)
    options.judged = not options.timesteps and options.recipe != "walk-go1-rough"
    needs = {"trainings": options.seeds, "episodes": 2 * options.seeds * options.episodes}
    with Gate("train_walk", options, needs=needs, variant=options.recipe) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.first, options.first + options.seeds):
                trial(gate, seed, options, Path(scratch) / f"seed{seed}")
    return gate.code


def trial(gate: Gate, seed: int, options: argparse.Namespace, folder: Path) -> None:
    """Train one seed and play fresh episodes, undisturbed and disturbed."""
    start = time.perf_counter()
    chosen = [options.recipe, "--seed", str(seed), "--folder", str(folder)]
    if options.timesteps:
        chosen += ["--clock.total-timesteps", str(options.timesteps)]
    etude(gate, "train", *chosen)
    seconds = time.perf_counter() - start
    gate.count("trainings")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    disturbed, plain = (
        played(gate, folder, options.episodes, changes) for changes in (DISTURBED, UNDISTURBED)
    )
    print(
        f"seed {seed}: {rows[-1]['timesteps']:,} steps, {seconds:.0f} s from command to exit; "
        f"first 90 % and 0.25 m/s {first(rows)}\n  undisturbed {said(plain)}\n"
        f"  disturbed   {said(disturbed)}",
        flush=True,
    )
    success, shaken = 1.0 - plain["eval/fell"], 1.0 - disturbed["eval/fell"]
    judged = options.judged
    robust = judged and options.recipe == "walk-go1-robust"
    walks = judged and options.recipe == "walk-go1"
    least = options.success if options.recipe == "walk-go1" else None
    gate.figure(f"without a fall of seed {seed}", success, at_least=least)
    gate.figure(f"disturbed without a fall of seed {seed}", shaken)
    loss = success - shaken
    gate.figure(f"loss by disturbance of seed {seed}", loss, at_most=LOSS if robust else None)
    for name, most in ERRORS.items():
        value = plain[f"eval/{name}"]
        gate.figure(f"{name} of seed {seed}", value, at_most=most if walks else None)
    if options.recipe == "walk-go1-rough":
        gate.figure(f"share of tiles walked by seed {seed}", tiles(folder))
        if options.flat is not None:
            played(gate, options.flat, options.episodes, ROUGH)
            gate.figure("share of tiles walked by the flat policy", tiles(options.flat))
    limit = SECONDS if walks else None
    gate.figure(f"seconds of seed {seed}", seconds, at_most=limit, timing=True)


def played(
    gate: Gate, folder: Path, episodes: int, changes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What `etude eval` says of fresh episodes."""
    said = etude(gate, "eval", str(folder), "--episodes", str(episodes), "--json", *changes)
    found: dict[str, Any] = json.loads(said)
    gate.count("episodes", int(found["eval/episodes"]))
    return found


def tiles(folder: Path) -> float:
    """The share of tiles on which most episodes of the run's newest evaluation succeeded."""
    newest = max(folder.glob("evaluations/*/episodes.csv"), key=lambda file: file.stat().st_mtime)
    found: dict[str, list[float]] = {}
    with newest.open() as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["tile"], []).append(float(row["is_success"]))
    return sum(sum(each) > len(each) / 2 for each in found.values()) / len(found)


def said(found: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {found[f'eval/{name}']:.3f}" for name in ERRORS)
    return f"{1.0 - found['eval/fell']:.1%} without a fall; {errors}"


def first(rows: list[dict[str, float]]) -> str:
    """Steps and seconds of the first evaluation in which 90 % walk within 0.25 m/s."""
    for row in rows:
        if row.get("eval/fell", 1.0) <= 0.1 and row["eval/velocity_error"] <= 0.25:
            return f"at {row['timesteps']:,.0f} steps ({row['time/time_elapsed']:.0f} s)"
    return "never"


if __name__ == "__main__":
    sys.exit(main())
