"""`etude prune`: frees what no run needs any more, and asks first."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.cli.runs import runs_in, with_default
from etude.core.progress import waiting
from etude.planning.page import size
from etude.runs.pruning import Surplus, free, surplus_of, unfinished


class PruneCommand(Reporting):
    """Frees what no run needs any more: older checkpoints besides the newest, the best, the final
    one and those that `checkpoint.keep_every` keeps; what a save that was killed has left, and
    checkpoints that were set aside; runs that ended an hour ago or earlier without having saved
    anything. It lists them and asks first. Runs that are being written are left alone; every other
    can still be resumed and evaluated."""

    aliases = {"yes": "y force"}  # noqa: RUF012

    folders: Positional[tuple[str, ...]] = Field(
        description="Folders with runs, or runs; default: runs."
    )
    yes: bool = Field(False, description="Do not ask.")


def run(arguments: list[str]) -> int:
    """List what can go, ask, and take it away; 1 where something could not be."""
    command = parse("prune", PruneCommand, with_default(arguments))
    with waiting("reading checkpoints"):
        found = surplus_of(runs_in(command.folders))
        found += [each for folder in command.folders for each in unfinished(Path(folder))]
    if command.json_output:
        command.show(to_json(found), "")
    elif not found:
        print("There is nothing to free.")
    else:
        print("\n".join(lines(found)))
    if not found or not (command.yes or (not command.json_output and asked(found))):
        return 0
    freed, left = 0, []
    for each, why in free(found):
        freed += 0 if why else each.bytes
        left += [why] if why else []
    for why in left:
        print(why, file=sys.stderr)
    if not command.json_output:
        print(f"Freed {size(freed)}.")
    return int(bool(left))


def to_json(found: list[Surplus]) -> list[dict[str, object]]:
    """What can go, for programs."""
    return [{"path": str(each.path), "why": each.why, "bytes": each.bytes} for each in found]


def lines(found: list[Surplus]) -> list[str]:
    """A line for each with its bytes, by the reason why nobody needs it."""
    width = max(len(f"{each.bytes:,}") for each in found)
    reasons: dict[str, list[str]] = {}
    for each in found:
        line = f"  {each.bytes:>{width},} bytes  {each.path}"
        reasons.setdefault(each.why, []).append(line)
    return [line for why, under in reasons.items() for line in (f"{why}:", *under)]


def asked(found: list[Surplus]) -> bool:
    """Whether whoever sits there wants it; where nobody does, nothing is taken away."""
    total = f"{size(sum(each.bytes for each in found))} in all"
    if not sys.stdin.isatty():
        print(f"{total}. Nothing was removed: --yes does it.")
        return False
    try:
        return input(f"{total}. Free them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
