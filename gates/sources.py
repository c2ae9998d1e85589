"""Which code each gate measures, and a hash of it.

A result keeps the hash of the code that it measured. Where the code's hash is another one today,
pages mark the result's figures as older than the code. Words for people do not count: comments,
docstrings, descriptions of fields, and what an error says.

What a gate measures is some packages. Where it trains one recipe, only those of their files count
which the recipe's modules and the training import, directly or not: a change of the walking task
says nothing about a figure of the reaching one.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINING = (
    "building",
    "core",
    "data",
    "envs",
    "models",
    "planning",
    "rl",
    "rollout",
    "runs",
    "tasks",
    "training",
)
"""The packages below src/etude that every training goes through."""
WORDS = {"core/explain.py", "planning/page.py", "planning/plan.py"}
"""Files that tell what a training does, and change nothing in it."""
COLLECTING = ("core", "envs", "models", "rollout", "tasks")
UPDATING = ("core", "data", "models", "rl")
MEASURES = {
    "rollout_speed": COLLECTING,
    "gym_workers": COLLECTING,
    "ray_speed": COLLECTING,
    "update_speed": UPDATING,
    "off_policy_speed": UPDATING,
    "reward_speed": UPDATING,
    "damaged_data": ("core", "data"),
    "datasets": ("core", "data"),
    "torn_checkpoints": ("core", "runs", "training"),
    "crash_states": ("core", "data", "runs", "training"),
    "dashboard_cost": TRAINING,
    "train_imitation": TRAINING,
    "sweep": (*TRAINING, "compare"),
    "sim_to_sim": (*TRAINING, "evaluate", "share"),
}
"""Of a gate that is not named here, all that a training goes through."""
ONE_RECIPE = {
    "benchmarks": "",
    "exact_resume": "",
    "learning": "",
    "peer_pick_place": "pick-place",
    "rollout_speed": "",
    "train_episodic": "episodic",
    "train_gymnasium": "",
    "train_imitation": "",
    "train_memory": "reach-memory",
    "train_pick_place": "",
    "train_reach": "",
    "train_spread": "spread",
    "train_walk": "",
}
"""Gates that train one recipe on this machine: its name, or none where the variant is that name."""
LOOP = ("etude.building.continuing", "etude.rollout.local")
"""What starts and resumes any training, and collects its steps."""
NAMED = re.compile(r"^(etude(?:\.\w+)+):\w+$")
"""A class or function in a string, which is loaded when it is used."""


def source_hash(gate: str, variant: str = "", root: Path = ROOT) -> str:
    """The start of a SHA-256 over the code that a gate measures."""
    source = root / "src" / "etude"
    packages = MEASURES.get(gate, TRAINING)
    files = {file for name in packages for file in (source / name).rglob("*.py")}
    files -= {source / name for name in WORDS}
    if gate in ONE_RECIPE and (recipe := recipe_of(ONE_RECIPE[gate] or variant, root)):
        files &= imported((recipe, *LOOP), root)
    hashes = [file_hash(file, root) for file in sorted(files)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:12]


def recipe_of(variant: str, root: Path = ROOT) -> str | None:
    """The module of the recipe that a variant is, or that it begins with."""
    recipes = _tree(root / "src" / "etude" / "tasks" / "__init__.py")
    found = {
        key.value: value.value.partition(":")[0]
        for node in ast.walk(recipes)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
    }
    named = [name for name in found if f"{variant}-".startswith(f"{name}-")]
    return found[max(named, key=len)] if named else None


def imported(modules: tuple[str, ...], root: Path = ROOT) -> set[Path]:
    """The files of some modules and of all that these import, at once or when it is used."""
    found: set[Path] = set()
    left = list(modules)
    while left:
        for file in _files(left.pop(), root):
            if file not in found:
                found.add(file)
                left.extend(_imports(file))
    return found


def _files(module: str, root: Path) -> Iterator[Path]:
    """A module's file and those of the packages around it; none of what is not a module."""
    path = root / "src" / Path(*module.split("."))
    if path.with_suffix(".py").exists():
        yield path.with_suffix(".py")
    for package in (path, *path.parents):
        if (package / "__init__.py").exists():
            yield package / "__init__.py"


@cache
def _imports(file: Path) -> tuple[str, ...]:
    """Modules that a file imports or names in strings; the lists of kinds name all of them."""
    is_list = file.name in ("__init__.py", "catalogue.py")
    found: list[str] = []
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_list:
            found += [named[1] for named in [NAMED.match(node.value)] if named]
    return tuple(module for module in found if module.startswith("etude."))


@cache
def file_hash(file: Path, root: Path = ROOT) -> str:
    """SHA-256 over the path and the code of a file, without words for people."""
    code = ast.dump(_without_sentences(_without_docstrings(_tree(file))))
    return hashlib.sha256((file.relative_to(root).as_posix() + code).encode()).hexdigest()


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, field, None), list):
                kept = [line for line in body if not _is_text(line)]
                setattr(node, field, kept)
    return tree


def _without_sentences(tree: ast.Module) -> ast.Module:
    """Without what an error says, and how a field is described."""
    for node in ast.walk(tree):
        described = isinstance(node, ast.keyword) and node.arg == "description"
        if described or isinstance(node, ast.Raise):
            for inner in ast.walk(node):
                if isinstance(inner, ast.JoinedStr):
                    inner.values = []
                elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    inner.value = ""
    return tree


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
