"""`etude runs`: which runs there are, and how they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.compare.inventory import RunEntry, entry
from etude.core.errors import UsageError
from etude.core.units import size
from etude.runs.finding import find_runs

DEFAULT = "runs"
"""The folder that runs are in, where nobody says otherwise."""


class RunsCommand(Reporting):
    """Runs in these folders and below them, the newest first: whether each is running, finished,
    stopped (`etude resume` goes on) or failed, its steps, the success or return of its last
    evaluation, the time since it was last written, and its size on the disk."""

    folders: Positional[tuple[str, ...]] = Field(
        description="Folders with runs, or runs; default: runs."
    )


def run(arguments: list[str]) -> None:
    """Print a line for each run."""
    command = parse("runs", RunsCommand, with_default(arguments))
    entries = sorted((entry(path) for path in runs_in(command.folders)), key=lambda e: e.age)
    command.show([each.to_json() for each in entries], f"{table(entries)}\n")


def with_default(arguments: list[str]) -> list[str]:
    """The arguments with the folder `runs`, where none is named."""
    return arguments if any(not a.startswith("-") for a in arguments) else [DEFAULT, *arguments]


def runs_in(folders: Sequence[str]) -> list[Path]:
    """The runs in some folders; refuses where there is none at all."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"There is no folder {folder}: name one that holds runs.")
    found = dict.fromkeys(path for folder in folders for path in find_runs(Path(folder)))
    if not found:
        raise UsageError(f"There are no runs in {', '.join(folders)}.")
    return [*found]


def table(entries: list[RunEntry]) -> str:
    """A line for each run, and what they are together."""
    cells: list[tuple[str, ...]] = [
        ("state", "steps", "", "success", "age", "size", "recipe", "run")
    ]
    cells += [_cells(each) for each in entries]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = {0, 2, 6, 7}
    lines = [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    states: Counter[str] = Counter(each.state for each in entries)
    order = ("running", "finished", "stopped", "failed")
    counted = ", ".join(f"{states[state]} {state}" for state in order if states[state])
    one = "run" if len(entries) == 1 else "runs"
    lines.append(f"{len(entries)} {one}, {size(sum(e.bytes for e in entries))}: {counted}.")
    return "\n".join(lines)


def _cells(run: RunEntry) -> tuple[str, ...]:
    seed = "" if run.seed is None else f" s{run.seed}"
    score = "-" if run.score is None else f"{run.score:.1%}"
    if run.score is not None and run.score_name != "success":
        score = f"return {run.score:,.4g}"
    path = "".join(letter if letter.isprintable() else "?" for letter in str(run.path))
    return (
        run.state,
        f"{run.steps:,}",
        "" if not run.total or run.state == "finished" else f"of {run.total:,}",
        score,
        _age(run.age),
        size(run.bytes),
        f"{run.recipe}{seed}",
        path,
    )


def _age(seconds: float) -> str:
    """An age, in its largest unit: 4 s, 3 min, 5 h, 12 d."""
    for upper, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172800, 3600, "h")):
        if seconds < upper:
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds // 86400)} d"
