"""The rooms of the package: imports go down and never in a circle, however they are written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import etude

ROOT = Path(etude.__file__).parent
REPOSITORY = Path(__file__).parents[1]
ROOMS = (
    {"core"},
    {"models", "runs"},
    {"data"},
    {"envs"},
    {"rollout", "mj"},
    {"training"},
    {"planning"},
    {"rl", "building"},
    {"tasks"},
    {"gym"},
    {"evaluate"},
    {"api", "plugin"},
    {"compare"},
    {"share"},
    {"cli"},
)
"""From the lowest to the highest; rooms on one line do not import each other."""
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
ENTRANCES = {"etude", "etude.__main__"}
"""Above all rooms: these may import anything."""
REGISTRIES = {*ENTRANCES, "etude.core.catalogue", "etude.cli.main"}
"""Besides the `__init__` of a room: tables of names, in which strings may name modules above."""
MAX_FUNCTION = 80
TYPE_CHECKING_BLOCKS = 5

Sources = Mapping[str, str]
"""{module: source}."""


def module_name(path: Path) -> str:
    parts = ["etude", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
GATES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path.read_text()
    for path in sorted((REPOSITORY / "gates").rglob("*.py"))
}
MODULES = {*SOURCES, *GATES, "etude"}
PACKAGES = {module_name(path) for path in ROOT.rglob("__init__.py")}


@cache
def imported(module: str, source: str) -> set[str]:
    """Modules that a module imports anywhere: at the top, in functions, for type checkers alone, or
    by a string that names them."""
    tree = ast.parse(source)
    package = module if module in PACKAGES else module.rpartition(".")[0]
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in names}
    if module not in REGISTRIES | PACKAGES:
        found |= set(_named_in_strings(tree))
    return {name for name in found if name.split(".")[0] in ("etude", "gates")} - {module}


def _named_in_strings(tree: ast.Module) -> Iterator[str]:
    """Modules that strings name, docstrings apart; a string that only begins a name counts as the
    whole package."""
    texts = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            for name in re.findall(r"\betude(?:\.\w+)+\.?", node.value):
                while name not in MODULES:
                    name = name.rpartition(".")[0]
                if name != "etude":
                    yield name


def room_of(module: str) -> str:
    return module.split(".")[1]


def upward(sources: Sources) -> list[str]:
    """Imports that do not go down, a sentence each."""
    wrong = []
    for module in sorted(sources.keys() - ENTRANCES):
        for name in sorted(imported(module, sources[module])):
            if name in ENTRANCES:
                wrong.append(f"{module} imports {name}, which is above it")
            elif (
                room_of(name) != room_of(module) and LEVEL[room_of(name)] >= LEVEL[room_of(module)]
            ):
                wrong.append(f"{module} imports {name}")
    return wrong


def circles(sources: Sources) -> list[str]:
    """Circles of modules that import each other."""
    graph = {
        module: sorted(imported(module, sources[module]) & sources.keys() - ENTRANCES)
        for module in sorted(sources)
    }
    done, found = set[str](), list[str]()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return found


def test_imports_go_down() -> None:
    assert {room_of(name) for name in SOURCES if name not in ENTRANCES} <= LEVEL.keys()
    assert upward(SOURCES) == []


def test_no_circles() -> None:
    assert circles(SOURCES) == []
    blocks = [
        name for name, text in SOURCES.items() if re.search(r"^ *if TYPE_CHECKING:", text, re.M)
    ]
    assert len(blocks) <= TYPE_CHECKING_BLOCKS, blocks


def test_no_circles_of_gates() -> None:
    assert circles(GATES) == []
    back = {**GATES, "gates.lib.command": "from gates.lib.report import Gate\n"}
    back["gates.lib.report"] = "def keep():\n    from gates.lib import command\n"
    assert circles(back) == ["gates.lib.command -> gates.lib.report -> gates.lib.command"]


def test_functions_stay_readable() -> None:
    long = [
        f"{module}: {node.name} has {length} lines"
        for module, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    ]
    assert long == []


@pytest.mark.parametrize(
    "evasion",
    [
        "from etude.cli import main",
        "import etude.cli.main",
        "from ..cli import main",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from etude.cli import main",
        "def later():\n    from etude.cli import main",
        "from importlib import import_module\nimport_module('etude.cli.main')",
        "__import__('etude.cli.main')",
        "main = 'etude.cli.main:main'",
        "def load(name):\n    return load(f'etude.cli.{name}')",
        "from etude import train",
    ],
)
def test_every_evasion_is_found(evasion: str) -> None:
    sources = {**SOURCES, "etude.core.clock": f"{SOURCES['etude.core.clock']}\n{evasion}\n"}
    assert any(line.startswith("etude.core.clock imports") for line in upward(sources))
    in_a_room = evasion.replace("..cli", ".").replace("etude.cli", "etude.core")
    in_a_room = in_a_room.replace("main", "registry")
    sources = {**SOURCES, "etude.core.errors": f"{SOURCES['etude.core.errors']}\n{in_a_room}\n"}
    if "import train" not in evasion and "{name}" not in evasion:
        assert any("etude.core.errors" in circle for circle in circles(sources))
