"""Figures on pages are those of results, and say so where the code has changed since."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "gates"))
import figures  # isort: skip
import sources  # isort: skip
from faults_table import load  # isort: skip


def test_the_pages_are_what_the_results_make() -> None:
    results = load()
    readme = figures.README.read_text()
    assert readme == figures.placed(readme, figures.headline(results)), "python gates/figures.py"
    assert figures.PAGE.read_text() == figures.measured(results), "python gates/figures.py"


def test_the_readme_is_short_and_has_no_other_table_of_figures() -> None:
    readme = figures.README.read_text()
    assert readme.count("\n") <= 150
    assert len(figures.HEADLINE) <= 8
    outside = figures.placed(readme, "")
    assert not re.findall(r"^\|.*\d[\d.]* (?:%|s|times)\b.*\|$", outside, re.MULTILINE)


def result(**changes: object) -> dict[str, object]:
    entry = {"value": 0.5, "at_least": 0.4, "at_most": None, "timing": False}
    found: dict[str, object] = {
        "gate": "train_reach",
        "variant": "",
        "figures": {"success of seed 0": entry, "seconds of seed 0": entry | {"value": 12.4}},
        "counts": {"trainings": 1_000},
        "source": sources.source_hash("train_reach"),
        "command": "python gates/train_reach.py",
        "date": "2026-01-02T03:04:05",
        "commit": "abc with changes",
        "verdict": "passed",
    }
    return found | changes


def test_a_figure_that_is_older_than_its_code_is_marked() -> None:
    fresh, old = ({("train_reach", ""): result(**more)} for more in ({}, {"source": "another"}))
    assert "| 50 % of 200 episodes, 12 s (1 seed) |" in figures.headline(fresh)
    assert "50 % of 200 episodes, 12 s (1 seed)†" in figures.headline(old)
    line = figures.measured(fresh).splitlines()[-1]
    assert "success of seed 0: 0.5 (at least 0.4)<br>" in line
    assert "| 1,000 trainings | passed | 2026-01-02 | `abc`* |" in line
    assert "†" not in line
    assert "†" in figures.measured(old).splitlines()[-1]


def test_only_code_counts(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "src/etude/core").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src/etude/core/a.py").write_text(text)
        sources.package_hash.cache_clear()
        return sources.package_hash("core", tmp_path)

    plain = of("x = 1\n")
    assert of('"""Words."""\n\n# More words.\nx = 1\n"""What it is."""\n') == plain
    assert of("x = 2\n") != plain
    assert of('x = 1\ny = "text"\n') != plain


@pytest.mark.parametrize("gate", sorted(sources.MEASURES))
def test_what_a_gate_measures_is_there(gate: str) -> None:
    assert (figures.ROOT / "gates" / f"{gate}.py").exists()
    for name in sources.MEASURES[gate]:
        assert list((figures.ROOT / "src" / "etude" / name).glob("*.py"))
