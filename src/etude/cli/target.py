"""The recipe that a command line names, of the kinds that its options ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from etude.cli.options import Called
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.user_code import trust_texts
from etude.envs import NAMED_BY
from etude.planning import recipes
from etude.planning.recipe import REGISTRIES, Recipe

SHORT = {"--collector": "--collector.kind", "--from": "--start-from"}
Recipe_ = Annotated[Recipe, Called("")]


class Trusting(Config):
    """A command that may run code which a file names."""

    trust: bool = Field(
        False,
        description="Run the code that the recipe file names. It is remembered: once is enough.",
    )


def find_target(arguments: list[str]) -> tuple[Recipe, list[str]]:
    """The recipe that is named first, of the kinds asked for, and the options after it."""
    name, rest = arguments[0], spelled_out(arguments[1:])
    trust_texts(text.partition("=")[2] or text for text in rest)
    return with_kinds(recipes.find(name, "--trust" in rest), rest), rest


def spelled_out(arguments: list[str]) -> list[str]:
    """`--collector ray` is short for `--collector.kind ray`, and `--from` for `--start-from`."""
    names = [argument.partition("=") for argument in arguments]
    return [f"{SHORT.get(name, name)}{equals}{value}" for name, equals, value in names]


def with_kinds(recipe: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with the kinds that `--SECTION.kind` asks for; `--env.id`, `--env.task` and
    `--env.parallel` choose the kind of the environment as well."""
    kinds = {s: kind for s in REGISTRIES if (kind := _value_of(f"--{s}.kind", arguments))}
    named = [f"env.{f}" for f in NAMED_BY if _value_of(f"--env.{f}", arguments) is not None]
    here = None if recipe.env is None else recipe.env.kind
    if kinds.get("env") in NAMED_BY.values() and kinds["env"] != here and not named:
        raise UsageError(
            f"--env.kind is {here} in this recipe: --env.id ID, --env.task module:Class or "
            "--env.parallel MODULE chooses another environment, or start from another recipe."
        )
    for section, kind in kinds.items():
        REGISTRIES[section].check(kind, "--")
    return recipe.with_kinds(kinds, named)


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The text after an option, "" if there is none; None without the option."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else next(iter(arguments[i + 1 :]), "")
    return None


def split_run(text: str) -> tuple[Path, str]:
    """(run, "") of a run's folder; (run, name) of one of its checkpoints."""
    path = Path(text)
    inside = path.parent.name == "checkpoints" and path.is_dir()
    return (path.parent.parent, path.name.lstrip("0") or "0") if inside else (path, "")
