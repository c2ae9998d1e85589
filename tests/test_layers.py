"""The house stays as it was drawn: imports go down only, and nothing grows without a wall."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import etude

ROOT = Path(etude.__file__).parent
LAYERS = (
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
LEVEL = {package: i for i, layer in enumerate(LAYERS) for package in layer}
ENTRANCE = {"etude", "etude.__main__"}
"""Above all layers: these may import anything."""
MAX_FUNCTION = 80


def module_name(path: Path) -> str:
    parts = ["etude", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _executed(node)


def imports(module: str) -> set[str]:
    """Modules of this package that a module imports, wherever in its text that happens."""
    found: set[str] = set()
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in _executed(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            # `from package import module` is an import of the module.
            found |= {
                name if (name := f"{base}.{alias.name}") in FILES else base for alias in node.names
            }
    return {name for name in found if name.split(".")[0] == "etude"}


def package_of(module: str) -> str:
    return module.split(".")[1]


def violations(module: str, imported: set[str]) -> list[str]:
    if module in ENTRANCE:
        return []
    wrong = []
    for name in sorted(imported):
        if name in ENTRANCE:
            wrong.append(f"{module} imports {name}, which is above it")
        elif package_of(name) != package_of(module) and (
            LEVEL[package_of(name)] >= LEVEL[package_of(module)]
        ):
            wrong.append(f"{module} imports {name}")
    return wrong


def test_every_package_has_its_layer() -> None:
    packages = {package_of(name) for name in FILES if name not in ENTRANCE}
    assert packages <= LEVEL.keys()


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_only(module: str) -> None:
    assert violations(module, imports(module)) == []


def test_the_check_itself_notices() -> None:
    assert violations("etude.core.clock", {"etude.runs.files"})
    assert violations("etude.models.policies", {"etude.data.segments"})
    assert violations("etude.rollout.group", {"etude"})
    assert not violations("etude.training.loop", {"etude.core.clock", "etude.training.stop"})
    assert "etude.core.clock" in imports("etude.training.loop")
    assert "etude.runs.checkpoint" in imports("etude.api")  # from etude.runs import checkpoint


def test_there_are_no_import_cycles() -> None:
    graph = {module: imports(module) & FILES.keys() - ENTRANCE for module in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("module", FILES)
def test_functions_stay_readable(module: str) -> None:
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"
