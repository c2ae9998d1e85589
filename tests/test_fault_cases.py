"""The first cases of every fault in tests/faults; `gates/faults/fault_cases.py` tries them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FAULTS = sorted(path.stem for path in (Path(__file__).parent / "faults").glob("[!_]*.py"))
CASES = [
    (fault, number)
    for fault in FAULTS
    for number in range(importlib.import_module(f"faults.{fault}").IN_CI)
]


@pytest.mark.rotated
@pytest.mark.parametrize(("fault", "number"), CASES)
def test_the_promise_holds(fault: str, number: int, tmp_path: Path) -> None:
    importlib.import_module(f"faults.{fault}").case(number, 0, tmp_path)
