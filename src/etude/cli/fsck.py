"""`etude fsck`: which files of a run or dataset are whole."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from etude.cli.options import Json, Positional, parse
from etude.core.config import Config
from etude.reports import fsck


class FsckCommand(Config):
    """Which files of a run or dataset are whole, and what can be saved; changes nothing."""

    path: Positional[str] = Field(description="A run's folder, or a dataset's.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


def run(arguments: list[str]) -> int:
    """Print what was found; 1 if something is damaged."""
    command = parse("fsck", FsckCommand, arguments)
    report = fsck.examine(Path(command.path))
    if command.json_output:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(fsck.render(report), end="")
    return int(report.damaged)
