"""`etude compare`: compare groups of runs, with statistics over their seeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse, terminal_width
from etude.compare import outputs, reading
from etude.compare.comparison import Comparison, compare
from etude.core.errors import UsageError
from etude.runs import files


class CompareCommand(Reporting):
    """Compare groups of runs that differ only in their seed: curves, final scores with confidence
    intervals, steps and time to success, and the probability that one group is better. Only logs
    are read; `etude eval` plays new episodes."""

    aliases = {  # noqa: RUF012
        "success": "threshold target reach",
        "at": "steps total_timesteps budget",
        "out": "output plot",
    }

    runs: Positional[tuple[str, ...]] = Field(
        description="Folders of runs, folders that hold runs, or patterns: 'runs/reach/*'."
    )
    metric: str | None = Field(
        None,
        description="A column of metrics.jsonl; default eval/success_rate, else eval/mean_reward, "
        "else rollout/ep_rew_mean.",
    )
    at: int | None = Field(
        None,
        ge=1,
        description="Compare at this step; default: the end, if all runs have the same length.",
    )
    success: float | None = Field(
        None,
        description="Threshold for steps and time to success; default 0.9, for success rates only.",
    )
    by: Literal["recipe", "folder"] = Field(
        "recipe",
        description="Runs of a group have the same recipe except for the seed, or are in the same "
        "folder, for example to compare two versions of a program.",
    )
    any_task: bool = Field(
        False,
        description="Compare runs of different environments, whose scores may differ in meaning.",
    )
    out: tuple[str, ...] = Field(
        (), description="Files to write: .png, .svg, .csv or .json; -o is short."
    )


SUFFIXES = (".png", ".svg", ".csv", ".json")


def run(arguments: list[str]) -> None:
    """Compare runs."""
    command = parse("compare", CompareCommand, arguments)
    for name in command.out:
        if Path(name).suffix not in SUFFIXES:
            raise UsageError(
                f"'{name}' cannot be written: its suffix must be one of {', '.join(SUFFIXES)}."
            )
    records = [reading.read(path) for path in reading.find(command.runs)]
    found = compare(
        records,
        command.metric,
        command.at,
        command.success,
        command.any_task,
        command.by == "folder",
    )
    width = terminal_width()
    command.show(
        outputs.to_json(found) if command.json_output else None,
        "" if command.json_output else outputs.to_table(found, width, sys.stdout.isatty()),
    )
    for name in command.out:
        path = Path(name)
        files.make_folder(path.absolute().parent)
        files.replace_file(path, [encoded(found, path.suffix)])
        if not command.json_output:
            print(f"Written: {path}")


def encoded(found: Comparison, suffix: str) -> bytes:
    """The comparison in the format of a suffix."""
    if suffix == ".csv":
        return outputs.to_csv(found).encode()
    if suffix == ".json":
        return (json.dumps(outputs.to_json(found), indent=2) + "\n").encode()
    return outputs.to_chart(found, suffix.removeprefix("."))
