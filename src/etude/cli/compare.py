"""`etude compare`: which is better? Runs in groups of seeds, with statistics over the seeds."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.compare import outputs, reading
from etude.compare.comparison import Comparison, compare
from etude.core.errors import UsageError
from etude.runs import files


class CompareCommand(Reporting):
    """Which is better? Runs that differ in their seed alone are a group; of each group the curve,
    the final score with its interval, and the steps and time to success, and how likely one is
    better than the other. Nothing is played anew: `etude eval` does that."""

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
        None, ge=1, description="Compare at this step; default: the end, if it is the same for all."
    )
    success: float | None = Field(
        None,
        description="Steps and time until the metric first is as high as this; default 0.9 of a "
        "success rate.",
    )
    by: Literal["recipe", "folder"] = Field(
        "recipe",
        description="What makes a group: the recipe but for the seed, or the folder that runs are "
        "in, such as those of two versions of a program.",
    )
    any_task: bool = Field(
        False, description="Compare although the environments differ; scores may differ in meaning."
    )
    out: tuple[str, ...] = Field(
        (), description="Files to write, by their endings: .png, .svg, .csv, .json; -o is short."
    )


ENDINGS = (".png", ".svg", ".csv", ".json")


def run(arguments: list[str]) -> None:
    """Compare runs."""
    command = parse("compare", CompareCommand, ["--out" if a == "-o" else a for a in arguments])
    for name in command.out:
        if Path(name).suffix not in ENDINGS:
            raise UsageError(
                f"'{name}' cannot be written: its ending must be one of {', '.join(ENDINGS)}."
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
    width = shutil.get_terminal_size((100, 24)).columns
    command.show(
        outputs.to_json(found) if command.json_output else None,
        "" if command.json_output else outputs.to_table(found, width, sys.stdout.isatty()),
    )
    for name in command.out:
        path = Path(name)
        files.make_folder(path.absolute().parent)
        files.replace_file(path, [written(found, path.suffix)])
        if not command.json_output:
            print(f"Written: {path}")


def written(found: Comparison, ending: str) -> bytes:
    """The comparison as a file with this ending."""
    if ending == ".csv":
        return outputs.to_csv(found).encode()
    if ending == ".json":
        return (json.dumps(outputs.to_json(found), indent=2) + "\n").encode()
    return outputs.to_chart(found, ending.removeprefix("."))
