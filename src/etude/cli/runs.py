"""`etude runs` and `etude prune`: list runs, and free the files that no run needs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.compare.inventory import RunEntry, entry, entry_in_store
from etude.core.errors import UsageError
from etude.core.output import size, waiting
from etude.runs.files import store_url
from etude.runs.finding import find_runs

DEFAULT = "runs"
"""The folder of runs if none is named."""


class RunsCommand(Reporting):
    """List the runs in these folders and below them, the newest first: whether each is running,
    finished, stopped (`etude resume` continues it) or failed, its steps, the success or return of
    its last evaluation, the time since its last write, and its size on disk."""

    folders: Positional[tuple[str, ...]] = Field(
        description="Folders with runs, or runs, also in an object store: s3://BUCKET/PATH; "
        "default: runs."
    )


class PruneCommand(Reporting):
    """List the files that no run needs, and delete them with --yes: old checkpoints except the
    newest, the best, the final one and those of `checkpoint.keep_every`; leftovers of killed saves
    and checkpoints that were set aside; runs that ended at least an hour ago without a checkpoint.
    Only files that Etude wrote are deleted: folders without its seal, runs with other files in
    them, and runs that are being written are left. Every run can still be resumed and evaluated."""

    aliases = {"yes": "y force"}  # noqa: RUF012

    folders: Positional[tuple[str, ...]] = Field(
        description="Folders with runs, or runs; default: runs."
    )
    yes: bool = Field(False, description="Delete the listed files.")


def run_list(arguments: list[str]) -> None:
    """Print a line for each run."""
    command = parse("runs", RunsCommand, _with_default(arguments))
    here = [folder for folder in command.folders if not store_url(folder)]
    entries = [entry(path) for path in (_runs_in(here) if here else ())]
    for url in (url for folder in command.folders if (url := store_url(folder))):
        entries += [entry_in_store(run) for run in _stored_runs(url)]
    entries.sort(key=lambda each: each.age)
    command.show([each.to_json() for each in entries], f"{_table(entries)}\n")


def run_prune(arguments: list[str]) -> int:
    """List the files that can be freed, and delete them with --yes; 1 if one cannot be deleted."""
    # `etude runs` does without the libraries that read checkpoints.
    from etude.runs.pruning import delete_surplus, find_killed_runs, find_surplus

    command = parse("prune", PruneCommand, _with_default(arguments))
    with waiting("reading checkpoints"):
        found = find_surplus(_runs_in(command.folders), say=_warn)
        found += [each for folder in command.folders for each in find_killed_runs(Path(folder))]
    if command.json_output:
        document = [{"path": str(s.path), "why": s.why, "bytes": s.bytes} for s in found]
        command.show(document, "")
    elif not found:
        print("There is nothing to free.")
    else:
        print("\n".join(_surplus_lines([(s.why, s.bytes, s.path) for s in found])))
        if not command.yes:
            total = size(sum(each.bytes for each in found))
            print(f"{total} in all. Nothing was removed: --yes removes it.")
    if not found or not command.yes:
        return 0
    freed, failed = 0, False
    for each, why in delete_surplus(found):
        freed += 0 if why else each.bytes
        if why:
            failed = True
            _warn(why)
    if not command.json_output:
        print(f"Freed {size(freed)}.")
    return int(failed)


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _with_default(arguments: list[str]) -> list[str]:
    """The arguments, with the default folder if none is named."""
    return arguments if any(not a.startswith("-") for a in arguments) else [DEFAULT, *arguments]


def _runs_in(folders: Sequence[str]) -> list[Path]:
    """The runs in some folders; refuses folders without runs."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"There is no folder {folder}: name one that holds runs.")
    found = dict.fromkeys(path for folder in folders for path in find_runs(Path(folder)))
    if not found:
        raise UsageError(f"There are no runs in {', '.join(folders)}.")
    return [*found]


def _stored_runs(url: str) -> list[str]:
    from etude.runs import stored

    if not (found := stored.find_runs(url)):
        raise UsageError(f"There are no runs in {url}.")
    return found


def _table(entries: list[RunEntry]) -> str:
    """A line for each run, and their sum."""
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
    path = "".join(letter if letter.isprintable() else "?" for letter in run.name)
    return (
        run.state,
        f"{run.steps:,}",
        "" if not run.total or run.state == "finished" else f"of {run.total:,}",
        score,
        _age(run.age),
        size(run.bytes),
        f"{run.recipe}{seed}{''.join(f', {each}' for each in run.changes)}",
        path,
    )


def _age(seconds: float) -> str:
    """An age in its largest unit: 4 s, 3 min, 5 h, 12 d."""
    for upper, unit, name in ((60, 1, "s"), (3600, 60, "min"), (172800, 3600, "h")):
        if seconds < upper:
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds // 86400)} d"


def _surplus_lines(found: list[tuple[str, int, Path]]) -> list[str]:
    """(why, bytes, path) as lines, grouped by the reason why no run needs the path."""
    width = max(len(f"{num_bytes:,}") for _, num_bytes, _ in found)
    reasons: dict[str, list[str]] = {}
    for why, num_bytes, path in found:
        reasons.setdefault(why, []).append(f"  {num_bytes:>{width},} bytes  {path}")
    return [line for why, under in reasons.items() for line in (f"{why}:", *under)]
