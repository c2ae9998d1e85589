"""Kill learner ranks; the run must equal that of one process, bit for bit.

    python -m gates.exact.ranks [--recipe reach-at-scale-short] [--shards 4] [--kills 20]

Trains the recipe with `--shards` shards in one process, on 2 and on 4 ranks, and repeatedly while
SIGKILL ends a random rank at a random time; every attempt continues with another number of ranks.
Each run's SHA-256 over weights, optimizer, normaliser, snapshots and metrics.jsonl must equal that
of one process, and every remaining rank must have ended by itself, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from etude.planning import recipes
from gates import TESTS
from gates.lib.command import run
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse
from short_recipes import find

DRIVER = TESTS / "lib" / "rank_driver.py"


PATIENCE = 120.0
"""Seconds within which the remaining ranks must have ended, on a busy machine."""


def judge(gate: Gate, options: argparse.Namespace, scratch: Path) -> None:
    recipe = find(options.recipe)
    file = scratch / "recipe.yaml"
    file.write_text(recipes.dump(recipe.replace("learner.shards", options.shards)))
    arguments = [str(file), str(scratch), str(options.kills), str(options.seed)]
    result = json.loads(run(gate, [sys.executable, str(DRIVER), *arguments]))
    reference = fingerprint(result["runs"][0])
    for path in result["runs"]:
        found = fingerprint(path)
        gate.count("runs")
        print(f"{Path(path).name:<12} {found}  {'equal' if found == reference else 'DIFFERENT'}")
        if found != reference:
            gate.fail(f"{Path(path).name} differs from the run of one process")
    for hit in result["hits"]:
        left = [code for rank, code in enumerate(hit["codes"]) if rank != hit["rank"]]
        gate.count("kills")
        print(
            f"killed rank {hit['rank']} of {hit['ranks']} (rank 0: {hit['phase']}); the others "
            f"ended with {left} after {hit['seconds']:.2f} s"
        )
        if set(left) != {1}:
            gate.fail(f"ranks beside one that was killed ended with {left}")
    slowest = max(hit["seconds"] for hit in result["hits"])
    gate.figure("slowest end after a kill in seconds", slowest, at_most=PATIENCE)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale-short")
    parser.add_argument("--shards", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, {"kills": 1}, arguments)
    # The runs on 1, 2 and 4 ranks, and the killed run.
    needs = {"kills": options.kills, "runs": 4}
    with (
        Gate("ranks", options, needs=needs, rows=(9,), variant=options.recipe) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        judge(gate, options, Path(scratch))
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
