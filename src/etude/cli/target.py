"""The recipe that a command line names, of the kinds that its options ask for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from etude.cli.options import Called
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.registry import Registry
from etude.core.trust import vouch
from etude.envs import NAMED_BY
from etude.envs.config import ENVS
from etude.models.policies import POLICIES
from etude.planning import recipes
from etude.planning.kinds import ALGORITHMS, REWARDS
from etude.planning.recipe import Recipe
from etude.rollout.local import COLLECTORS

REGISTRIES: dict[str, Registry[Any]] = {
    each.section: each for each in (ENVS, POLICIES, ALGORITHMS, REWARDS, COLLECTORS)
}
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
    vouch(text.partition("=")[2] or text for text in rest)
    return with_kinds(recipes.find(name, "--trust" in rest), rest), rest


def spelled_out(arguments: list[str]) -> list[str]:
    """`--collector ray` is short for `--collector.kind ray`."""
    return [
        "--collector.kind" if a == "--collector" else a.replace("--collector=", "--collector.kind=")
        for a in arguments
    ]


def with_kinds(recipe: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with the kinds that `--SECTION.kind` asks for; `--env.id`, `--env.task` and
    `--env.parallel` choose the kind of the environment as well."""
    kinds = {section: _value_of(f"--{section}.kind", arguments) for section in REGISTRIES}
    named = [kind for f, kind in NAMED_BY.items() if _value_of(f"--env.{f}", arguments) is not None]
    here = None if recipe.env is None else recipe.env.kind
    if named and not isinstance(recipe.env, ENVS.load(named[0])):
        kinds["env"] = named[0]
    elif kinds["env"] in NAMED_BY.values() and kinds["env"] != here and not named:
        raise UsageError(
            f"--env.kind is {here} in this recipe: --env.id ID, --env.task module:Class or "
            "--env.parallel MODULE chooses another environment, or start from another recipe."
        )
    asked = {section: kind for section, kind in kinds.items() if kind}
    chosen = {s: _as_kind(REGISTRIES[s], getattr(recipe, s), kind) for s, kind in asked.items()}
    return recipe.model_copy(update=chosen)


def _as_kind(registry: Registry[Any], section: Config | None, kind: str) -> Config:
    """A section as the kind of a name: fields stay where one kind derives from the other."""
    if not registry.has(kind):
        *most, last = (f"'{name}'" for name in registry.names())
        raise UsageError(
            f"--{registry.section}.kind must be {', '.join(most)} or {last}, not '{kind}'."
        )
    there, wanted = type(section), registry.load(kind)
    if section is None or not (issubclass(wanted, there) or issubclass(there, wanted)):
        return registry.make(kind)  # type: ignore[no-any-return]
    kept = section.model_dump(include=set(wanted.model_fields), exclude_unset=True)
    return registry.validate(kept | {"kind": kind})  # type: ignore[no-any-return]


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The text after an option, "" if there is none; None without the option."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else next(iter(arguments[i + 1 :]), "")
    return None
