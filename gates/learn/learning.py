"""Compare learning with and without lag, V-trace and priorities, at equal environment steps.

    python -m gates.learn.learning [--recipes reach pick-place] [--seeds 10 5] [--out FILE]

Trains every variant with every seed, and scores the success rate of training episodes by
- the steps until it first reaches 80 % (a run that never does counts as its whole budget), and
- the area under its curve: the mean success rate over all steps of the run.
The rate counts as 0 until as many episodes as environments have ended: the first that end are the
successful ones, and would make any policy look good.
The end of a run is not compared, since every variant ends near 100 %. Differences are paired by
seed, with 95 % intervals (Student's t). Finished runs are kept in FILE, so that an
interrupted gate continues.

The default must not have a smaller area, beyond the interval, than its alternative: V-trace than
GAE with lag 1, uniform than prioritised draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from gates.lib.command import etude
from gates.lib.compare import half_width
from gates.lib.report import Gate, parse

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
"""(A, B): the differences B - A are printed; the first two are judged."""
JUDGED = 2
ENOUGH = 0.8
ROW_STEPS = 4096
"""Environment steps of a log row, the resolution of the scores."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["reach", "pick-place"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 5], help="of each recipe")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--out", type=Path, default=Path("learning.json"))
    parser.add_argument("--set", nargs=2, action="append", default=[], help="a field of all runs")
    parser.add_argument("--most", type=float, default=0.0, help="bound of the margins")
    with tempfile.TemporaryDirectory() as scratch:
        # Trained for seconds: only completion is judged, not learning.
        smallest = {"recipes": ["reach"], "seeds": [2], "most": 1.0}
        smallest |= {"variants": list(PAIRS[1]), "out": Path(scratch) / "learning.json"}
        smallest |= {"set": [["--clock.total-timesteps", "4096"]]}
        options = parse(parser, smallest, arguments)
        needs = {"trainings": sum(options.seeds) * len(options.variants)}
        with Gate("learning", options, needs=needs, variant=" ".join(options.recipes)) as gate:
            measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    per_recipe = list(zip(options.recipes, options.seeds, strict=True))
    wanted = [
        (recipe, variant, seed)
        for recipe, seeds in per_recipe
        for variant, seed in product(options.variants, range(seeds))
    ]
    extra = [word for pair in options.set for word in pair]
    if done.setdefault("set", extra) != extra:
        raise ValueError(f"{options.out} holds results with --set {done['set']}: name another")

    def one(job: tuple[str, str, int]) -> tuple[str, dict[str, float]]:
        name = " | ".join(map(str, job))
        return name, done[name] if name in done else train(gate, *job, extra)

    with ThreadPoolExecutor(options.jobs) as pool:
        for name, scores in pool.map(one, wanted):
            gate.count("trainings")
            done[name] = scores
            options.out.write_text(json.dumps(done, indent=1) + "\n")
            print(f"{name}: {scores}", flush=True)
    for recipe, seeds in per_recipe:
        compare(gate, recipe, seeds, options, done)


def train(gate: Gate, recipe: str, variant: str, seed: int, extra: list[str]) -> dict[str, float]:
    """Train by the real command in its own process; return the scores."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        options = [*VARIANTS[variant], "--seed", str(seed), "--folder", str(folder)]
        options += ["--collector.threads", "1", "--evaluation.every", "never"]
        options += ["--evaluation.final-episodes", "0", *extra]
        sizes = json.loads(etude(gate, "plan", recipe, "--json", *extra))["geometry"]
        options += ["--clock.iterations", str(max(ROW_STEPS // sizes["buffer_steps"], 1))]
        etude(gate, "train", recipe, *options)
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
    gate: Gate, recipe: str, seeds: int, options: argparse.Namespace, done: dict[str, Any]
) -> None:
    """Print and keep a recipe's scores, and judge whether defaults are worse than alternatives."""
    variants = options.variants

    def of(variant: str, score: str) -> np.ndarray:
        return np.array([done[f"{recipe} | {variant} | {seed}"][score] for seed in range(seeds)])

    print(f"\n{recipe}, {seeds} seeds{'':<13} steps to 80 %       area under the curve    last row")
    table = gate.details.setdefault(recipe, {})
    for name in variants:
        steps, area = of(name, "steps_to_80"), of(name, "area")
        table[name] = {"steps_to_80": steps.tolist(), "area": area.tolist()}  # one value per seed
        print(
            f"  {name:<28} {steps.mean():>9,.0f} ± {half_width(steps):>7,.0f}      "
            f"{area.mean():.3f} ± {half_width(area):.3f}       {of(name, 'last').mean():.1%}"
        )
    for i, (default, other) in enumerate(PAIRS):
        if not {default, other} <= set(variants):
            continue
        steps = of(other, "steps_to_80") - of(default, "steps_to_80")
        area = of(other, "area") - of(default, "area")
        print(
            f"  {other} less {default}: {steps.mean():+,.0f} ± {half_width(steps):,.0f} steps, "
            f"area {area.mean():+.3f} ± {half_width(area):.3f}"
        )
        if i < JUDGED:
            name = f"{recipe}: area of '{other}' over '{default}' beyond the interval"
            gate.figure(name, area.mean() - half_width(area), at_most=options.most)


if __name__ == "__main__":
    sys.exit(main())
