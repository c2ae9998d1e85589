"""`etude train pick-place` from command to exit, several seeds, and on the whole table.

    python gates/train_pick_place.py [--recipe pick-place-anywhere] [--seeds 5]

Runs the real command in a fresh process for each seed, then plays fresh episodes with the kept
policy: 100, and 500 for `pick-place-anywhere`. Prints steps and seconds to the first 80 % and 95 %
in evaluation, placement error and drop height, and the share of the time that evaluation took,
which is to stay below 10 % for `pick-place`. `pick-place-original` and `pick-place-sac` are for
comparison: they have no goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from command import etude
from machine import report_load
from report import Gate, parse

SUCCESS = 0.95
EVALUATION = 0.1
"""Largest share of the time of `pick-place` that evaluation may take."""
LIMITS = {
    "pick-place": (60.0, 200_000, 100),
    "pick-place-anywhere": (45 * 60.0, 5_000_000, 500),
    "pick-place-original": (float("inf"), 200_000, 100),
    "pick-place-sac": (float("inf"), 200_000, 100),
}
"""Seconds, environment steps, and fresh episodes."""
COMPARISONS = ("pick-place-original", "pick-place-sac")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=tuple(LIMITS), default="pick-place")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--timesteps", type=int, help="default the recipe's own")
    parser.add_argument("--success", type=float, default=SUCCESS, help="of every seed, at least")
    # Trained for a second: it must complete and be played, whatever it has learned.
    options = parse(parser, {"seeds": 1, "timesteps": 4_096, "success": 0.0}, arguments)
    if options.recipe in COMPARISONS:
        options.success = 0.0
    needs = {"trainings": options.seeds}
    with Gate("train_pick_place", options, needs=needs, variant=options.recipe) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.first, options.first + options.seeds):
                trial(gate, seed, options, Path(scratch) / f"seed{seed}")
    return gate.code


def trial(gate: Gate, seed: int, options: argparse.Namespace, folder: Path) -> None:
    """Train one seed and play fresh episodes."""
    limit, most, episodes = LIMITS[options.recipe]
    start = time.perf_counter()
    chosen = [options.recipe, "--seed", str(seed), "--folder", str(folder)]
    if options.timesteps:
        chosen += ["--clock.total-timesteps", str(options.timesteps)]
    etude(gate, "train", *chosen)
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    testing = sum(row.get("time/test", 0.0) for row in rows) / rows[-1]["time/time_elapsed"]
    fresh = json.loads(etude(gate, "eval", str(folder), "--episodes", str(episodes), "--json"))
    print(
        f"seed {seed}: {fresh['eval/success_rate']:.1%} of {episodes} fresh episodes, "
        f"{rows[-1]['timesteps']:,} steps, {seconds:.1f} s from command to exit; first 80 % at "
        f"{first(rows, 0.8)}, first 95 % at {first(rows, 0.95)}; "
        f"placed {fresh['eval/placement_error'] * 1000:.1f} mm off, let go of "
        f"{fresh['eval/drop_height'] * 1000:.1f} mm above the table; last rollouts "
        f"{rows[-1].get('rollout/success_rate', 0.0):.0%}; "
        f"evaluation took {testing:.1%} of the training",
        flush=True,
    )
    gate.count("trainings")
    gate.details[f"seed {seed}"] = {
        "placement_error": fresh["eval/placement_error"],
        "steps_to_80": first_row(rows, 0.8).get("timesteps"),
    }
    success = fresh["eval/success_rate"]
    gate.figure(f"success of seed {seed}", success, at_least=options.success)
    gate.figure(f"steps of seed {seed}", rows[-1]["timesteps"], at_least=1, at_most=most)
    gate.figure(f"seconds of seed {seed}", seconds, at_most=limit, timing=True)
    share = EVALUATION if options.recipe == "pick-place" else None
    gate.figure(f"share of evaluation of seed {seed}", testing, at_most=share, timing=True)


def first(rows: list[dict[str, float]], rate: float) -> str:
    """Steps and seconds of the first evaluation with this success rate."""
    row = first_row(rows, rate)
    return f"{row['timesteps']:,.0f} steps ({row['time/time_elapsed']:.0f} s)" if row else "no time"


def first_row(rows: list[dict[str, float]], rate: float) -> dict[str, float]:
    """The first row whose evaluation has this success rate; empty if none has."""
    return next((row for row in rows if row.get("eval/success_rate", 0.0) >= rate), {})


if __name__ == "__main__":
    sys.exit(main())
