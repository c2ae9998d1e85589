"""Cause passing faults of Ray workers; the run must equal the local one, bit for bit.

    python -m gates.faults.ray_transients [--recipe reach-at-scale] [--moments 50]

Trains the recipe's short preset on a Ray cluster on 127.0.0.1, again and again. In every run some
calls raise an error, some environments do, some workers are ten times slower than they were, and
some broadcasts are lost before they are fetched. Each run's SHA-256 over weights, optimizer,
normaliser, snapshots and metrics.jsonl must equal that of a run on one local thread.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import etude
import ray_moods
from etude.core.contracts import Fragment
from etude.planning.recipe import Recipe
from etude.planning.resolve import resolve
from etude.training.loop import Callback, Context
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse
from ray_nodes import start
from short_recipes import find

ITERATIONS = 10
WITHIN = range(1, 7)
"""Iterations after which a fault is set, so that a worker has it before the run ends."""


class Moments(Callback):
    """Set faults of workers after given iterations."""

    def __init__(self, kinds: dict[int, str]) -> None:
        self.kinds = kinds

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        iteration = context.clock.now.iterations
        if iteration in self.kinds:
            ray_moods.put(self.kinds[iteration], iteration)


def short(name: str) -> Recipe:
    recipe = find(f"{name}-short")
    steps = ITERATIONS * resolve(recipe).loops.steps_per_iteration
    return recipe.replace("clock.total_timesteps", steps)


def placed(recipe: Recipe, **collector: Any) -> Recipe:
    return recipe.replace(**{f"collector__{name}": value for name, value in collector.items()})


def judge(gate: Gate, options: argparse.Namespace, scratch: Path) -> None:
    recipe = short(options.recipe)
    reference = fingerprint(etude.train(placed(recipe, threads=1), scratch / "untouched").path)
    print(f"untouched {recipe.name}: {reference}", flush=True)
    os.chdir(scratch)  # Actors look for faults in the driver's working directory.
    cluster, chance, differ = start(2), random.Random(options.seed), 0
    ray = {"kind": "ray", "threads": 1, "actors": 2, "address": cluster.address}
    while gate.counts["moments"] < options.moments and not gate.failures:
        most = min(len(ray_moods.KINDS), options.moments - gate.counts["moments"])
        kinds = chance.sample(sorted(ray_moods.KINDS), most)
        moments = dict(zip(sorted(chance.sample(WITHIN, most)), kinds, strict=True))
        with ray_moods.moody():
            path = scratch / f"run{gate.counts['runs']}"
            run = etude.train(placed(recipe, **ray), path, callbacks=[Moments(moments)])
        if ray_moods.left():
            gate.fail(f"no worker had {', '.join(ray_moods.left())}")
        result = fingerprint(run.path)
        for kind in kinds:
            gate.count(ray_moods.KINDS[kind])
        gate.count("moments", most)
        gate.count("runs")
        differ += result != reference
        verdict = "equal" if result == reference else f"DIFFERENT: {result}"
        restarts = run.rows()[-1]["system/restarts"]
        print(f"run {gate.counts['runs']:3d}  {moments}, {restarts:.0f} replaced  {verdict}")
    cluster.shutdown()
    gate.figure("runs that differ", differ, at_most=0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale")
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, smallest={"moments": 4}, arguments=arguments)
    needs = {"moments": options.moments, "runs": 1}
    needs |= {name: 1 for name in ray_moods.KINDS.values() if options.moments >= 4}
    with (
        tempfile.TemporaryDirectory() as scratch,
        Gate("ray_transients", options, needs=needs, rows=(23,), variant=options.recipe) as gate,
    ):
        judge(gate, options, Path(scratch))
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
