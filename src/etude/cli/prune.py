"""`etude prune`: lists what no run needs any more, and with --yes frees it."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.cli.runs import runs_in, with_default
from etude.core.progress import waiting
from etude.core.units import size
from etude.runs.pruning import Surplus, delete_surplus, find_killed_runs, find_surplus


class PruneCommand(Reporting):
    """Lists what no run needs any more, and with --yes deletes it: older checkpoints besides the
    newest, the best, the final one and those that `checkpoint.keep_every` keeps; what a save that
    was killed has left, and checkpoints that were set aside; runs that ended an hour ago or earlier
    without having saved anything. Only files that Etude wrote are deleted: folders without its seal
    and runs with other files in them are left, and so are runs that are being written. Every run
    can still be resumed and evaluated."""

    aliases = {"yes": "y force"}  # noqa: RUF012

    folders: Positional[tuple[str, ...]] = Field(
        description="Folders with runs, or runs; default: runs."
    )
    yes: bool = Field(False, description="Delete what is listed.")


def run(arguments: list[str]) -> int:
    """List what can go, and with --yes take it away; 1 where something of that could not be."""
    command = parse("prune", PruneCommand, with_default(arguments))
    with waiting("reading checkpoints"):
        found = find_surplus(runs_in(command.folders), say=_say)
        found += [each for folder in command.folders for each in find_killed_runs(Path(folder))]
    if command.json_output:
        command.show(to_json(found), "")
    elif not found:
        print("There is nothing to free.")
    else:
        print("\n".join(lines(found)))
        if not command.yes:
            total = size(sum(each.bytes for each in found))
            print(f"{total} in all. Nothing was removed: --yes does it.")
    if not found or not command.yes:
        return 0
    freed, left = 0, []
    for each, why in delete_surplus(found):
        freed += 0 if why else each.bytes
        left += [why] if why else []
    for why in left:
        _say(why)
    if not command.json_output:
        print(f"Freed {size(freed)}.")
    return int(bool(left))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


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
