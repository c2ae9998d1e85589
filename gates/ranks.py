"""Kill learner ranks all the time; the run must equal that of one process, bit for bit.

    python gates/ranks.py [--recipe reach-at-scale-short] [--shards 4] [--kills 10]

Trains the recipe with so many shards in one process, on 2 and on 4 ranks, and again and again while
SIGKILL ends a random rank at a random time; every attempt continues with another number of ranks.
Each run's SHA-256 over weights, optimizer, normaliser, snapshots and metrics.jsonl is held against
that of one process, and every rank that was left must have ended by itself, with exit code 1.
Exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from etude.app import recipes
from results import fingerprint

DRIVER = Path(__file__).parents[1] / "tests" / "rank_driver.py"


def judge(options: argparse.Namespace, scratch: Path) -> int:
    recipe = recipes.find(options.recipe)
    learner = recipe.learner.model_copy(update={"shards": options.shards})
    file = scratch / "recipe.yaml"
    file.write_text(recipes.dump(recipe.model_copy(update={"learner": learner})))
    arguments = [str(file), str(scratch), str(options.kills), str(options.seed)]
    done = subprocess.run([sys.executable, str(DRIVER), *arguments], stdout=subprocess.PIPE)
    if done.returncode:
        print(f"ranks {recipe.name}: FAILED, the driver ended with {done.returncode}")
        return 1
    result = json.loads(done.stdout)
    reference, failures = fingerprint(result["runs"][0]), 0
    for run in result["runs"]:
        found = fingerprint(run)
        failures += found != reference
        print(f"{Path(run).name:<12} {found}  {'equal' if found == reference else 'DIFFERENT'}")
    for hit in result["hits"]:
        left = [code for rank, code in enumerate(hit["codes"]) if rank != hit["rank"]]
        failures += set(left) != {1}
        print(
            f"killed rank {hit['rank']} of {hit['ranks']} (rank 0: {hit['phase']}); the others "
            f"ended with {left} after {hit['seconds']:.2f} s"
        )
    slowest = max((hit["seconds"] for hit in result["hits"]), default=0.0)
    print(
        f"ranks {recipe.name}, {options.shards} shards: {len(result['hits'])} kills, "
        f"{len(result['runs'])} runs, the last rank ended at most {slowest:.2f} s after a kill: "
        f"{'FAILED' if failures else 'all equal'}"
    )
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale-short")
    parser.add_argument("--shards", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return judge(options, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
