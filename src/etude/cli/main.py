"""The command line: verb, target, --section.key value."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field, ValidationError

from etude.api import Run, plan, resume, silent, train
from etude.cli import doctor
from etude.cli.environments import env_config
from etude.cli.options import Verbs, parse, run_verb, spelled_out, with_env
from etude.core.config import Config
from etude.core.errors import EtudeError, UsageError
from etude.core.explain import explain
from etude.core.ranks import ToldElsewhere
from etude.core.trust import vouch
from etude.envs.check import check_env, render_findings
from etude.metrics.rows import ELAPSED, is_offline, step_of
from etude.planning import page as plan_view
from etude.planning import recipes
from etude.planning.metrics_of import metrics_of
from etude.planning.out_of_memory import explained
from etude.planning.recipe import Recipe
from etude.reports import evaluating, fsck, play
from etude.rollout.local import Placement
from etude.runs.folder import NOT_EXACT
from etude.training.distributed import writes

USAGE = """\
etude trains robot skills.

  etude list                                  recipes and what each is for
  etude plan   RECIPE [--section.key value]   what a run would do; --measure, --compare, --json
  etude train  RECIPE [--section.key value]   plan, then train
  etude resume RUN                            continue a run, bit for bit
  etude eval   RUN [--episodes 100] [--video] fresh deterministic episodes, and films of them
  etude play   RUN                            watch the policy in MuJoCo's viewer
  etude check  TASK                           does an environment keep its contract
  etude data   inspect|import|validate|record  datasets of demonstrations
  etude motion list|show CLIP                 clips of motion that a humanoid can imitate
  etude fsck   RUN                            which files of it are whole, what can be saved
  etude doctor                                what this machine can and cannot do

RECIPE is a name from `etude list`, a recipe.yaml or FILE.py:FUNCTION; RUN is a run folder; TASK is
module:Class or a Gymnasium id. One's own: `etude train ppo --env.id ID`, `--env.task module:Class`.
`etude train RECIPE --help` shows every field with its default.
"""

Recipe_ = Annotated[Recipe, tyro.conf.arg(name="")]


class ListCommand(Config):
    """Recipes and what each is for."""

    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class Trusting(Config):
    """A command that may run code which a file names."""

    trust: bool = Field(
        False,
        description="Run the code that the recipe file names. It is remembered: once is enough.",
    )


class PlanCommand(Trusting):
    """What a run would do, without doing it."""

    recipe: Recipe_
    measure: bool = Field(False, description="Time a few steps and say how long the run takes.")
    compare: str | None = Field(None, description="Variants side by side: section.key=a,b,c.")
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class TrainCommand(Trusting):
    """Plan a run, then do it."""

    recipe: Recipe_
    folder: str | None = Field(
        None, description="The run's folder; default runs/<recipe>/<date-time>-s<seed>."
    )
    source: Annotated[str | None, tyro.conf.arg(name="from")] = Field(
        None,
        description="A run, checkpoint or policy folder to start from; `etude plan` says what of "
        "it is kept.",
    )


class ResumeCommand(Trusting):
    """Continue a run from its last good checkpoint."""

    run: tyro.conf.Positional[str] = Field(description="The run's folder.")
    checkpoint: int | None = Field(
        None,
        ge=0,
        description="Go back to the checkpoint of this step; those after it are set aside.",
    )
    total_timesteps: int | None = Field(
        None, ge=1, description="A larger budget of environment steps than the run was given."
    )
    collector: Placement = Field(Placement(), description="Where rollouts run from now on.")


class EvalCommand(Trusting):
    """Fresh deterministic episodes of a run's best policy."""

    run: tyro.conf.Positional[str] = Field(description="The run's folder.")
    episodes: int | None = Field(
        None, ge=1, description="How many; if left out 100, or every motion once."
    )
    video: bool = Field(
        False, description="Film a success and a failure of each kind: mp4 and a strip of pictures."
    )
    seed: int | None = Field(None, description="Other episodes than those of the run's own seed.")
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class PlayCommand(Trusting):
    """Watch a run's best policy in MuJoCo's viewer."""

    run: tyro.conf.Positional[str] = Field(description="The run's folder.")
    seed: int | None = Field(None, description="Other episodes than those of the run's own seed.")


class CheckCommand(Config):
    """Whether an environment keeps the contract everything else relies on."""

    task: tyro.conf.Positional[str] = Field(
        description="module:Class or file.py:Class of a batched task, or a Gymnasium id."
    )
    options: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments for it: names and values in turn."
    )
    steps: int = Field(200, ge=1, description="Steps to play; episodes should end within them.")
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class FsckCommand(Config):
    """Which files of a run or dataset are whole, and what can be saved; changes nothing."""

    path: tyro.conf.Positional[str] = Field(description="A run's folder, or a dataset's.")
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class DoctorCommand(Config):
    """What this machine can and cannot do."""

    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        with explained():
            return run_verb("etude", USAGE, VERBS, list(sys.argv[1:] if argv is None else argv))
    except ToldElsewhere as error:
        return error.exit_code
    except EtudeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ValidationError as error:
        print(explain(error, None), file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        print("Stopped; a run that had begun goes on with `etude resume RUN`.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _target(verb: str, arguments: list[str]) -> tuple[Recipe, list[str]]:
    """The recipe that is named first, and the options after it."""
    if not arguments or arguments[0].startswith("-"):
        names = ", ".join(recipes.names())
        raise UsageError(f"Name a recipe first: etude {verb} RECIPE ... (one of {names}).")
    name, rest = arguments[0], spelled_out(arguments[1:])
    vouch(text.partition("=")[2] or text for text in rest)
    return with_env(recipes.find(name, "--trust" in rest), rest), rest


def _list(arguments: list[str]) -> None:
    command = parse("list", ListCommand, arguments)
    known = {name: recipes.purpose(name) for name in recipes.names()}
    if command.json_output:
        print(json.dumps(known, indent=2))
        return
    width = max(map(len, known)) + 2
    for name, text in known.items():
        print(f"  {name:<{width}}{text}")


def _plan(arguments: list[str]) -> None:
    recipe, rest = _target("plan", arguments)
    command = parse(f"plan {recipe.name}", PlanCommand, rest, PlanCommand(recipe=recipe))
    width = shutil.get_terminal_size((100, 24)).columns
    if command.compare is not None:
        field, variants = _variants(command.recipe, command.compare)
        plans = [(value, plan(variant, command.measure)) for value, variant in variants]
        if command.json_output:
            print(json.dumps({value: plan.to_json() for value, plan in plans}, indent=2))
        else:
            print(plan_view.compare(field, plans, width), end="")
        return
    made = plan(command.recipe, command.measure)
    if command.json_output:
        print(json.dumps(made.to_json(), indent=2))
    else:
        print(plan_view.render(made, width, color=sys.stdout.isatty()), end="")


def _variants(recipe: Recipe, text: str) -> tuple[str, list[tuple[str, Recipe]]]:
    """Recipes that differ in one field, from "section.key=a,b,c"."""
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise UsageError(f"--compare takes section.key=a,b,c, not '{text}'.")
    variants = []
    for value in values.split(","):
        command = parse(
            f"plan {recipe.name}", PlanCommand, [f"--{field}", value], PlanCommand(recipe=recipe)
        )
        variants.append((value, command.recipe))
    return field, variants


def _train(arguments: list[str]) -> None:
    recipe, rest = _target("train", arguments)
    command = parse(f"train {recipe.name}", TrainCommand, rest, TrainCommand(recipe=recipe))
    chosen = command.recipe
    if command.source is not None:
        chosen = chosen.model_copy(update={"start_from": str(Path(command.source).resolve())})
    run = train(chosen, command.folder, say=_say, console=True)
    if writes():
        _done(run)


def _resume(arguments: list[str]) -> None:
    command = parse("resume", ResumeCommand, spelled_out(arguments))
    path, budget, place = Path(command.run), command.total_timesteps, command.collector
    at, trust = command.checkpoint, command.trust
    run = resume(path, budget, say=_say, console=True, collector=place, checkpoint=at, trust=trust)
    if writes():
        _done(run)


def _done(run: Run) -> None:
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
    evaluating.finish(run.recipe, run.path, _say)
    print(f"Evaluate it: etude eval {run.path}")


def _eval(arguments: list[str]) -> None:
    command = parse("eval", EvalCommand, arguments)
    run = Run(command.run, command.trust)
    say = silent if command.json_output else _say
    metrics = evaluating.examine(
        run.recipe, run.path, command.episodes, command.seed, command.video, say
    )
    if command.json_output:
        print(json.dumps(metrics, indent=2))


def _play(arguments: list[str]) -> None:
    command = parse("play", PlayCommand, arguments)
    run = Run(command.run, command.trust)
    play.play(run.recipe, run.path, command.seed)


def _say(text: str) -> None:
    print(text, flush=True)


def _check(arguments: list[str]) -> int:
    command = parse("check", CheckCommand, arguments)
    config = env_config(command.task, command.options)
    agents = config.num_agents
    config.build_unchecked(agents).close()  # a name that stands for nothing is no finding
    findings = check_env(config.build_unchecked, command.steps, agents=agents)
    if command.json_output:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(render_findings(command.task, findings), end="")
    return int(any(finding.verdict == "failed" for finding in findings))


def _data(arguments: list[str]) -> int:
    # h5py and what reads through it is loaded only where it is asked for.
    from etude.cli.data import data_main

    return data_main(arguments)


def _motion(arguments: list[str]) -> int:
    from etude.cli.motion import motion_main

    return motion_main(arguments)


def _fsck(arguments: list[str]) -> int:
    command = parse("fsck", FsckCommand, arguments)
    report = fsck.examine(Path(command.path))
    if command.json_output:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(fsck.render(report), end="")
    return int(report.damaged)


def _doctor(arguments: list[str]) -> None:
    command = parse("doctor", DoctorCommand, arguments)
    findings = doctor.examine(Path.cwd())
    if command.json_output:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        print(doctor.render(findings, width, color=sys.stdout.isatty()), end="")


VERBS: Verbs = {
    "list": _list,
    "plan": _plan,
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "play": _play,
    "check": _check,
    "data": _data,
    "motion": _motion,
    "fsck": _fsck,
    "doctor": _doctor,
}
