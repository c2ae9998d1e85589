"""`etude train`: plan a run, then do it."""

from __future__ import annotations

from collections import Counter

from pydantic import Field

from etude.api import Run, train
from etude.cli.options import parse
from etude.cli.target import Recipe_, Trusting, find_target
from etude.core.errors import UsageError
from etude.core.history import History
from etude.core.metrics.declared import ELAPSED, is_offline, step_of
from etude.core.ranks import is_first_process
from etude.evaluate import evaluation
from etude.evaluate.fresh import step_of as policy_step
from etude.planning.recipe import metrics_of
from etude.runs.folder import NOT_EXACT


class TrainCommand(Trusting):
    """Plan a run, then do it."""

    aliases = {"folder": "log_dir logdir out output save_dir"}  # noqa: RUF012

    recipe: Recipe_
    folder: str | None = Field(
        None, description="The run's folder; default runs/<recipe>/<date-time>-s<seed>."
    )
    seeds: int | None = Field(
        None,
        ge=1,
        description="Runs of so many seeds, from --seed on, as s<seed> in one folder: --folder, or "
        "runs/<recipe>/seeds-<hash of the recipe>. The same command goes on with what is missing.",
    )
    jobs: int | None = Field(
        None, ge=1, description="Of --seeds, runs side by side; default: as many as cores allow."
    )


def run(arguments: list[str]) -> None:
    """Train a recipe in a new folder, and evaluate what came of it."""
    recipe, rest = find_target(arguments)
    command = parse(f"train {recipe.name}", TrainCommand, rest, TrainCommand(recipe=recipe))
    if command.seeds is not None:
        from etude.cli.seeds import train_seeds

        count, jobs, trust = command.seeds, command.jobs, command.trust
        return train_seeds(command.recipe, count, jobs, command.folder, arguments, trust)
    if command.jobs is not None:
        raise UsageError("--jobs is how many runs of --seeds are done side by side: add --seeds.")
    finish(train(command.recipe, command.folder, say=say, console=True))


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def finish(run: Run) -> None:
    """Print what a run came to, and evaluate its policy; the first of several ranks does."""
    if not is_first_process():
        return
    best = run.summary()["best"]
    history = run.history()
    last = history.last
    if last:
        unit = "updates" if is_offline(last) else "steps"
        print(f"Done in {last[ELAPSED]:.1f} s: {step_of(last):,} {unit}{_spent(history)}.")
    if run.exactness.startswith(NOT_EXACT):
        print(f"This run is {run.exactness}.")
    metric = next((m for m in metrics_of(run.recipe) if m.summary and m.name in last), None)
    if metric is not None:
        text = metric.summary.format(value=last[metric.name], row=last, best=best)
        print(f"Last evaluation in training: {text}.")
        if best is None:
            print("No evaluation did better than chance: there is no best, the newest is kept.")
    print()
    if run.recipe.env is not None and run.recipe.evaluation.final_episodes:
        print(_chosen(run))
    evaluation.finish(run.recipe, run.path, say)
    print(f"Evaluate it: etude eval {run.path}")


def _spent(history: History) -> str:
    """How fast a run collected and trained, and what it did besides; of a long run, by a part."""
    seconds: Counter[str] = Counter()
    kept, last = history.thinned(), history.last
    for row, rows in kept.weighted():
        seconds.update({name: rows * (row.get(f"time/{name}") or 0.0) for name in _SPENT})
    learning, rest = seconds["collect"] + seconds["train"], seconds["test"] + seconds["save"]
    if is_offline(last) or not learning:
        return ""
    speed = step_of(last) / learning
    return (
        f", {speed:,.0f} steps/s while collecting and training; {rest:.1f} s to evaluate and save"
    )


_SPENT = ("collect", "train", "test", "save")


def _chosen(run: Run) -> str:
    """Which policy is evaluated after a run, and why that one."""
    row, step = run.history().last, policy_step(run.path)
    last = step_of(row) if row else step
    count = run.summary()["counts"]["evaluations"]
    why = (
        f"the best of {count} evaluations in training, the latest of equals"
        if count > 1
        else "the only one evaluated"
    )
    other = "" if step == last else f"; the last one, of step {last:,}, is in checkpoints/final"
    return f"Now the policy of step {step:,}: {why}{other}."
