"""`etude train` and `etude resume`: train a recipe in a new run, or continue a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import Field

from etude import api
from etude.cli.options import Positional, Trusting, parse
from etude.cli.target import Recipe_, find_target, with_full_names
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.history import History
from etude.core.metrics import ELAPSED, Best, is_offline, step_of
from etude.core.ranks import is_first_process
from etude.core.user_code import trust_texts
from etude.evaluate import evaluation
from etude.evaluate.fresh import step_of as policy_step
from etude.planning.recipe import differing_fields, metrics_of
from etude.rollout.placement import Placement
from etude.runs.folder import NOT_EXACT, RECIPE


class TrainCommand(Trusting):
    """Plan a run, then train it."""

    aliases = {"folder": "log_dir logdir out output save_dir"}  # noqa: RUF012

    recipe: Recipe_
    folder: str | None = Field(
        None,
        description="The run's folder, or its URL in an object store: s3://BUCKET/PATH; default "
        "runs/<recipe>/<date-time>-s<seed>.",
    )
    seeds: int | None = Field(
        None,
        ge=1,
        description="Number of runs with successive seeds, from --seed on, as s<seed> in one "
        "folder: --folder, or runs/<recipe>/seeds-<hash of the recipe>. The same command continues "
        "with the missing runs.",
    )
    jobs: int | None = Field(
        None, ge=1, description="Parallel runs of --seeds; default: as many as cores allow."
    )


class ResumeCommand(Trusting):
    """Continue a run from its last good checkpoint. --SECTION.FIELD VALUE changes a setting of the
    algorithm, the rewards, evaluations, checkpoints or logs from here on, for example
    --algorithm.learning-rate 1e-4; the run keeps it, and is marked as changed at this step."""

    run: Positional[str] = Field(description="The run's folder, or its URL in an object store.")
    checkpoint: int | None = Field(
        None,
        ge=0,
        description="Go back to the checkpoint of this step; those after it are set aside.",
    )
    total_timesteps: int | None = Field(
        None,
        ge=1,
        description="A larger budget of environment steps than the run has; for learning from a "
        "dataset, of gradient updates.",
    )
    pause_after: int | None = Field(
        None,
        ge=1,
        description="Save and stop after this iteration of the run; the next resume continues "
        "from there.",
    )
    collector: Placement = Field(Placement(), description="Where rollouts run from now on.")


def run(arguments: list[str]) -> None:
    """Train a recipe in a new folder, and evaluate the policy."""
    recipe, rest = find_target(arguments)
    command = parse(f"train {recipe.name}", TrainCommand, rest, TrainCommand(recipe=recipe))
    if command.seeds is not None:
        from etude.cli.seeds import train_seeds

        count, jobs, trust = command.seeds, command.jobs, command.trust
        return train_seeds(command.recipe, count, jobs, command.folder, arguments, trust)
    if command.jobs is not None:
        raise UsageError("--jobs is the number of parallel runs of --seeds: add --seeds.")
    finish(api.train(command.recipe, command.folder, say=say, console=True))


def run_resume(arguments: list[str]) -> None:
    """Continue a run, and evaluate the policy."""
    command, changes = _parsed_resume(with_full_names(arguments))
    resumed = api.resume(
        command.run,
        command.total_timesteps,
        say=say,
        console=True,
        collector=command.collector,
        checkpoint=command.checkpoint,
        trust=command.trust,
        pause_after=command.pause_after,
        changes=changes,
    )
    if command.pause_after is None or resumed.summary():
        finish(resumed)


class _Settings(Config):
    recipe: Recipe_


class _ChangingCommand(ResumeCommand, _Settings):
    __doc__ = ResumeCommand.__doc__


def _parsed_resume(arguments: list[str]) -> tuple[ResumeCommand, dict[str, Any]]:
    """The command, and the settings of the run that its options change.

    The run is opened only where an option is neither of the command nor of its help.
    """
    known = {f"--collector.{name.replace('_', '-')}" for name in Placement.model_fields}
    names = [argument.partition("=")[0] for argument in arguments]
    asked = [n for n in names if n.startswith("--") and "." in n and n not in known]
    run = next((text for text in arguments if (Path(text) / RECIPE).is_file()), None)
    if not asked or run is None:
        return parse("resume", ResumeCommand, arguments), {}
    recipe = api.Run(run, "--trust" in arguments).recipe
    trust_texts(text for text in arguments if ":" in text)
    default = _ChangingCommand(run=run, recipe=recipe)
    command = parse("resume", _ChangingCommand, arguments, default)
    changes = {n: new for n, (_, new) in differing_fields(recipe, command.recipe).items()}
    total = changes.pop("clock.total_timesteps", None)
    if total is not None:
        changes.pop("clock.epochs", None)
        command = command.model_copy(update={"total_timesteps": total})
    return command, changes


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def finish(run: api.Run) -> None:
    """Print the result of a run and evaluate its policy, on the first rank."""
    if not is_first_process():
        return
    found = run.summary()
    best = None
    if found["best"] is not None:
        success, reward = found["best"]
        best = Best(success, reward, found.get("best_step") or policy_step(run.path))
    history = run.history()
    last = history.last
    if last:
        unit = "updates" if is_offline(last) else "steps"
        print(f"Done in {last[ELAPSED]:.1f} s: {step_of(last):,} {unit}{_speed(history)}.")
    if run.exactness.startswith(NOT_EXACT):
        print(f"This run is {run.exactness}.")
    elif run.changes:
        print(f"This run was {'; '.join(run.changes)}.")
    metric = next((m for m in metrics_of(run.recipe) if m.summary and m.name in last), None)
    if metric is not None:
        text = metric.summary.format(value=last[metric.name], row=last, best=best)
        print(f"Last evaluation in training: {text}.")
        if best is None:
            print("No evaluation did better than chance: there is no best, the newest is kept.")
    print()
    if run.recipe.env is not None and run.recipe.evaluation.final_episodes:
        print(_evaluated_policy(run))
    evaluation.finish(run.recipe, run.path, lambda text: say(run.folder.named(text)))
    run.folder.publish()
    print(f"Evaluate it: etude eval {run.folder.name}")


def _speed(history: History) -> str:
    """Steps per second, and seconds of evaluations and saves, from a sample of a run's rows."""
    seconds: Counter[str] = Counter()
    phases = ("collect", "train", "test", "save")
    sample, last = history.thinned(), history.last
    for row, rows in sample.weighted():
        seconds.update({name: rows * (row.get(f"time/{name}") or 0.0) for name in phases})
    learning, rest = seconds["collect"] + seconds["train"], seconds["test"] + seconds["save"]
    if is_offline(last) or not learning:
        return ""
    speed = step_of(last) / learning
    return (
        f", {speed:,.0f} steps/s while collecting and training; {rest:.1f} s to evaluate and save"
    )


def _evaluated_policy(run: api.Run) -> str:
    """The policy that is evaluated after a run, and the reason."""
    row, step = run.history().last, policy_step(run.path)
    last = step_of(row) if row else step
    count = run.summary()["counts"]["evaluations"]
    why = (
        f"the best of {count} evaluations in training, which is the latest within one standard "
        "error of the highest"
        if count > 1
        else "the only one evaluated"
    )
    other = "" if step == last else f"; the last one, of step {last:,}, is in checkpoints/final"
    return f"Now the policy of step {step:,}: {why}{other}."
