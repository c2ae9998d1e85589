"""What lag, V-trace and priorities cost or gain in learning, at equal environment steps.

    python gates/learning.py [--recipes reach pick-place] [--seeds 10 5] [--jobs 2] [--out FILE]

Trains every variant with every seed, and scores the success rate of training episodes by
- the steps until it first reaches 80 % (a run that never does counts as its whole budget), and
- the area under its curve: the mean success rate over all steps of the run.
Rows count from the time as many episodes as environments have finished: those that finish first
are the successful ones, and would make any policy look good. Before it the rate counts as 0.
The end of a run is not compared, since every variant ends near 100 %. Differences are paired by
seed, with 95 % intervals (Student's t). What is finished is kept in FILE, so a gate that was
stopped goes on where it was.

Exits 1 where a variant that is the default has the smaller area, beyond its interval, than the
alternative beside it: V-trace than GAE under lag 1, or uniform than prioritised draws.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

from results import half_width

VARIANTS: dict[str, tuple[str, ...]] = {
    "lag 0": (),
    "lag 1, GAE": ("--collector.lag", "1", "--algorithm.advantages", "gae"),
    "lag 1, V-trace": ("--collector.lag", "1", "--algorithm.advantages", "vtrace"),
    "lag 0, prioritised": ("--algorithm.sampling", "prioritised"),
    "lag 1, V-trace, prioritised": (
        *("--collector.lag", "1", "--algorithm.advantages", "vtrace"),
        *("--algorithm.sampling", "prioritised"),
    ),
}
PAIRS = (
    ("lag 1, V-trace", "lag 1, GAE"),
    ("lag 0", "lag 0, prioritised"),
    ("lag 1, V-trace", "lag 1, V-trace, prioritised"),
    ("lag 0", "lag 1, V-trace"),
)
"""(A, B): B less A is reported; the first two are judged."""
JUDGED = 2
ENOUGH = 0.8
ROW_STEPS = 4096
"""Environment steps of a log row, the resolution of the scores."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["reach", "pick-place"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 5], help="of each recipe")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--out", type=Path, default=Path("learning.json"))
    parser.add_argument("--set", nargs=2, action="append", default=[], help="a field of all runs")
    options = parser.parse_args()
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    todo = [
        (recipe, variant, seed)
        for recipe, seeds in zip(options.recipes, options.seeds, strict=True)
        for variant, seed in product(options.variants, range(seeds))
        if f"{recipe} | {variant} | {seed}" not in done
    ]
    extra = [word for pair in options.set for word in pair]
    if done.setdefault("set", extra) != extra:
        parser.error(f"{options.out} holds results with --set {done['set']}: name another --out")

    def one(job: tuple[str, str, int]) -> tuple[str, dict[str, float]]:
        return " | ".join(map(str, job)), train(*job, extra)

    with ThreadPoolExecutor(options.jobs) as pool:
        for name, scores in pool.map(one, todo):
            done[name] = scores
            options.out.write_text(json.dumps(done, indent=1) + "\n")
            print(f"{name}: {scores}", flush=True)
    bad = [
        sentence
        for recipe, seeds in zip(options.recipes, options.seeds, strict=True)
        for sentence in compare(recipe, seeds, options.variants, done)
    ]
    for sentence in bad:
        print(sentence)
    print(f"learning: {len(done) - 1} trainings, {len(bad)} defaults worse than their alternative")
    return 1 if bad or len(done) < 2 else 0


def train(recipe: str, variant: str, seed: int, extra: list[str]) -> dict[str, float]:
    """One training by the real command, in a process of its own: its scores."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        options = [*VARIANTS[variant], "--seed", str(seed), "--folder", str(folder)]
        options += ["--collector.threads", "1", "--evaluation.every", "never"]
        options += ["--evaluation.final-episodes", "0", *extra]
        base = [sys.executable, "-m", "etude"]
        plan = subprocess.run(
            [*base, "plan", recipe, "--json", *extra], check=True, capture_output=True, text=True
        )
        sizes = json.loads(plan.stdout)["geometry"]
        options += ["--clock.iterations", str(max(ROW_STEPS // sizes["buffer_steps"], 1))]
        subprocess.run([*base, "train", recipe, *options], check=True, capture_output=True)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = np.array([row.get("rollout/success_rate", 0.0) for row in rows])
    curve[[row["episodes"] < sizes["environments"] for row in rows]] = 0.0
    at = np.array([row["timesteps"] for row in rows])
    reached = at[curve >= ENOUGH]
    return {
        "steps_to_80": float(reached[0] if len(reached) else at[-1]),
        "area": float(np.average(curve, weights=np.diff(at, prepend=0))),
        "last": float(curve[-1]),
        "clip_fraction": float(np.nanmean([r.get("train/clip_fraction", np.nan) for r in rows])),
    }


def compare(
    recipe: str, seeds: int, variants: list[str], done: dict[str, dict[str, float]]
) -> list[str]:
    """Print a recipe's tables; sentences about defaults that are worse than their alternative."""

    def of(variant: str, score: str) -> np.ndarray:
        return np.array([done[f"{recipe} | {variant} | {seed}"][score] for seed in range(seeds)])

    print(f"\n{recipe}, {seeds} seeds{'':<13} steps to 80 %       area under the curve    last row")
    for name in variants:
        steps, area = of(name, "steps_to_80"), of(name, "area")
        print(
            f"  {name:<28} {steps.mean():>9,.0f} ± {half_width(steps):>7,.0f}      "
            f"{area.mean():.3f} ± {half_width(area):.3f}       {of(name, 'last').mean():.1%}"
        )
    bad = []
    for i, (default, other) in enumerate(PAIRS):
        if not {default, other} <= set(variants):
            continue
        steps = of(other, "steps_to_80") - of(default, "steps_to_80")
        area = of(other, "area") - of(default, "area")
        print(
            f"  {other} less {default}: {steps.mean():+,.0f} ± {half_width(steps):,.0f} steps, "
            f"area {area.mean():+.3f} ± {half_width(area):.3f}"
        )
        if i < JUDGED and area.mean() > half_width(area):
            bad.append(f"{recipe}: '{other}' is better than the default '{default}'.")
    return bad


if __name__ == "__main__":
    sys.exit(main())
