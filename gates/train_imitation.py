"""`etude train imitate-walk` from the command line: does the humanoid walk, and how well.

    python gates/train_imitation.py [--seeds 3] [--recipe imitate-walk]

Each run is the plain command with nothing but the seed set. A seed is good when its best policy
plays the clip from its first frame through 10 s without falling, with a root-relative error of at
most 30 mm, within 5 minutes from command to exit, and still does not fall under checked physics:
8 substeps, another integrator, limited torques. Exits 1 when a seed is not good, or 2 when the
machine was too busy to judge.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from etude.app import fresh
from etude.app.run import Run
from machine import report_load

ERROR, SECONDS = 30.0, 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="imitate-walk")
    options = parser.parse_args()
    judged, good = report_load(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            folder = Path(scratch) / f"seed{seed}"
            start = time.perf_counter()
            train(options.recipe, seed, folder)
            seconds = time.perf_counter() - start
            print(f"seed {seed}: {seconds:.0f} s from command to exit; {curve(folder)}")
            plain, checked = play(folder, "fast"), play(folder, "checked")
            print(f"  {told(plain)}\n  checked physics: {told(checked)}", flush=True)
            walks = plain["is_success"] == 1.0 and checked["is_success"] == 1.0
            good += walks and plain["mpjpe_l"] <= ERROR and seconds <= SECONDS
    print(
        f"train_imitation {good} of {options.seeds} seeds "
        f"(goal {ERROR:.0f} mm within {SECONDS:.0f} s)"
    )
    return 0 if good == options.seeds else (1 if judged else 2)


def train(recipe: str, seed: int, folder: Path) -> None:
    command = [sys.executable, "-m", "etude", "train", recipe]
    command += ["--seed", str(seed), "--folder", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def curve(folder: Path) -> str:
    """The evaluations of a run, as steps: seconds walked and the error."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return "; ".join(
        f"{row['timesteps']:,}: {row['eval/mean_ep_length'] / 30:.1f} s, "
        f"{row['eval/mpjpe_l']:.0f} mm"
        for row in rows
        if "eval/mpjpe_l" in row
    )


def play(folder: Path, physics: str) -> dict[str, float]:
    """Means over the clips of the best policy's evaluation, {name: value}."""
    run = Run(folder)
    env: Any = run.recipe.env
    recipe = run.recipe.model_copy(update={"env": env.model_copy(update={"physics": physics})})
    played = fresh.play(recipe, folder, recipe.evaluation.episodes)
    return {name: float(values.mean()) for name, values in played.episodes.items()}


def told(played: dict[str, float]) -> str:
    return (
        f"{played['is_success']:.0%} to the end, {played['success_25']:.0%} within 0.25 m, "
        f"{played['length'] / 30:.1f} s; mpjpe_g {played['mpjpe_g']:.1f}, "
        f"mpjpe_l {played['mpjpe_l']:.1f}, mpjpe_pa {played['mpjpe_pa']:.1f} mm, "
        f"vel_dist {played['vel_dist']:.2f}, accel_dist {played['accel_dist']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
