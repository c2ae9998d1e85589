"""Row 22: one damaged byte in any file of a run."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from damage_cases import RECIPES, DamagedRuns, in_process

FOLDERS = {"replay": "replay", "dataset": "data"}


@pytest.mark.parametrize("name", RECIPES)
def test_one_damaged_byte_in_every_file_of_a_run(name: str, tmp_path: Path) -> None:
    """It is resumed to the same bits from what is whole, or it is said what is lost."""
    runs, outcomes = DamagedRuns(tmp_path, RECIPES[name]), Counter[str]()
    files = runs.files if name == "on-policy" else _one_of_each(runs.files, FOLDERS[name])
    for number, file in enumerate(files):
        chance = random.Random(f"{name}-{number}")
        kind = chance.choice(["byte", "byte", "byte", "cut", "missing"])
        runs.damage(file, kind, chance)
        try:
            outcomes[runs.judge(file, in_process)] += 1
        except Exception as error:
            raise AssertionError(f"{file}, {kind}: {error}") from error
    assert outcomes.total() == len(files) >= 4
    if name == "on-policy":
        assert outcomes["equal"] > len(files) / 2


def _one_of_each(files: list[Path], folder: str) -> list[Path]:
    """What only this run has: of files that are numbered, the last."""
    return list({re.sub(r"\d+", "", str(f)): f for f in files if folder in f.parts}.values())
