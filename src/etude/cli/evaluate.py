"""`etude eval`: evaluate the policies of one run or several on new episodes."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny

from etude.api import Run
from etude.building.build import Say, silent
from etude.cli.options import Positional, Reporting, Trusting, parse, terminal_width
from etude.cli.target import split_run
from etude.cli.train import say
from etude.compare.reading import find
from etude.core.errors import UsageError
from etude.envs.config import ENVS, EnvConfig
from etude.evaluate import evaluation
from etude.evaluate.fresh import step_of
from etude.evaluate.report import Evaluated, table, write_curve
from etude.planning.loading import policies


class EvalCommand(Trusting, Reporting):
    """Evaluate a run's policy on new episodes; several runs, or all checkpoints of a run, in one
    table. --env.FIELD VALUE changes the environment of the run."""

    aliases = {"episodes": "n_eval_episodes num_episodes", "video": "film record"}  # noqa: RUF012

    runs: Positional[tuple[str, ...]] = Field(
        description="Folders of runs, folders that hold runs, or patterns: 'runs/reach/*'; or a "
        "checkpoint inside of a run, in place of its best."
    )
    checkpoint: str = Field(
        "best",
        description="best: the highest success in training's evaluations, then the higher return, "
        "then the later one. Or latest, a step, or all: a curve over all that are kept.",
    )
    episodes: int | None = Field(
        None, ge=1, description="Number of episodes; default 100, or every motion once."
    )
    stochastic: bool = Field(
        False, description="Draw actions as in training, instead of the most likely ones."
    )
    video: bool = Field(
        False,
        description="Film a success and a failure of each kind: webp, a strip of pictures, and "
        "mp4 with the extra `video`.",
    )
    small: bool = Field(False, description="Films of 640 x 360 instead of 1280 x 720.")
    seed: int | None = Field(
        None,
        ge=0,
        description="Seed of the episodes; default: one derived from the run's, for other episodes "
        "than those of the evaluation at its end, which have the run's own seed.",
    )
    env: Annotated[SerializeAsAny[EnvConfig] | None, BeforeValidator(ENVS.validate)] = Field(
        None, description="The run's environment; --env.FIELD VALUE changes a field."
    )


def run(arguments: list[str]) -> None:
    """Evaluate policies one by one."""
    changes_env = any(argument.startswith("--env.") for argument in arguments)
    if changes_env and (first := _first_run(arguments)) is not None:
        command = _parsed(arguments, Run(first, "--trust" in arguments))
    else:
        command = parse("eval", EvalCommand, arguments)
    if command.small and not command.video:
        raise UsageError("--small is a size of films: add --video.")
    targets = [
        (Run(path, command.trust), which)
        for path, inside in _find_runs(command.runs)
        for which in _checkpoints(path, inside or command.checkpoint)
    ]
    speak = silent if command.json_output else say
    found: list[tuple[Path, dict[str, Any]]] = []
    for number, (run, which) in enumerate(targets, 1):
        recipe = run.recipe
        if command.env is not None:
            changed = command if number == 1 else _parsed(arguments, run)
            recipe = recipe.replace(env=changed.env)
        if len(targets) > 1:
            speak(f"{run.path}, {which}: {number} of {len(targets)}")
        metrics = evaluation.examine(
            recipe,
            run.path,
            command.episodes,
            command.seed,
            command.video,
            partial(_say_named, run, speak) if len(targets) == 1 else silent,
            which,
            command.stochastic,
            command.small,
        )
        found.append((run.path, metrics))
    if len(found) == 1:
        command.show(found[0][1], "")
    elif command.json_output:
        print(json.dumps([{"run": str(path), **metrics} for path, metrics in found], indent=2))
    else:
        _compare(found)


def _say_named(run: Run, speak: Say, text: str) -> None:
    """Print a text with the URL of a run in place of its folder on this machine."""
    speak(run.folder.named(text))


def _find_runs(texts: tuple[str, ...]) -> list[tuple[Path, str]]:
    """(run, "") or (run, checkpoint) for runs, folders that hold runs, and patterns."""
    single = [split_run(text) for text in texts if split_run(text)[1]]
    others = [text for text in texts if not split_run(text)[1]]
    return [*((path, "") for path in (find(others) if others else [])), *single]


def _first_run(arguments: list[str]) -> Path | None:
    """The first run, or the first in a folder that holds runs."""
    folders = [text for text in arguments if split_run(text)[0].is_dir()]
    return _find_runs(tuple(folders[:1]))[0][0] if folders else None


def _parsed(arguments: list[str], run: Run) -> EvalCommand:
    """The command with the options of the run's environment."""
    default = EvalCommand(runs=(str(run.path),), env=run.recipe.task)
    return parse("eval", EvalCommand, arguments, default)


def _checkpoints(run: Path, which: str) -> list[str]:
    """The checkpoints to evaluate: "best", "latest", a step, or all steps."""
    return [str(step) for step in policies(run)] if which == "all" else [which]


def _compare(found: list[tuple[Path, dict[str, Any]]]) -> None:
    """Print one table, and write a curve for every run with several checkpoints."""
    if not all("policy_step" in metrics for _, metrics in found):
        raise UsageError(
            "These runs were evaluated on datasets and have no episodes to compare: see "
            "summary.json in each of their evaluations."
        )
    kept = {path: step_of(path) for path, _ in found}
    rows = [Evaluated(path, m, m["policy_step"] == kept[path]) for path, m in found]
    width = terminal_width()
    print(table(rows, width, color=sys.stdout.isatty()), end="")
    for path in dict.fromkeys(row.run for row in rows):
        points = [row for row in rows if row.run == path]
        if len(points) > 1:
            print(f"Kept in {write_curve(path, points)}")
    print("Each evaluation is in its run, in evaluations/<step>-fresh.")
