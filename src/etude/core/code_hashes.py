"""Hashes of the code that a run computes with, compared at a resume, between ranks and with actors.

They cover Etude's sources, every module that the import statements of a recipe's kinds and
environment reach outside the standard library, and the versions of required packages. Modules of a
project are hashed one by one, an installed package as a whole. No module is imported for it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from etude.core.user_code import find_spec

OWN = "etude"
NOT_HASHED = ("cli/", "compare/", "demos/", "evaluate/", "share/", "training/logs/")
"""Folders of Etude that only show or compare results."""
BY_VERSION = {"mujoco", "numpy", "torch"}
"""Large packages, compared by version and by the standard computation instead."""
MOST_BYTES = 64 << 20
"""Bytes of a package's data files that are hashed by content; of further ones, sizes are hashed."""
_CODE = {".py", ".pyx", ".so", ".pyd"}


def compute_hashes(roots: Iterable[str]) -> dict[str, str]:
    """{name: SHA-256 of its code, or the version of a required package}.

    `roots`: modules by name, and files that end in `.py`.
    """
    found = {OWN: _own()}
    project, installed = _reached(roots)
    for name, file in project.items():
        found[name] = _of_files({"": file})
    for name, folder in installed.items():
        found[name] = _of_package(folder)
    for distribution in _required(installed):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[f"{distribution} (version)"] = importlib.metadata.version(distribution)
    return found


def differing(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Names of code that both processes have in different versions."""
    return sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])


def _own() -> str:
    root = Path(__file__).parents[1]
    return _of_files(
        {
            name: file
            for file in _files(root)
            if not (name := file.relative_to(root).as_posix()).startswith(NOT_HASHED)
        }
    )


def _reached(roots: Iterable[str]) -> tuple[dict[str, Path], dict[str, Path]]:
    """(modules of a project, installed packages) that `roots` import, directly or not, by name."""
    project: dict[str, Path] = {}
    installed: dict[str, Path] = {}
    left, seen = list(roots), set[str]()
    while left:
        name = left.pop()
        top = name.partition(".")[0]
        if name in seen or top == OWN or top in BY_VERSION or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        is_file = name.endswith(".py") and os.path.sep in name
        origin = Path(name) if is_file else _origin(name)
        if origin is None or not origin.is_file():
            continue
        if not is_file and (package := _package(origin)):
            installed[top] = package
            continue
        project["/".join(origin.parts[-2:]) if is_file else name] = origin
        left += _imports(origin, "" if is_file else name)
        if "." in name:
            left.append(name.rpartition(".")[0])
    return project, installed


def _origin(name: str) -> Path | None:
    """The file of a module, whether it has been imported or not."""
    module = sys.modules.get(name)
    if isinstance(module, ModuleType) and isinstance(getattr(module, "__file__", None), str):
        return Path(str(module.__file__)).resolve()
    spec = find_spec(name)
    return Path(spec.origin).resolve() if spec and spec.origin and spec.has_location else None


def _package(file: Path) -> Path | None:
    """The folder of the installed package that a file is in; None for a project's own file."""
    for folder in _site_folders():
        if folder in file.parents:
            return folder / file.relative_to(folder).parts[0]
    return None


def _site_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    named = {
        paths["purelib"],
        paths["platlib"],
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
    return tuple(Path(name).resolve() for name in named)


def _imports(file: Path, name: str) -> Iterator[str]:
    """Modules in the import statements of a source file, also inside functions."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


def _of_package(path: Path) -> str:
    """SHA-256 of an installed package's files; of a module that is one file, of that file."""
    return _of_files({str(f.relative_to(path.parent)): f for f in _files(path)})


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if name != "__pycache__"]
        yield from (Path(folder) / name for name in files if not name.endswith(".pyc"))


def _of_files(files: dict[str, Path]) -> str:
    """SHA-256 over names and contents; of large data files, over names and sizes."""
    found, data_bytes = hashlib.sha256(), 0
    for name, file in sorted(files.items()):
        try:
            size = file.stat().st_size
            if file.suffix not in _CODE:
                data_bytes += size
            whole = file.suffix in _CODE or data_bytes <= MOST_BYTES
            content = hashlib.sha256(file.read_bytes()).hexdigest() if whole else str(size)
        except OSError:
            content = "unreadable"
        found.update(f"{name}\0{content}\n".encode())
    return found.hexdigest()


def _required(installed: dict[str, Path]) -> list[str]:
    """Distributions of installed packages and their requirements, by normalised name."""
    if not installed:
        return []
    owners = importlib.metadata.packages_distributions()
    left = [name for package in installed for name in owners.get(package, [])]
    found: dict[str, Any] = {}
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found or name == OWN:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = needs
        plain = (need for need in needs if "extra ==" not in need)
        left += [match[0] for need in plain if (match := re.match(r"[\w.-]+", need))]
    return sorted(found)
