"""`etude train`: plan a run, then do it."""

from __future__ import annotations

from pydantic import Field

from etude.api import Run, train
from etude.cli.options import parse
from etude.cli.target import Recipe_, Trusting, find_target
from etude.core.ranks import writes
from etude.metrics.rows import ELAPSED, is_offline, step_of
from etude.planning.recipe import metrics_of
from etude.reports import evaluation
from etude.runs.folder import NOT_EXACT


class TrainCommand(Trusting):
    """Plan a run, then do it."""

    aliases = {"folder": "log_dir logdir out output save_dir"}  # noqa: RUF012

    recipe: Recipe_
    folder: str | None = Field(
        None, description="The run's folder; default runs/<recipe>/<date-time>-s<seed>."
    )


def run(arguments: list[str]) -> None:
    """Train a recipe in a new folder, and evaluate what came of it."""
    recipe, rest = find_target(arguments)
    command = parse(f"train {recipe.name}", TrainCommand, rest, TrainCommand(recipe=recipe))
    finish(train(command.recipe, command.folder, say=say, console=True))


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def finish(run: Run) -> None:
    """Print what a run came to, and evaluate its policy; the first of several ranks does."""
    if not writes():
        return
    best = run.summary()["best"]
    last = run.rows()[-1] if run.rows() else {}
    if last:
        unit = "updates" if is_offline(last) else "steps"
        print(f"Done in {last[ELAPSED]:.1f} s: {step_of(last):,} {unit}.")
    if run.exactness.startswith(NOT_EXACT):
        print(f"This run is {run.exactness}.")
    metric = next((m for m in metrics_of(run.recipe) if m.summary and m.name in last), None)
    if metric is not None:
        text = metric.summary.format(value=last[metric.name], row=last, best=best)
        print(f"Last evaluation in training: {text}.")
    print()
    evaluation.finish(run.recipe, run.path, say)
    print(f"Evaluate it: etude eval {run.path}")
