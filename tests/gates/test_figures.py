"""Figures on pages are those of results, and say so where the code has changed since."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from gates.lib import beginnings
from gates.lib.full import GATES
from gates.pages import figures, page_figures
from gates.pages.faults_table import load
from gates.speed.scale_model import Constants

FLAGS = re.MULTILINE | re.DOTALL


def test_the_pages_are_what_the_results_make() -> None:
    results = load()
    named = set()
    for page, link in figures.pages().items():
        text = page.read_text()
        named |= {match[1] for match in figures.MARKED.finditer(text)}
        made = figures.measured(results) if page == figures.PAGE else None
        made = made or figures.filled(text, results, link)
        assert text == made, "python -m gates.pages.figures"
    assert named == {"headline", *page_figures.FIGURES}


def test_commands_of_results_are_those_of_today() -> None:
    """Older results name scripts, which are modules now."""
    known = {" ".join(["python", *each]) for entry in GATES.values() for each in entry.commands()}
    results = load()
    for result in results.values():
        assert result["gate"] in GATES
        module = f"python -m gates.{GATES[result['gate']].module}"
        assert page_figures.command(result).startswith(module)
    for key, command in {
        ("train_reach", "seek-pictures"): "python -m gates.learn.train seek-pictures --seeds 2",
        ("train_memory", ""): "python -m gates.learn.train reach-memory",
        ("ranks", "reach-at-scale-short"): "python -m gates.exact.ranks --kills 20 --limit 20000",
    }.items():
        assert page_figures.command(results[key]) == command
    assert "python -m gates.learn.train reach-memory" in known


def test_marks_stand_where_markdown_leaves_paragraphs_whole() -> None:
    """A comment at the start of a line ends a paragraph: only tables and blocks begin there."""
    for page in figures.pages():
        text = page.read_text()
        assert text.count("<!-- figure: ") == len(figures.MARKED.findall(text)), page
        inside = [m[0] for m in figures.MARKED.finditer(text) if not m[2].startswith("\n")]
        assert [mark for mark in inside if f"\n{mark}" in text] == [], page


def test_the_readme_is_short_and_has_no_other_table_of_figures() -> None:
    readme = figures.README.read_text()
    assert readme.count("\n") <= 150
    assert len(figures.HEADLINE) <= 8
    outside = figures.without(readme)
    assert not re.findall(r"^\|.*\d[\d.]* (?:%|s|times)\b.*\|$", outside, re.MULTILINE)


TYPED = (
    r"\d (?:steps|updates|frames)/s",
    r"\d %? ?of (?:the )?\d+ (?:fresh )?episodes",
    r"\d %? (?:success|of fresh episodes)",
    r"\d(?: s| minutes?| hours?) on (?:one|two|a shared) core",
)
"""What a measurement looks like in a page's text, and a setting or a limit does not."""
TRIED = re.compile(r"^## Why these settings$.*?(?=^## |\Z)", FLAGS)
"""What was tried once and is not measured again, with its date."""


@pytest.mark.parametrize("page", list(figures.pages()), ids=lambda page: page.name)
def test_pages_have_no_measurements_that_were_typed(page: Path) -> None:
    if page == figures.PAGE or "do not edit" in page.read_text() or page.stem == "corrections":
        return
    text = TRIED.sub("", figures.without(page.read_text()))
    shown = re.sub(r"^```.*?^```$|^    .*?$", "", text, flags=FLAGS)
    text = " ".join(shown.split())
    assert [found[0] for form in TYPED for found in re.finditer(form, text)] == []


def test_what_was_tried_has_a_date() -> None:
    sections = [text for page in figures.pages() for text in TRIED.findall(page.read_text())]
    assert sections
    assert [text for text in sections if not re.search(r"\b\d+ \w+ 20\d\d\b", text)] == []


BEGUN = {"bits": {"policy a": "1"}, "calls": {"etude: functions": 10_000}}
OTHER = [{"computation": "here", "reach": {**BEGUN, "bits": {"policy a": "2"}}}]
SLOWER = [{"computation": "here", "reach": {**BEGUN, "calls": {"etude: functions": 8_000}}}]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What today's code does."""
    monkeypatch.setattr(beginnings, "now", lambda: {"here": {"reach": BEGUN}})


def result(**changes: object) -> dict[str, object]:
    entry = {"value": 0.5, "at_least": 0.4, "at_most": None, "timing": False}
    timing = entry | {"value": 12.4, "timing": True}
    found: dict[str, object] = {
        "gate": "train_reach",
        "variant": "reach",
        "figures": {"success of seed 0": entry, "seconds of seed 0": timing},
        "counts": {"trainings": 1_000},
        "begins": [{"computation": "here", "reach": BEGUN}],
        "command": "python gates/train_reach.py",
        "date": "2026-01-02T03:04:05",
        "commit": "abc with changes",
        "verdict": "passed",
    }
    return found | changes


@pytest.mark.usefixtures("known")
def test_a_figure_that_may_be_another_one_today_is_marked() -> None:
    fresh, other, slower = (
        {("train_reach", "reach"): result(**more)}
        for more in ({}, {"begins": OTHER}, {"begins": SLOWER})
    )
    shown = '| [50 % of 200 fresh episodes, 12 s (1 seed)](docs/measured.md "measured at abc")'
    assert f"{shown} |" in figures.headline(fresh)
    mark = f'{shown}[†](docs/measured.md "measured at abc; '
    assert f"{mark}after two iterations 1 of the policy's arrays" in figures.headline(other)
    assert f"{mark}an iteration now makes 25% more calls of Etude's" in figures.headline(slower)
    line, marked = (row_of(figures.measured(found)) for found in (fresh, other))
    assert "success of seed 0: 0.5 (at least 0.4)<br>" in line
    assert "| 1,000 trainings | passed | 2026-01-02 | `abc`* |" in line
    assert "†" not in line
    assert "success of seed 0: 0.5†" in marked
    assert "success of seed 0: 0.5 " in row_of(figures.measured(slower))
    assert "seconds of seed 0: 12.4†" in row_of(figures.measured(slower))
    again = "- train_reach-reach, measured at abc: timings: an iteration now makes 25% more calls"
    assert again in figures.measured(slower)


def row_of(page: str) -> str:
    """The only result's."""
    return next(line for line in page.splitlines() if line.startswith("| `python"))


@pytest.mark.usefixtures("known")
def test_figures_on_pages_are_those_of_results() -> None:
    page = "It takes <!-- figure: reach -->1 s<!-- /figure --> here.\n"
    results = {("train_reach", "reach"): result()}
    shown = '-->[12 s and 50 % success (1 seed)](m.md "measured at abc")'
    assert f"{shown}<!--" in figures.filled(page, results, "m.md")
    old = {("train_reach", "reach"): result(begins=[], verdict="not judged, since")}
    assert f"{shown}[†](m.md " in figures.filled(page, old, "m.md")
    assert ", measured beside other work<!--" in figures.filled(page, old, "m.md")
    versioned = {("train_reach", "reach"): result(version="0.2.0")}
    assert '"measured at 0.2.0 (abc)"' in figures.filled(page, versioned, "m.md")
    assert "-->not measured yet<!--" in figures.filled(page, {}, "m.md")
    lacking = {("train_reach", "reach"): result(figures={})}
    assert "-->not measured yet<!--" in figures.filled(page, lacking, "m.md")
    with pytest.raises(SystemExit, match="no figure 'other'"):
        figures.filled(page.replace("reach", "other"), {}, "m.md")


def test_tables_and_texts_are_made_of_details() -> None:
    seed = {"placement_error": 0.0055, "steps_to_80": 92_160}
    details = {"seed 0": seed, "seed 1": seed | {"steps_to_80": None}}
    shown = [
        result(gate="train_pick_place", variant="pick-place", details=details, figures=of_seeds),
        result(gate="scale", variant="", details=kept_of_scale()),
    ]
    results = {(str(r["gate"]), str(r["variant"])): r for r in shown}

    def filled(name: str) -> str:
        return figures.filled(f"<!-- figure: {name} -->\n<!-- /figure -->", results, "m.md")

    placing = filled("pick-place").splitlines()
    assert placing[3].startswith('| `pick-place` | [2](m.md "measured at abc") | 90 to 100 % | 5.5')
    assert placing[4] == "| `pick-place-anywhere` | not measured yet |"
    assert filled("imitation").splitlines()[1:-1] == ["Not measured yet."]
    assert "   0      2     1.000    0.800   1.25  rollout" in filled("scale-check")
    assert "ranks that collect and learn" in filled("scale-tables")
    assert "```text\nstep                   10.000 us" in filled("scale-constants")


of_seeds = {
    f"{name} of seed {seed}": {"value": value, "at_least": None, "at_most": None, "timing": False}
    for name, found in (("success", (0.9, 1.0)), ("steps", (199_680.0, 199_680.0)))
    for seed, value in enumerate(found)
}


def kept_of_scale() -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(Constants)]
    check = {"lag": 0, "actors": 2, "predicted": 1.0, "measured": 0.8, "limit": "rollout"}
    kept: dict[str, object] = {"constants": dict.fromkeys(names, 1e-5), "check": [check]}
    return kept | {"crossed": 1.0, "cores": 2, "steps": 65_536}


def test_the_fastest_of_the_others_stands_beside_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median over runs; a peer on an engine of its own and a failed run do not count."""
    here = figures.page
    runs = [
        {"peer": peer, "task": "ant", "steps_per_second": speed, "own_engine": own, "error": fault}
        | {"measure": "speed"}
        for peer, speed, own, fault in (
            *(("etude", speed, False, None) for speed in (90.0, 100.0, 130.0)),
            *(("a", speed, False, None) for speed in (60.0, 70.0)),
            ("etude_recipe", 500.0, False, None),
            ("b", 900.0, True, None),
            ("c", 900.0, False, "it broke"),
        )
    ]
    runs.append({**runs[3], "measure": "kill", "steps_per_second": 900.0})  # of another day
    monkeypatch.setattr(here, "is_older", lambda run: run["peer"] == "etude")
    assert here.beside(runs, "ant", here.SPEED) == ("100†", "65‡ (a)")  # of two rounds
    third = {**runs[3], "steps_per_second": 65.0}
    assert here.beside([*runs, third], "ant", here.SPEED) == ("100†", "65 (a)")
    assert here.beside(runs, "halfcheetah", here.SPEED) == ("", "")
    assert here.beside(runs, "ant", here.SECONDS) == ("", "")


def test_marks_in_the_table_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for older in (True, False):
        monkeypatch.setattr(figures.page, "is_older", lambda run, older=older: older)
        assert ("†" in "".join(map(str, figures.compared(figures.page.SPEED)))) == older


@pytest.mark.parametrize(
    ("others", "told"), [((40, None, 60), "60 (a)"), ((40, None, None), "over 80 (a)"), ((), "")]
)
def test_a_run_that_never_reached_the_score_counts_as_the_slowest(
    others: tuple[int | None, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = figures.page
    runs = [
        {"peer": peer, "task": "ant", "own_engine": False, "error": None, "measure": "score"}
        | {"reached": (seconds, 10 * seconds) if seconds else None, "seconds": seconds or 80}
        for peer, each in (("etude", (70, 50, 90)), ("a", others))
        for seconds in each
    ]
    monkeypatch.setattr(here, "is_older", lambda run: False)
    assert here.beside(runs, "ant", here.SECONDS) == ("70" if others else "", told)


def test_a_comparison_of_before_its_rule_shows_nothing() -> None:
    result = {"gate": "train_offline", "verdict": "passed", "details": {}}
    assert figures.verdict(result) == "not shown: one seed"
    result["details"] = {"comparisons": {"success": {}}}
    assert figures.verdict(result) == "passed"
    assert figures.verdict({**result, "gate": "train_reach", "details": {}}) == "passed"
