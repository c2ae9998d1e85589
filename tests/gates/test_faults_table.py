"""docs/faults.md says what the gates have counted, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gates.faults import fault_cases
from gates.lib import smallest
from gates.lib.full import GATES
from gates.pages import faults_table
from gates.pages.faults_table import BELOW, FAULTS, Need, cells, load, render

TESTS = Path(__file__).parents[1]


def test_the_page_is_what_the_results_make() -> None:
    assert faults_table.PAGE.read_text() == render(load()), "python -m gates.pages.faults_table"


def test_every_fault_is_there_and_names_what_exists() -> None:
    assert [fault.number for fault in FAULTS] == [*range(1, 35), 38, 39, 40]
    for fault in FAULTS:
        assert [test for test in fault.tests if not (TESTS / test).exists()] == []
        assert {need.gate for need in fault.gates} <= set(smallest.gates())
        assert not (fault.tests_are_the_gate and (fault.gates or not fault.tests))


def test_make_gate_runs_what_the_table_asks_for() -> None:
    asked = {need for fault in FAULTS for need in fault.gates if need.what != "stop"}
    for need in asked:
        calls = GATES[need.gate].calls
        if need.gate == "fault_cases":
            module = fault_cases.load(need.variant)
            assert (need.count, need.what) == (module.FULL, module.UNIT)
        elif need.variant not in faults_table.METHODS and need.count > 1:
            assert f" {need.count}" in " ".join(calls)


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        (("", ""), ""),
        (("@pytest.mark.rotated\n", ""), " (some rotate)"),
        (("@pytest.mark.rotated\n", "@pytest.mark.rotated(together=True)\n"), " (rotates)"),
        (
            ("@pytest.mark.parametrize('a', [p(1, marks=pytest.mark.rotated), 2])\n",),
            " (some rotate)",
        ),
    ],
)
def test_the_page_says_which_tests_are_not_in_every_run(
    marks: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    tests = [f"{mark}def test_{number}(): ..." for number, mark in enumerate(marks)]
    (tmp_path / "tests" / "test_a.py").write_text("\n".join(["def helper(): ...", *tests]))
    monkeypatch.setattr(faults_table, "ROOT", tmp_path)
    assert faults_table.how_often("test_a.py") == told


def test_too_few_are_named(tmp_path: Path) -> None:
    need = Need("a", 300, "kills", "reach")
    result = {"gate": "a", "variant": "reach", "verdict": "passed", "counts": {"kills": 299}}
    result |= {"smallest": False, "date": "2026-01-02T03:04:05", "commit": "abc"}

    def told(**changes: object) -> list[str]:
        (tmp_path / "a.json").write_text(json.dumps(result | changes))
        return cells(need, load(tmp_path))

    assert cells(need, {})[2] == f"not run: **{BELOW}**"
    assert told()[2:] == [f"299: **{BELOW}**", "2026-01-02", "abc"]
    assert told(counts={"kills": 300})[2] == "300"
    assert told(counts={"kills": 300}, verdict="FAILED")[2] == "300 (FAILED)"
    assert BELOW in told(counts={"kills": 300}, smallest=True)[2]
