"""Find recipes: of Etude, of other packages, in files and functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from etude.core.catalogue import RECIPES, TUNED, Catalogue, load_attribute
from etude.core.errors import EtudeError, UsageError, describe_error
from etude.planning.recipe import Recipe as Recipe
from etude.planning.recipe import changes as changes
from etude.planning.recipe import digest as digest
from etude.planning.recipe import dump as dump
from etude.planning.recipe import fields as fields
from etude.planning.recipe import load as load
from etude.planning.recipe import texts as texts
from etude.planning.recipe import validated as validated
from etude.planning.recipe import with_changes as with_changes

names, purpose = RECIPES.names, RECIPES.purpose


def made_by(name: str, among: Catalogue = RECIPES) -> Callable[[], Recipe]:
    """The function that makes a recipe."""
    made: Callable[[], Recipe] = load_attribute(
        among.built_in().get(name) or among.installed()[name].value
    )
    return made


def __getattr__(name: str) -> Any:
    """`recipes.reach_short` is the function that makes the recipe reach-short."""
    if name.replace("_", "-") in names():
        return made_by(name.replace("_", "-"))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The names here and the functions that make recipes, for completion."""
    return sorted({*globals(), *(name.replace("-", "_") for name in names())})


def changed(recipe: Recipe) -> str:
    """The settings that differ from the recipe of this name, without the seed: "env.id Ant-v5"."""
    if recipe.name not in names():
        return ""
    before = dict(fields(made_by(recipe.name)()))
    now = {name: value for name, value in fields(recipe) if before.get(name, "") != value}
    return ", ".join(f"{name} {_short(value)}" for name, value in now.items() if name != "seed")


def title(recipe: Recipe) -> str:
    """The name of a recipe, after that of its task if it is of any task or of another one:
    "Hopper-v5, ppo"."""
    if recipe.env is None:
        return recipe.name
    usual = made_by(recipe.name)().env if recipe.name in names() else recipe.env
    is_of_task = usual is not None and usual.task_name == recipe.env.task_name
    if is_of_task and recipe.name != recipe.algorithm.kind:
        return recipe.name
    return f"{recipe.env.task_name}, {recipe.name}"


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def find(target: str, trust: bool = False) -> Recipe:
    """The recipe with a name, tuned for an environment's id, in a recipe.yaml, or from
    FILE.py:FUNCTION.

    trust: the code that a recipe.yaml names may run.
    """
    if target in names():
        return made_by(target)()
    if target in TUNED.names():
        return made_by(target, TUNED)()
    if re.fullmatch(r"[\w./:-]+-v\d+", target):
        near = difflib.get_close_matches(target, TUNED.names(), n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]}?" if near else ":"
        raise UsageError(
            f"There are no tuned settings for {target}{hint} `etude train ppo --env.id {target}` "
            f"has those of PPO for any environment. Tuned are {', '.join(TUNED.names())}."
        )
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError(f"There is no file {target}; check the path.")
        return load(path, trust)
    if ":" in target:
        return _from_function(target)
    if path.suffix == ".py":
        raise UsageError(f"Name the function in it that returns the recipe: {target}:FUNCTION.")
    near = difflib.get_close_matches(target, names(), n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"There is no recipe '{target}'; {hint}`etude list` shows them all, and a path to a "
        "recipe.yaml or FILE.py:FUNCTION works too."
    )


def _from_function(target: str) -> Recipe:
    """The recipe that `file.py:function` or `module:function` returns."""
    from etude.core.user_code import load_object

    function = load_object(target, "my_recipes.py:my_recipe")
    if not callable(function):
        raise UsageError(f"{target} is not a function: write one that returns an etude.Recipe.")
    try:
        recipe = function()
    except EtudeError:
        raise
    except ValidationError as error:
        from etude.core.explain import explain

        raise UsageError(f"{target}: {explain(error, Recipe)}") from error
    except Exception as error:  # of the user's code
        raise UsageError(f"{target} failed: {describe_error(error)}.") from error
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{target} returns a {type(recipe).__name__}; it must return an etude.Recipe, for "
            "example etude.recipes.reach() with some fields changed."
        )
    return recipe
