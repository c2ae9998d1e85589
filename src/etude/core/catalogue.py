"""Names of recipes and kinds and their places, listed without importing their modules.

Two places are searched: lists of this package, {name: "module:object"}, and the entry points of
installed packages.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

_DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def load_attribute(name: str) -> Any:
    """The object "module:name" of this package, for registries that name modules above them."""
    module, _, inside = name.partition(":")
    return getattr(import_module(module), inside)


class Catalogue:
    """The names of one group, for example of all algorithms."""

    def __init__(self, group: str, built_in: Sequence[str], purposes: str = "") -> None:
        """`group`: group of the entry points. `built_in`: lists of this package, each as
        package:NAME. `purposes`: descriptions of names that share a class, as package:NAME."""
        self.group, self._lists, self._purposes = group, built_in, purposes

    def names(self) -> list[str]:
        """All names, those of this package first."""
        return [*(self.built_in() | self.installed())]

    def source(self, name: str) -> str:
        """The installed package that defines a name; "" for this package."""
        if name in self.built_in() or name not in self.installed():
            return ""
        package = self.installed()[name].dist
        return "another package" if package is None else package.name

    def purpose(self, name: str) -> str:
        """The first line of the docstring behind a name, read without importing its module."""
        if self._purposes and name in (purposes := load_attribute(self._purposes)):
            return str(purposes[name])
        place = self.built_in().get(name) or self.installed()[name].value
        module, _, inside = place.partition(":")
        return _first_line(module, inside)

    @cache  # noqa: B019 - a catalogue lives as long as the process
    def built_in(self) -> dict[str, str]:
        """{name: "module:object"} of this package."""
        known: dict[str, str] = {}
        for each in self._lists:
            known |= load_attribute(each)
        return known

    @cache  # noqa: B019
    def installed(self) -> dict[str, EntryPoint]:
        """The entry points of other packages by name."""
        return {entry.name: entry for entry in _installed(tuple(sys.path)).select(group=self.group)}


@cache
def _installed(path: tuple[str, ...]) -> Any:
    """The entry points of all packages on a path: one search for all groups."""
    return entry_points()


def _first_line(module: str, name: str) -> str:
    """The first line of the docstring of a function or class in a module."""
    definition = rf"^(?:async def|def|class) {re.escape(name)}\b.*?(?=^[^\s)\]#]|\Z)"
    found = re.search(definition, _text(module), re.MULTILINE | re.DOTALL)
    return "" if found is None else _docstring(found[0], name) or _docstring(_text(module), name)


def _docstring(text: str, name: str) -> str:
    """The first line of a docstring; to parse one definition is much faster than its module, but a
    string with lines that are not indented cuts it off."""
    with contextlib.suppress(SyntaxError):
        for node in ast.parse(text).body:
            if isinstance(node, _DOCUMENTED) and node.name == name:
                return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


@cache
def _text(module: str) -> str:
    from etude.core.user_code import file_of

    path = file_of(module)
    return "" if path is None else path.read_text(encoding="utf-8")


RECIPES = Catalogue("etude.recipes", ("etude.tasks:RECIPES",))
"""Functions that return a Recipe."""
TUNED = Catalogue("etude.tuned", ("etude.tasks:TUNED",))
"""The recipes with tuned settings, by the ids of their environments."""
KINDS: dict[str, tuple[Any, ...]] = {
    "algorithm": ("etude.algorithms", ("etude.rl:ALGORITHMS",)),
    "env": ("etude.envs", ("etude.tasks:ENVS", "etude.envs:ENVS")),
    "policy": ("etude.policies", ("etude.models:POLICIES",), "etude.models:PURPOSES"),
    "rewards": ("etude.rewards", ("etude.rl:REWARDS",)),
    "collector": ("etude.collectors", ("etude.rollout:COLLECTORS",)),
    "logs": ("etude.logs", ("etude.training.logs:LOGS",)),
    "format": ("etude.dataset_formats", ("etude.data.formats:FORMATS",)),
}
"""{section of a recipe, or "format" of datasets: arguments of its `Catalogue`}"""
