"""`etude sweep`: many trials of a recipe, of which the best go on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.api import pinned
from etude.cli.options import Reporting, parse
from etude.cli.target import Recipe_, Trusting, find_target
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

TABLE = "trials.csv"


class WorkerOptions(Trusting, Reporting):
    """Where trials run."""

    workers: int | None = Field(
        None, ge=1, description="Trials side by side; default: as many as cores allow."
    )
    ray: str | None = Field(
        None,
        description="Run trials as tasks of a Ray cluster that sees this folder: local starts one "
        "here, auto finds the one of this machine, host:port names one.",
    )


class ResumeCommand(WorkerOptions):
    """Continue a sweep that was stopped or killed, with the same table at its end."""

    aliases = {"drop": "skip leave_out"}  # noqa: RUF012

    resume: str = Field(description="The sweep's folder.")
    drop: tuple[int, ...] = Field(
        (), description="Numbers of trials that fail again and again, to go on without them."
    )
    metric: str | None = Field(
        None, description="Another column to rank by, where no rung is complete yet."
    )


class SweepCommand(WorkerOptions):
    """Trials of a recipe with other values. Each is planned at its full budget and paused at rungs;
    the best of a rung go on from their checkpoint, so no step is made twice. Values are
    a,b,c or LOW..HIGH, LOW..HIGH:log, LOW..HIGH:5. A sweep that was stopped or killed goes on with
    the same command, or with `etude sweep --resume FOLDER`."""

    aliases = {  # noqa: RUF012
        "trials": "n_trials num_samples max_trials",
        "workers": "jobs n_jobs",
        "reduction_factor": "eta",
        "sampler_seed": "sweep_seed",
    }

    recipe: Recipe_
    vary: tuple[str, ...] = Field(
        (), description="Fields and their values, section.key=VALUES; may be given several times."
    )
    trials: int | None = Field(
        None,
        ge=1,
        description="Trials to draw, of each bracket; default: all combinations of the values.",
    )
    sampler: Literal["grid", "random", "tpe"] | None = Field(
        None,
        description="grid tries all combinations, random draws, tpe is Optuna's, which learns from "
        "the brackets before (extra `sweep`); default random with --trials, else grid.",
    )
    sampler_seed: int = Field(0, ge=0, description="Where the drawing of values comes from.")
    rungs: int | None = Field(
        None,
        ge=1,
        description="Times that trials are ranked, the run's end included; 1 runs all to their "
        "end; default: until one is left.",
    )
    reduction_factor: int = Field(
        3,
        ge=2,
        description="One in so many goes on to the next rung, with so many times the steps.",
    )
    brackets: int = Field(
        1,
        ge=1,
        description="How often --trials new trials are drawn and halved, for --sampler tpe.",
    )
    metric: str | None = Field(
        None,
        description="A column of metrics.jsonl to rank by; default eval/success_rate, else "
        "eval/mean_reward, else rollout/ep_rew_mean.",
    )
    minimize: bool = Field(False, description="Lower values of the metric are better.")
    folder: str | None = Field(
        None, description="The sweep's folder; default runs/<recipe>/sweep-<hash of what is asked>."
    )
    resume: str | None = Field(
        None, description="Continue the sweep in this folder; no recipe is named then."
    )


def run(arguments: list[str]) -> int:
    """Begin a sweep, or continue one."""
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
        raise UsageError(f"A sweep knows its recipe: etude sweep --resume {asking.resume}.")
    asked = _asked(asking, vary)
    recipe = pinned(asking.recipe)
    folder = Path(asking.folder) if asking.folder else _usual_folder(recipe, asked)
    sweep = Sweep.create(folder, recipe, asked)
    try:
        return _run(sweep, asking)
    finally:
        sweep.close()


def _varied(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The texts after every --vary, and the other arguments."""
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
    """What is asked for, in whole numbers; refuses what does not go together."""
    if not vary:
        raise UsageError(
            "Say what is varied: --vary section.key=VALUES, such as --vary "
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
        raise UsageError(f"--sampler {sampler} draws trials: say how many with --trials.")
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
            f"{'s' if most > 1 else ''} at most: the last has one trial then."
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
    name = re.sub(r"[^\w.-]+", "-", recipe.name).strip(".-") or "run"
    text = json.dumps([recipes.digest(recipe), asdict(asked)])
    return Path("runs") / name / f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _change(sweep: Sweep, drop: tuple[int, ...], metric: str | None) -> None:
    """What a resume may change: trials to go on without, and the metric before it has ranked."""
    known = {trial.number: trial for trial in sweep.trials}
    for number in drop:
        if number not in known:
            raise UsageError(f"{sweep.folder} has no trial {number}: it has 0 to {len(known) - 1}.")
        known[number].failed = known[number].failed or "dropped"
    if metric is not None and metric != sweep.metric:
        if sweep.complete:
            raise UsageError(f"Trials were ranked by {sweep.metric} already, and stay so.")
        sweep.metric, sweep.asked = metric, replace(sweep.asked, metric=metric)
    if drop or metric is not None:
        sweep.save()


def _run(sweep: Sweep, command: WorkerOptions) -> int:
    """Run a sweep to its end, and print its table."""
    if "RANK" in os.environ:
        raise UsageError("A sweep starts processes of its own: leave torchrun out.")
    workers = command.workers or processes.jobs_for(sweep.recipe)
    say = partial(print, file=sys.stderr if command.json_output else sys.stdout, flush=True)
    if not sweep.is_done:
        asked = sweep.asked
        all_trials = asked.trials * asked.brackets
        start = _start(sweep, command, workers)
        prepare(sweep, say)
        say(
            f"{all_trials} trials of {sweep.recipe.name}, {workers} side by side; they print to "
            f"{sweep.folder}/t*.log. If this is stopped: etude sweep --resume {sweep.folder}"
        )
        run_sweep(sweep, start, workers, say, command.trust)
        files.replace_file(sweep.folder / TABLE, [halving.to_csv(sweep).encode()])
    width = shutil.get_terminal_size((100, 24)).columns
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
    """What one would do next."""
    best = sweep.best()
    if best is None:
        return "No trial came to its end.\n"
    path = sweep.path(best)
    return (
        f"Best: {path} ({halving.settings(best)})\n"
        f"Evaluate it: etude eval {path}\n"
        f"One run says little: etude train {path / 'recipe.yaml'} --seeds 5\n"
    )
