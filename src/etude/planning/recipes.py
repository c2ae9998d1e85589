"""The recipes that come with Etude and with other packages, and how one is found."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from etude.core.errors import EtudeError, UsageError
from etude.core.explain import explain
from etude.core.imports import describe, load_object
from etude.planning.recipe import Recipe, changes, digest, dump, load, texts, validated

__all__ = [
    "Recipe",
    "changes",
    "digest",
    "dump",
    "find",
    "load",
    "names",
    "purpose",
    "texts",
    "validated",
]

GROUP = "etude.recipes"
"""Entry points of packages that bring recipes: a name, and a function that returns a Recipe."""


@cache
def _built_in() -> dict[str, str]:
    """{name: "module:function"}: imported by name, since tasks stand above this."""
    known: dict[str, str] = import_module("etude.tasks").RECIPES
    return known


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Every recipe by its name, those of this package first."""
    return [*(_built_in() | _installed())]


def made_by(name: str) -> Callable[[], Recipe]:
    """The function that makes a recipe."""
    place = _built_in().get(name) or _installed()[name].value
    module, _, function = place.partition(":")
    made: Callable[[], Recipe] = getattr(import_module(module), function)
    return made


def __getattr__(name: str) -> Any:
    """`recipes.reach_short` is the function that makes the recipe reach-short."""
    if name.replace("_", "-") in names():
        return made_by(name.replace("_", "-"))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def purpose(name: str) -> str:
    """What a recipe is for, in one line."""
    place = _built_in().get(name) or _installed()[name].value
    return _purposes(place.partition(":")[0]).get(place.partition(":")[2], "")


@cache
def _purposes(module: str) -> dict[str, str]:
    """The first lines of the docstrings of a module's functions, which is not imported for it."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    nodes = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {f.name: (ast.get_docstring(f) or "").partition("\n")[0] for f in functions}


def find(target: str, trust: bool = False) -> Recipe:
    """A recipe by its name, from a recipe.yaml, or from one's own function.

    trust: code that the recipe.yaml names may run.
    """
    if target in names():
        return made_by(target)()
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
    """What the function behind `file.py:function` or `module:function` returns."""
    function = load_object(target, "my_recipes.py:my_recipe")
    if not callable(function):
        raise UsageError(f"{target} is no function: write one that returns an etude.Recipe.")
    try:
        recipe = function()
    except EtudeError:
        raise
    except ValidationError as error:
        raise UsageError(f"{target}: {explain(error, Recipe)}") from error
    except Exception as error:  # someone else's code may fail in any way
        raise UsageError(f"{target} failed: {describe(error)}.") from error
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{target} returns a {type(recipe).__name__}; it must return an etude.Recipe, such as "
            "etude.recipes.reach() with some fields changed."
        )
    return recipe
