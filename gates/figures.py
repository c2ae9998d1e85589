"""The figures on pages: README's table and docs/measured.md, made from gates/results/*.json.

    python gates/figures.py               # Writes both.

No figure on these pages is typed by hand. One that is older than the code it measures is marked:
its result keeps a hash of that code (`sources.py`), and the code has another one today.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from faults_table import load
from report import RESULTS
from sources import ROOT, source_hash

README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
BEGIN, END = "<!-- figures: made by `python gates/figures.py` -->\n", "<!-- /figures -->\n"
OLDER = "†"
Results = dict[tuple[str, str], dict[str, Any]]


class Row(NamedTuple):
    """One line of README's table."""

    what: str
    here: Callable[[Results], str]
    peer: Callable[[Results], str]
    results: tuple[tuple[str, str], ...]
    """Gate and variant of each result that the line is made from."""


def values(results: Results, gate: str, variant: str, name: str) -> list[float]:
    """A figure of a result, of each seed: those whose names begin with `name`."""
    figures = results[gate, variant]["figures"]
    return [entry["value"] for key, entry in figures.items() if key.startswith(name)]


def span(found: list[float], form: str = "{:.0f}") -> str:
    """The smallest and the largest of some values, or the one."""
    low, high = form.format(min(found)), form.format(max(found))
    return low if low == high else f"{low} to {high}"


def percent(found: list[float]) -> str:
    return span([100.0 * value for value in found], "{:.3g}") + " %"


def seeds(found: list[float]) -> str:
    return f"{len(found)} seed{'s' if len(found) > 1 else ''}"


def trained(gate: str, variant: str, success: str, unit: str) -> Callable[[Results], str]:
    """What some seeds of a training reached, and in which time from command to exit."""

    def told(results: Results) -> str:
        reached = values(results, gate, variant, success)
        seconds = values(results, gate, variant, "seconds of seed")
        return f"{percent(reached)} {unit}, {span(seconds)} s ({seeds(reached)})"

    return told


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


def every(gate: str) -> tuple[tuple[str, str], ...]:
    return tuple(key for key in load(RESULTS) if key[0] == gate)


def of(gate: str, variant: str, form: str, name: str) -> Callable[[Results], str]:
    """A sentence with the values of one figure."""
    return lambda results: form.format(span(values(results, gate, variant, name), "{:.2g}"))


REACH, PICK, WALK = (
    ("train_reach", ""),
    ("train_pick_place", "pick-place"),
    ("train_walk", "walk-go1"),
)
PEER = ("peer_pick_place", "")
HEADLINE = (
    Row(
        "An arm reaches a random point: `etude train reach`",
        trained(*REACH, "success of seed", "of 200 episodes"),
        nothing,
        (REACH,),
    ),
    Row(
        "It picks up a cube and places it, 200,000 steps: `etude train pick-place`",
        trained(*PICK, "success of seed", "of 100 fresh episodes"),
        nothing,
        (PICK,),
    ),
    Row(
        "Steps per second of that task, at 10 gradient samples a step",
        of(*PEER, "{} times", "steps/s over stable-baselines3"),
        lambda results: "stable-baselines3: 1",
        (PEER,),
    ),
    Row(
        "A Go1 follows velocity commands: `etude train walk-go1`",
        trained(*WALK, "without a fall of seed", "of 200 fresh episodes of 10 s without a fall"),
        nothing,
        (WALK,),
    ),
    Row("`kill -9`, then `etude resume`", kills, nothing, every("exact_resume")),
    Row("Collecting, against the bare physics engine", collectors, nothing, every("rollout_speed")),
)
"""At most eight lines."""


def is_older(result: dict[str, Any]) -> bool:
    """Whether the code that was measured has changed since."""
    return bool(result.get("source") != source_hash(result["gate"]))


def headline(results: Results) -> str:
    """README's table."""
    lines = ["| | Etude | the best peer |", "|---|---|---|"]
    older = False
    for row in HEADLINE:
        if not all(key in results for key in row.results):
            continue
        mark = OLDER if any(is_older(results[key]) for key in row.results) else ""
        older |= bool(mark)
        lines.append(f"| {row.what} | {row.here(results)}{mark} | {row.peer(results)} |")
    note = f"\n{OLDER} measured before the last change of the code that it measures.\n"
    return "\n".join(lines) + "\n" + (note if older else "")


HEAD = f"""# Measured

<!-- Made by `python gates/figures.py` from gates/results/*.json: do not edit. -->

What the scripts in `gates/` measured at full size, each with its command, day and commit. The
machine had two shared cores and no GPU; a timing is called "not judged" where other work used them
at the same time. Ratios are medians of alternating rounds. {OLDER} says that the code which the
figure measures has changed since. [Faults, and what has been counted](faults.md) has the kills and
damages beside what was asked. A gate that is not here has not been run at full size since results
are kept.

| command | figure | counted | verdict | when | commit |
|---|---|---|---|---|---|
"""


def measured(results: Results) -> str:
    """The page with every result that is kept."""
    return HEAD + "".join(f"| {' | '.join(cells(r))} |\n" for _, r in sorted(results.items()))


def cells(result: dict[str, Any]) -> Iterator[str]:
    yield f"`{result['command']}`"
    yield "<br>".join(figures(result)) + (OLDER if is_older(result) else "")
    yield ", ".join(f"{many:,} {what}" for what, many in result["counts"].items())
    yield result["verdict"]
    yield result["date"][:10]
    yield f"`{result['commit'].split()[0]}`" + ("*" if " " in result["commit"] else "")


def figures(result: dict[str, Any]) -> Iterator[str]:
    for name, entry in result["figures"].items():
        bound = "".join(
            f" (at {word} {entry[key]:g})"
            for key, word in (("at_least", "least"), ("at_most", "most"))
            if entry[key] is not None
        )
        yield f"{name.replace('_', ' ')}: {told(entry['value'])}{bound}"


def told(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def placed(page: str, block: str) -> str:
    """The page with the block between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + block + END + after


def main() -> int:
    results = load(RESULTS)
    README.write_text(placed(README.read_text(), headline(results)))
    PAGE.write_text(measured(results))
    older = sum(is_older(result) for result in results.values())
    print(f"README.md and docs/measured.md: {len(results)} results, {older} older than their code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
