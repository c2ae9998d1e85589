"""`etude sweep`: many trials of a recipe, of which only the best are continued."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.api import with_start_checkpoint
from etude.cli.options import Reporting, Trusting, parse, terminal_width
from etude.cli.target import Recipe_, find_target
from etude.cli.verbs import HELP
from etude.compare.sweeps import halving, processes, values
from etude.compare.sweeps.halving import Asked, Sweep, fitting, most_rungs
from etude.compare.sweeps.running import Start, prepare
from etude.compare.sweeps.running import run as run_sweep
from etude.core.errors import UsageError
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.planning.resolve import resolve
from etude.runs import files
from etude.runs.folder import file_name

TABLE = "trials.csv"


class WorkerOptions(Trusting, Reporting):
    """Placement of trials."""

    workers: int | None = Field(
        None, ge=1, description="Parallel trials; default: as many as cores allow."
    )
    ray: str | None = Field(
        None,
        description="Run trials as tasks of a Ray cluster with access to this folder: local starts "
        "one, auto finds the one on this machine, host:port names one.",
    )


class ResumeCommand(WorkerOptions):
    """Continue a sweep that was stopped or killed; its table is that of an uninterrupted sweep."""

    aliases = {"drop": "skip leave_out"}  # noqa: RUF012

    resume: str = Field(description="The sweep's folder.")
    drop: tuple[int, ...] = Field(
        (), description="Numbers of trials to leave out because they keep failing."
    )
    metric: str | None = Field(
        None, description="Another column to rank by, before the first rung is complete."
    )


class SweepCommand(WorkerOptions):
    """Trials of a recipe with different values. Each is planned at its full budget and paused at
    rungs; the best of a rung continue from their checkpoint, so no step is made twice. Values are
    a,b,c or LOW..HIGH, LOW..HIGH:log, LOW..HIGH:5. The same command, or `etude sweep --resume
    FOLDER`, continues a sweep that was stopped or killed."""

    aliases = {  # noqa: RUF012
        "trials": "n_trials num_samples max_trials",
        "workers": "jobs n_jobs",
        "reduction_factor": "eta",
        "sampler_seed": "sweep_seed",
    }

    recipe: Recipe_
    vary: tuple[str, ...] = Field(
        (), description="Fields and their values, section.key=VALUES; can be given several times."
    )
    trials: int | None = Field(
        None,
        ge=1,
        description="Trials to draw in each bracket; default: all combinations of the values.",
    )
    sampler: Literal["grid", "random", "tpe"] | None = Field(
        None,
        description="grid: all combinations; random: random draws; tpe: Optuna's sampler, which "
        "learns from earlier brackets (extra `sweep`); default random with --trials, else grid.",
    )
    sampler_seed: int = Field(0, ge=0, description="Seed of the sampler.")
    rungs: int | None = Field(
        None,
        ge=1,
        description="Number of times that trials are ranked, including the end; 1 runs all trials "
        "to their end; default: until one is left.",
    )
    reduction_factor: int = Field(
        3,
        ge=2,
        description="Factor by which each rung has fewer trials and more steps.",
    )
    brackets: int = Field(
        1,
        ge=1,
        description="Number of times that --trials new trials are drawn, for --sampler tpe.",
    )
    metric: str | None = Field(
        None,
        description="A column of metrics.jsonl to rank by; default eval/success_rate, else "
        "eval/mean_reward, else rollout/ep_rew_mean.",
    )
    minimize: bool = Field(False, description="Lower values of the metric are better.")
    folder: str | None = Field(
        None,
        description="The sweep's folder; default runs/<recipe>/sweep-<hash of recipe and options>.",
    )
    resume: str | None = Field(
        None, description="Continue the sweep in this folder, instead of naming a recipe."
    )


def run(arguments: list[str]) -> int:
    """Start a sweep, or continue one."""
    if not arguments or (arguments[0].startswith("-") and not {*HELP, "--resume"} & {*arguments}):
        raise UsageError(
            "Name a recipe first: etude sweep RECIPE --vary section.key=VALUES ...; or continue a "
            "sweep with --resume FOLDER."
        )
    if arguments[0] in HELP:
        return run(["ppo", *arguments])
    if arguments[0].startswith("-"):
        command = parse("sweep", ResumeCommand, arguments)
        sweep = Sweep.open(Path(command.resume), command.trust)
        try:
            _change(sweep, command.drop, command.metric)
            return _run(sweep, command)
        finally:
            sweep.close()
    target, options = find_target(arguments)
    vary, rest = _varied(options)
    asking = parse(f"sweep {target.name}", SweepCommand, rest, SweepCommand(recipe=target))
    if asking.resume is not None:
        raise UsageError(
            f"A sweep has its recipe in its folder: etude sweep --resume {asking.resume}."
        )
    asked = _asked(asking, vary)
    recipe = with_start_checkpoint(asking.recipe)
    folder = Path(asking.folder) if asking.folder else _usual_folder(recipe, asked)
    sweep = Sweep.create(folder, recipe, asked)
    try:
        return _run(sweep, asking)
    finally:
        sweep.close()


def _varied(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(texts after every --vary, other arguments)."""
    texts: list[str] = []
    rest: list[str] = []
    inside = False
    for argument in arguments:
        if re.match(r"--?[a-zA-Z]", argument):
            name, equals, text = argument.partition("=")
            inside = name == "--vary"
            if inside:
                texts += [text] if equals else []
                continue
        (texts if inside else rest).append(argument)
    return texts, rest


def _asked(command: SweepCommand, vary: list[str]) -> Asked:
    """The settings of a sweep; refuses options that contradict each other."""
    if not vary:
        raise UsageError(
            "Name a field to vary: --vary section.key=VALUES, for example --vary "
            "algorithm.learning_rate=1e-4..1e-2:log."
        )
    varied = [values.parse(text, command.recipe) for text in vary]
    names = [each.field for each in varied]
    if len(set(names)) < len(names):
        raise UsageError("--vary names a field twice: list all of its values at once.")
    sampler = command.sampler or ("grid" if command.trials is None else "random")
    values.check_sampler(sampler)
    if sampler == "grid":
        if command.trials is not None or command.brackets > 1:
            raise UsageError(
                "--sampler grid tries all combinations: leave --trials and --brackets."
            )
        trials = len(values.all_of(varied))
    elif command.trials is None:
        raise UsageError(f"--sampler {sampler} draws trials: give their number with --trials.")
    else:
        trials = command.trials
        values.check_count(varied, trials * command.brackets)
    if sampler == "tpe" and command.brackets == 1:
        raise UsageError(
            "--sampler tpe draws by the scores of earlier brackets: give --brackets 2 or more, or "
            "use --sampler random."
        )
    factor = command.reduction_factor
    most = most_rungs(trials, factor)
    if command.rungs is not None and command.rungs > most:
        raise UsageError(
            f"{trials} trials with --reduction-factor {factor} have {most} rung"
            f"{'s' if most > 1 else ''} at most: the last has one trial."
        )
    asked = Asked(
        tuple(vary),
        sampler,
        command.sampler_seed,
        trials,
        command.brackets,
        command.rungs or most,
        factor,
        command.metric,
        command.minimize,
    )
    if command.rungs is None:
        with suppress(UsageError):  # Trials may run where the recipe as it is does not.
            asked = fitting(command.recipe, resolve(command.recipe).loops, asked)
    return asked


def _usual_folder(recipe: Recipe, asked: Asked) -> Path:
    text = json.dumps([recipes.digest(recipe), asdict(asked)])
    return (
        Path("runs")
        / file_name(recipe.name)
        / f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )


def _change(sweep: Sweep, drop: tuple[int, ...], metric: str | None) -> None:
    """Drop trials, and change the metric before the first ranking."""
    known = {trial.number: trial for trial in sweep.trials}
    for number in drop:
        if number not in known:
            raise UsageError(f"{sweep.folder} has no trial {number}: it has 0 to {len(known) - 1}.")
        known[number].failed = known[number].failed or "dropped"
    if metric is not None and metric != sweep.metric:
        if sweep.complete:
            raise UsageError(
                f"Trials have already been ranked by {sweep.metric}: leave --metric out."
            )
        sweep.metric, sweep.asked = metric, replace(sweep.asked, metric=metric)
    if drop or metric is not None:
        sweep.save()


def _run(sweep: Sweep, command: WorkerOptions) -> int:
    """Run a sweep to its end, and print its table."""
    if "RANK" in os.environ:
        raise UsageError("A sweep starts its own processes: leave torchrun out.")
    workers = command.workers or processes.jobs_for(sweep.recipe)
    say = partial(print, file=sys.stderr if command.json_output else sys.stdout, flush=True)
    if not sweep.is_done:
        asked = sweep.asked
        all_trials = asked.trials * asked.brackets
        start = _start(sweep, command, workers)
        prepare(sweep, say)
        say(
            f"{all_trials} trials of {sweep.recipe.name}, {workers} in parallel; they print to "
            f"{sweep.folder}/t*.log. Continue after a stop: etude sweep --resume {sweep.folder}"
        )
        run_sweep(sweep, start, workers, say, command.trust)
        files.replace_file(sweep.folder / TABLE, [halving.to_csv(sweep).encode()])
    width = terminal_width()
    text = f"\n{halving.to_table(sweep, width, sys.stdout.isatty())}\n" + _after(sweep)
    command.show(halving.to_json(sweep) if command.json_output else None, text)
    return 0 if sweep.best() is not None else 1


def _start(sweep: Sweep, command: WorkerOptions, workers: int) -> Start:
    if command.ray is None:
        return processes.start
    from etude.compare.sweeps.processes import connected

    threads = processes.threads_of(sweep.recipe)
    return connected(command.ray, workers * threads, threads)


def _after(sweep: Sweep) -> str:
    """The best trial and the next commands."""
    best = sweep.best()
    if best is None:
        return "No trial was finished.\n"
    path = sweep.path(best)
    return (
        f"Best: {path} ({halving.settings(best)})\n"
        f"Evaluate it: etude eval {path}\n"
        f"Train it with other seeds: etude train {path / 'recipe.yaml'} --seeds 5\n"
    )
