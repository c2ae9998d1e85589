"""Train the same seed on different numbers of threads and Ray actors: the runs must be equal.

    python -m gates.exact.same_bits [--recipe reach] [--seeds 20]

For every seed the short form of the recipe is trained on one thread, and again on 1, 2 and 4
threads and on 1, 2 and 4 Ray actors on this machine. The SHA-256 over weights, optimizer,
normaliser, snapshots and metrics.jsonl must be the same for all, and different for every seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import etude
from etude.planning.recipes import Recipe
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse
from gates.lib.short_runs import short_run
from ray_nodes import start


def one_run(recipe: Recipe, seed: int, folder: Path, **collector: Any) -> str:
    """The fingerprint of a run with this seed and these fields of the collector."""
    placed = {f"collector__{name}": value for name, value in collector.items()}
    return fingerprint(etude.train(recipe.replace(seed=seed, **placed), folder).path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 2, 4])
    smallest = {"recipe": "pick-place", "seeds": 2, "threads": [2], "actors": [1]}
    options = parse(parser, smallest, arguments)
    ways: list[dict[str, Any]] = [{"threads": many} for many in options.threads]
    needs = {"seeds": options.seeds, "runs": options.seeds * (1 + len(ways) + len(options.actors))}
    variant = "" if options.recipe == parser.get_default("recipe") else options.recipe
    different, seen = 0, set()
    with (
        Gate("same_bits", options, needs=needs, rows=(5,), variant=variant) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        recipe = short_run(options.recipe, gate, Path(scratch))
        cluster = start(2 * max(options.actors, default=1))
        ray = {"kind": "ray", "threads": 1, "address": cluster.address}
        ways += [{**ray, "actors": many} for many in options.actors]
        try:
            for seed in range(options.seeds):
                reference = one_run(recipe, seed, Path(scratch) / f"{seed}", threads=1)
                gate.count("runs")
                for number, way in enumerate(ways):
                    found = one_run(recipe, seed, Path(scratch) / f"{seed}-{number}", **way)
                    gate.count("runs")
                    if found != reference:
                        different += 1
                        gate.fail(f"seed {seed}, {way}: {found} instead of {reference}")
                gate.count("seeds")
                seen.add(reference)
                print(f"seed {seed}: {reference}", flush=True)
        finally:
            cluster.shutdown()
        gate.figure("runs that differ", different, at_most=0)
        gate.figure("different seeds", len(seen), at_least=options.seeds)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
