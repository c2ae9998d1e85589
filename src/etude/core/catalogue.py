"""Names of recipes and kinds and their places, listed without importing their modules.

Two places are searched: lists of this package, {name: "module:object"}, and the entry points of
installed packages.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any


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
        return _first_lines(module).get(inside, "")

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
        return {entry.name: entry for entry in entry_points(group=self.group)}


@cache
def _first_lines(module: str) -> dict[str, str]:
    """{name: first line of its docstring} of a module's functions and classes."""
    from etude.core.user_code import file_of

    path = file_of(module)
    if path is None:
        return {}
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    things = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in things}


RECIPES = Catalogue("etude.recipes", ("etude.tasks:RECIPES",))
"""Functions that return a Recipe."""
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
