"""Write docs/measured.md and the figures on all other pages, from gates/results/*.json and
benchmarks/results.json.

    python -m gates.pages.figures

Measured figures are never typed by hand. A page has them between two comments with their name:

    takes <!-- figure: reach -->12 s<!-- /figure -->

`page_figures.py` defines each of them. A figure has the commit of its measurement, and a mark where
today's code may give another one (`beginnings.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import page
from gates import ROOT
from gates.lib.beginnings import doubt
from gates.lib.compare import LEAST_SEEDS
from gates.lib.fresh import stale
from gates.lib.full import BESIDE_SB3
from gates.lib.report import RESULTS
from gates.pages.faults_table import load
from gates.pages.page_figures import (
    FIGURES,
    OLDER,
    Results,
    command,
    linked,
    percent,
    seeds,
    span,
    values,
)

COMPARING = ("peer_off_policy", "train_gymnasium", "train_offline")
"""Gates that compare trainings with those of a peer."""
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
MARKED = re.compile(r"<!-- figure: (\S+) -->(.*?)<!-- /figure -->", re.DOTALL)


class Row(NamedTuple):
    """One line of the table in README.md."""

    what: str
    here: Callable[[Results], str]
    peer: Callable[[Results], str]
    results: tuple[tuple[str, str], ...]
    """Gate and variant of each result in the line."""
    timed: bool = False
    """Whether it includes a timing."""


def trained(gate: str, variant: str, success: str, unit: str) -> Callable[[Results], str]:
    """The success of some seeds of a training, and the seconds from command to exit."""

    def text(results: Results) -> str:
        reached = values(results, gate, variant, success)
        seconds = values(results, gate, variant, "seconds of seed")
        return f"{percent(reached)} {unit}, {span(seconds)} s ({seeds(reached)})"

    return text


def kills(results: Results) -> str:
    """SIGKILLs over all methods, and how many resumed runs differed."""
    found = [result for (gate, _), result in results.items() if gate == "exact_resume"]
    many = sum(result["counts"]["kills"] for result in found)
    bad = sum(result["figures"]["runs that differ"]["value"] for result in found)
    return f"{bad:.0f} runs differ after {many:,} SIGKILLs, {len(found)} methods and settings"


def collectors(results: Results) -> str:
    found = [
        result["figures"]["collector over bare physics"]["value"]
        for (gate, _), result in results.items()
        if gate == "rollout_speed"
    ]
    return f"{span(found, '{:.2f}')} of it, {len(found)} tasks"


def nothing(results: Results) -> str:
    return ""


def beside(what: str, column: page.Column) -> Row:
    """A column of the benchmarks: Etude's values on the tasks, and those of the best peer."""

    def side(at: int) -> Callable[[Results], str]:
        return lambda results: " / ".join(each[at] for each in compared(column))

    return Row(f"{what} on {' / '.join(COMPARED.values())}", side(0), side(1), ())


def compared(column: page.Column) -> list[tuple[str, str]]:
    runs = page.read(page.RESULTS)["runs"]
    return [page.beside(runs, task, column) for task in COMPARED]


COMPARED = {
    "halfcheetah": "HalfCheetah-v5",
    "ant": "Ant-v5",
    "pick-place": "`pick-place`",
    "walk-go1": "`walk-go1`",
}
"""{task of the benchmarks: its name in README.md}."""


def returned(side: str) -> Callable[[Results], str]:
    """The mean return over a side's seeds, task by task."""

    def text(results: Results) -> str:
        found = [values(results, *task, f"return of {side}") for task in RUNNING]
        means = " / ".join(f"{sum(each) / len(each):,.0f}" for each in found)
        who = "" if side == "etude" else "stable-baselines3 with rl_zoo3's settings, "
        few = page.FEW if min(map(len, found)) < LEAST_SEEDS else ""
        return f"{means}{few} ({who}{seeds(found[0])})"

    return text


def every(gate: str) -> tuple[tuple[str, str], ...]:
    return tuple(key for key in load(RESULTS) if key[0] == gate)


REACH, PICK, WALK = (
    ("train_reach", "reach"),
    ("train_pick_place", "pick-place"),
    ("train_walk", "walk-go1"),
)
RUNNING = tuple(("train_gymnasium", recipe) for recipe in BESIDE_SB3)
HEADLINE = (
    Row(
        "An arm reaches a random point: `etude train reach`",
        trained(*REACH, "success of seed", "of 200 fresh episodes"),
        nothing,
        (REACH,),
        timed=True,
    ),
    Row(
        "An arm picks up a cube and places it, 200,000 steps: `etude train pick-place`",
        trained(*PICK, "success of seed", "of 100 fresh episodes"),
        nothing,
        (PICK,),
        timed=True,
    ),
    beside(
        "Seconds to [a score](docs/benchmarks.md), PPO with the same settings in all libraries",
        page.SECONDS,
    ),
    beside("Steps per second in these trainings", page.SPEED),
    Row(
        "Return on Hopper / HalfCheetah / Walker2d / Ant (v5) after 1 million steps",
        returned("etude"),
        returned("sb3"),
        RUNNING,
    ),
    Row(
        "A Go1 follows velocity commands: `etude train walk-go1`",
        trained(*WALK, "without a fall of seed", "of 200 fresh episodes of 10 s without a fall"),
        nothing,
        (WALK,),
        timed=True,
    ),
    Row("`kill -9`, then `etude resume`", kills, nothing, every("exact_resume")),
    Row(
        "Collecting, against the bare physics engine",
        collectors,
        nothing,
        every("rollout_speed"),
        timed=True,
    ),
)
"""At most eight lines."""


def headline(results: Results) -> str:
    """The table of README.md."""
    lines = ["| | Etude | the best peer |", "|---|---|---|"]
    for row in HEADLINE:
        if not all(key in results for key in row.results) or not row.here(results):
            continue
        here, used = row.here(results), [results[key] for key in row.results]
        here = linked(here, used, "docs/measured.md", row.timed) if used else here
        lines.append(f"| {row.what} | {here} | {row.peer(results)} |")
    notes = {
        OLDER: "is not proven to hold for today's code",
        page.FEW: "is of fewer than three seeds or runs, which shows nothing beside another figure",
    }
    told = [f"{mark} {note}." for mark, note in notes.items() if any(mark in x for x in lines)]
    return "\n".join(lines) + "\n" + (f"\n{' '.join(told)}\n" if told else "")


HEAD = f"""# Measured

<!-- Made by `python -m gates.pages.figures` from gates/results/*.json: do not edit. -->

A gate is a script in `gates/` that measures a promise at full size. This table has the result of
each gate with its command, date and commit. The machine had two shared cores and no GPU; a timing
is "not judged" if other processes used the cores at the same time. Other machines on the same host
can slow this one down by half: results keep how fast a fixed physics model ran at that moment
(`reference_speed`). Ratios are medians of alternating rounds; * after a commit marks uncommitted
changes. [Faults, and what has been counted](faults.md) compares the counts of kills and damages
with what was asked. A gate that is not in the table has not been run at full size.

A training is compared with that of another library, or of another method, by one rule
(`gates/lib/compare.py`): at least three seeds of either side; a seed's score is the mean over its
last evaluations; the mean of Etude's may be lower by one standard error from the pooled spread, but
by at least 5 % and at most 15 % of the other's; the lower end of the 95 % interval must reach 70 %
of it. What has fewer seeds or evaluations, or seeds that differ too much, is "not shown".

What was learned stands while the first two iterations of its training give the same bits with
today's code as with the code that was measured: every array of the policy, every number of the log.
A timing stands while an iteration also makes the same calls of NumPy, torch and MuJoCo, but for
2 %, and of Etude's functions, but for 10 %. A count of faults stands while its gate passes at its
smallest size. {OLDER} marks all others; the list below the table says why. `make fresh` repeats all
of this.

| command | figure | counted | verdict | when | commit |
|---|---|---|---|---|---|
"""


def measured(results: Results) -> str:
    """docs/measured.md: a row for every kept result."""
    rows = "".join(f"| {' | '.join(cells(r))} |\n" for _, r in sorted(results.items()))
    again = "".join(f"- {line}\n" for line in stale(results))
    return HEAD + rows + (f"\n## To be measured again\n\n{again}" if again else "")


def verdict(result: dict[str, Any]) -> str:
    """The verdict of a result; comparisons of before their rule (`gates/lib/compare.py`) show
    nothing."""
    if result["gate"] in COMPARING and "comparisons" not in result["details"]:
        return "not shown: one seed"
    return str(result["verdict"])


def cells(result: dict[str, Any]) -> Iterator[str]:
    yield f"`{command(result)}`"
    yield "<br>".join(figures(result))
    yield ", ".join(f"{many:,} {what}" for what, many in result["counts"].items())
    yield verdict(result)
    yield result["date"][:10]
    yield f"`{result['commit'].split()[0]}`" + ("*" if " " in result["commit"] else "")


def figures(result: dict[str, Any]) -> Iterator[str]:
    learned, timed = doubt(result)
    for name, entry in result["figures"].items():
        mark = OLDER if (timed if entry.get("timing") else learned) else ""
        bound = "".join(
            f" (at {word} {entry[key]:g})"
            for key, word in (("at_least", "least"), ("at_most", "most"))
            if entry[key] is not None
        )
        yield f"{name.replace('_', ' ')}: {formatted(entry['value'])}{mark}{bound}"


def formatted(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def filled(text: str, results: Results, link: str) -> str:
    """Fill the marks of a page with figures. link: the relative link to docs/measured.md."""

    def made(match: re.Match[str]) -> str:
        name = match[1]
        if name == "headline":
            block = f"\n{headline(results)}"
        elif name in FIGURES:
            block = FIGURES[name].shown(results, link)
        else:
            raise SystemExit(f"there is no figure {name!r} in gates/pages/page_figures.py")
        return f"<!-- figure: {name} -->{block}<!-- /figure -->"

    return MARKED.sub(made, text)


def without(text: str) -> str:
    """Remove all figures and their marks from a page."""
    return MARKED.sub("", text)


def pages() -> dict[Path, str]:
    """{page that may have figures: its relative link to docs/measured.md}."""
    docs = PAGE.parent
    found = dict.fromkeys(sorted(docs.glob("*.md")), "measured.md")
    for path in sorted(docs.glob("[a-z]*/*.md")):
        found |= {path: "../measured.md"} if path.parent.name != "decisions" else {}
    return {README: "docs/measured.md", **found}


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = load(RESULTS)
    for path, link in pages().items():
        before = path.read_text()
        after = measured(results) if path == PAGE else filled(before, results, link)
        if after != before:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)} has changed")
    entries = [
        bool(doubt(result).timed if entry.get("timing") else doubt(result).learned)
        for result in results.values()
        for entry in result["figures"].values()
    ]
    print(f"{len(results)} results; {sum(entries)} of {len(entries)} figures are marked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
