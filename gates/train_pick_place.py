"""`etude train pick-place` from command to exit, several seeds, and on the whole table.

    python gates/train_pick_place.py [--recipe pick-place-anywhere] [--seeds 5]

Runs the real command in a fresh process for each seed, then plays fresh episodes with the kept
policy: 100, and 500 for `pick-place-anywhere`. Prints steps and seconds to the first 80 % and 95 %
in evaluation, placement error and drop height, and the share of the time that evaluation took,
which is to stay below 10 % for `pick-place`. Exits 1 when a seed falls short, or 2 when the machine
was too busy to judge its time. `pick-place-original` and `pick-place-sac` are for comparison: they
have no goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import report_load

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=tuple(LIMITS), default="pick-place")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    judged, good = report_load(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.first, options.first + options.seeds):
            good += trial(options.recipe, seed, Path(scratch) / f"seed{seed}")
    limit, steps, episodes = LIMITS[options.recipe]
    print(
        f"train_pick_place {good} of {options.seeds} seeds of {options.recipe} (goal {SUCCESS:.0%} "
        f"of {episodes} within {steps:,} steps and {limit:.0f} s)"
    )
    return 0 if good == options.seeds else (1 if judged else 2)


def trial(recipe: str, seed: int, folder: Path) -> bool:
    """Train one seed and play fresh episodes; whether it reached the goal."""
    limit, most, episodes = LIMITS[recipe]
    start = time.perf_counter()
    etude("train", recipe, "--seed", str(seed), "--folder", str(folder))
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    testing = sum(row.get("time/test", 0.0) for row in rows) / rows[-1]["time/time_elapsed"]
    fresh = json.loads(etude("eval", str(folder), "--episodes", str(episodes), "--json"))
    print(
        f"seed {seed}: {fresh['eval/success_rate']:.1%} of {episodes} fresh episodes, "
        f"{rows[-1]['timesteps']:,} steps, {seconds:.1f} s from command to exit; first 80 % at "
        f"{first(rows, 0.8)}, first 95 % at {first(rows, 0.95)}; "
        f"placed {fresh['eval/placement_error'] * 1000:.1f} mm off, let go of "
        f"{fresh['eval/drop_height'] * 1000:.1f} mm above the table; last rollouts "
        f"{rows[-1]['rollout/success_rate']:.0%}; evaluation took {testing:.1%} of the training",
        flush=True,
    )
    if recipe in COMPARISONS:
        return True
    within = seconds <= limit and rows[-1]["timesteps"] <= most
    cheap = recipe != "pick-place" or testing < EVALUATION
    return within and cheap and fresh["eval/success_rate"] >= SUCCESS


def first(rows: list[dict[str, float]], rate: float) -> str:
    """Steps and seconds of the first evaluation with this success rate."""
    for row in rows:
        if row.get("eval/success_rate", 0.0) >= rate:
            return f"{row['timesteps']:,.0f} steps ({row['time/time_elapsed']:.0f} s)"
    return "no time"


def etude(*arguments: str) -> str:
    """The output of an etude command."""
    command = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
