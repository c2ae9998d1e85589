"""Runs that several ranks share, held against those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from etude.api import Run
from etude.planning import recipes
from etude.planning.recipes import Recipe
from run_hash import run_hash

TESTS = Path(__file__).parent


def script(name: str, *arguments: str) -> str:
    command = [sys.executable, str(TESTS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shared_run(recipe: Recipe, folder: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """Runs of a recipe on 1, 2 and 4 ranks, and one whose ranks are killed: all the same."""
    (folder / "recipe.yaml").write_text(recipes.dump(recipe))
    told = script("rank_driver.py", str(folder / "recipe.yaml"), str(folder), str(kills), str(seed))
    result = json.loads(told)
    one, *others = map(Path, result["runs"])
    expected, whole = run_hash(one), Run(one)
    assert len(others) >= 2 + (kills > 0)
    for other in others:
        assert run_hash(other) == expected
        assert Run(other).fingerprint() == whole.fingerprint()
        assert Run(other).summary() == whole.summary()
    for hit in result["hits"]:
        left = [code for rank, code in enumerate(hit["codes"]) if rank != hit["rank"]]
        assert left == [1] * (hit["ranks"] - 1), hit  # not 0, not killed: they said why
    return list(result["hits"])
