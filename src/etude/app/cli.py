"""The command line: verb, target, --section.key value."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from pydantic import Field, ValidationError

from etude.app import plan_view, recipes
from etude.app.plan import make_plan
from etude.app.recipes import Recipe
from etude.app.run import Run, resume, train
from etude.core.errors import EtudeError, UsageError
from etude.core.recipe import Config
from etude.logs.console import ConsoleTable

USAGE = """\
etude trains robot skills.

  etude list                                  recipes and what each is for
  etude plan   RECIPE [--section.key value]   what a run would do; --measure, --compare, --json
  etude train  RECIPE [--section.key value]   plan, then train
  etude resume RUN                            continue a run, bit for bit
  etude eval   RUN [--episodes 100]           fresh deterministic episodes

RECIPE is a name from `etude list` or a recipe.yaml; RUN is a run folder.
`etude train RECIPE --help` shows every field with its default.
"""

T = TypeVar("T")
Recipe_ = Annotated[Recipe, tyro.conf.arg(name="")]


class ListCommand(Config):
    """Recipes and what each is for."""

    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class PlanCommand(Config):
    """What a run would do, without doing it."""

    recipe: Recipe_
    measure: bool = Field(False, description="Time a few steps and say how long the run takes.")
    compare: str | None = Field(None, description="Variants side by side: section.key=a,b,c.")
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


class TrainCommand(Config):
    """Plan a run, then do it."""

    recipe: Recipe_
    folder: str | None = Field(
        None, description="The run's folder; default runs/<recipe>/<date-time>-s<seed>."
    )
    source: Annotated[str | None, tyro.conf.arg(name="from")] = Field(
        None, description="A run or policy to start from: its weights and normaliser."
    )


class ResumeCommand(Config):
    """Continue a run from its last good checkpoint."""

    run: tyro.conf.Positional[str] = Field(description="The run's folder.")
    total_timesteps: int | None = Field(
        None, ge=1, description="A larger budget of environment steps than the run was given."
    )


class EvalCommand(Config):
    """Fresh deterministic episodes of a run's best policy."""

    run: tyro.conf.Positional[str] = Field(description="The run's folder.")
    episodes: int = Field(100, ge=1, description="How many episodes.")
    seed: int | None = Field(None, description="Other episodes than those of the run's own seed.")
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = Field(
        False, description="Print JSON, for programs."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        near = [name for name in VERBS if name.startswith(verb[:2])]
        hint = f" Did you mean '{near[0]}'?" if near else ""
        print(f"There is no command '{verb}'.{hint} `etude --help` shows them.", file=sys.stderr)
        return UsageError.exit_code
    try:
        VERBS[verb](rest)
    except EtudeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ValidationError as error:
        print(recipes.explain(error), file=sys.stderr)
        return UsageError.exit_code
    return 0


def _parse(verb: str, command: type[T], arguments: list[str], default: T | None = None) -> T:
    given: dict[str, Any] = {} if default is None else {"default": default}
    parsed: T = tyro.cli(
        command,
        args=arguments,
        prog=f"etude {verb}",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
        **given,
    )
    return parsed


def _target(verb: str, arguments: list[str]) -> tuple[Recipe, list[str]]:
    """The recipe that is named first, and the options after it."""
    if not arguments or arguments[0].startswith("-"):
        names = ", ".join(recipes.CATALOG)
        raise UsageError(f"Name a recipe first: etude {verb} RECIPE ... (one of {names}).")
    return recipes.find(arguments[0]), arguments[1:]


def _list(arguments: list[str]) -> None:
    command = _parse("list", ListCommand, arguments)
    known = {name: recipes.purpose(name) for name in recipes.CATALOG}
    if command.json_output:
        print(json.dumps(known, indent=2))
        return
    for name, text in known.items():
        print(f"  {name:<14}{text}")


def _plan(arguments: list[str]) -> None:
    recipe, rest = _target("plan", arguments)
    command = _parse(f"plan {recipe.name}", PlanCommand, rest, PlanCommand(recipe=recipe))
    width = shutil.get_terminal_size((100, 24)).columns
    if command.compare is not None:
        field, variants = _variants(command.recipe, command.compare)
        plans = [(value, make_plan(variant, command.measure)) for value, variant in variants]
        if command.json_output:
            print(json.dumps({value: plan.to_json() for value, plan in plans}, indent=2))
        else:
            print(plan_view.compare(field, plans, width), end="")
        return
    plan = make_plan(command.recipe, command.measure)
    if command.json_output:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print(plan_view.render(plan, width, color=sys.stdout.isatty()), end="")


def _variants(recipe: Recipe, text: str) -> tuple[str, list[tuple[str, Recipe]]]:
    """Recipes that differ in one field, from "section.key=a,b,c"."""
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise UsageError(f"--compare takes section.key=a,b,c, not '{text}'.")
    variants = []
    for value in values.split(","):
        command = _parse(
            "plan --compare", PlanCommand, [f"--{field}", value], PlanCommand(recipe=recipe)
        )
        variants.append((value, command.recipe))
    return field, variants


def _train(arguments: list[str]) -> None:
    recipe, rest = _target("train", arguments)
    command = _parse(f"train {recipe.name}", TrainCommand, rest, TrainCommand(recipe=recipe))
    chosen = command.recipe
    if command.source is not None:
        chosen = chosen.model_copy(update={"start_from": str(Path(command.source).resolve())})
    run = train(chosen, command.folder, logs=[ConsoleTable()], say=_say)
    _done(run)


def _resume(arguments: list[str]) -> None:
    command = _parse("resume", ResumeCommand, arguments)
    _done(resume(Path(command.run), command.total_timesteps, logs=[ConsoleTable()], say=_say))


def _done(run: Run) -> None:
    best = run.summary()["best"]
    last = run.rows()[-1]
    print(f"Done in {last['time/time_elapsed']:.1f} s: {last['timesteps']:,} steps.")
    if "eval/success_rate" in last:
        print(f"Final evaluation: {last['eval/success_rate']:.1%} success", end=", ")
        print(f"mean reward {last['eval/mean_reward']:.2f}; best {best[0]:.1%}.")
    else:
        print(f"Final evaluation: mean reward {last['eval/mean_reward']:.2f}; best {best[1]:.2f}.")
    print(f"Evaluate it: etude eval {run.path}")


def _eval(arguments: list[str]) -> None:
    command = _parse("eval", EvalCommand, arguments)
    metrics = Run(command.run).evaluate(command.episodes, command.seed)
    if command.json_output:
        print(json.dumps(metrics, indent=2))
        return
    for name, value in metrics.items():
        print(f"  {name:<24}{value:>12.4f}")


def _say(text: str) -> None:
    print(text, flush=True)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "list": _list,
    "plan": _plan,
    "train": _train,
    "resume": _resume,
    "eval": _eval,
}
