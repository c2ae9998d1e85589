"""Code by name: `module:name` or `file.py:name`, found from the current folder.

Nothing else imports what a recipe names, and here `trust` is asked first.
"""

from __future__ import annotations

import copyreg
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from etude.core import trust
from etude.core.errors import EtudeError, UsageError, contained
from etude.core.imports import describe


def load_object(target: str, example: str, default: str = "") -> Any:
    """What `module:name` or `file.py:name` stands for; `example` is shown to who wrote neither.

    `default`: the name in a module that is named alone. Importing runs the module.
    """
    where, colon, name = target.rpartition(":")
    if default and not colon:
        where, name = target, default
    if not where or not name:
        raise UsageError(f"'{target}' names no code: write {example}.")
    module = load_module(target, where)
    if name not in vars(module):
        public = [known for known in vars(module) if not known.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "check the spelling."
        raise UsageError(f"{where} has no '{name}'; {hint}")
    return vars(module)[name]


def load_module(target: str, where: str) -> ModuleType:
    """Import the module or file `where` of a `target` that is trusted."""
    permit(target, where)
    return _from_file(Path(where)) if where.endswith(".py") else _from_name(where)


def permit(target: str, where: str) -> None:
    """Refuse to import a module or file for a `target` that is not trusted."""
    if where.endswith(".py"):
        origin: Path | None = Path(where).resolve()
    else:
        origin = file_of(where)
    if origin is not None and not origin.is_file():
        origin = None
    place = where if origin is None or str(origin) == where else f"{where} from {origin}"
    trust.check(target, f"import {place}", origin)


def file_of(module: str) -> Path | None:
    """The file a module would be loaded from, found without running its packages."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def find_spec(module: str) -> ModuleSpec | None:
    """Where a module would be loaded from, found without running its packages."""
    paths: Any = [*sys.path, os.getcwd()]
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, paths)
        except (ImportError, ValueError):
            return None
        if spec is None and part == name:
            spec = _found_elsewhere(name)
        if spec is None:
            return None
        paths = spec.submodule_search_locations or []
    return spec


def _found_elsewhere(name: str) -> ModuleSpec | None:
    """A package that is installed editable may be known to a finder of its own alone."""
    for finder in sys.meta_path:
        if finder is not PathFinder and (spec := finder.find_spec(name, None)) is not None:
            return spec
    return None


def module_or_file(kind: Any) -> str:
    """The module of a class or function, or its file where no import would find that module."""
    name = kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return name if file is None or find_spec(name) is not None else str(file)


def _from_name(name: str) -> ModuleType:
    # Last, so that a file here does not take the place of an installed package.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        with contained(lambda: f"Importing '{name}'"):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"There is no module '{name}' in {here} or among the installed packages: run this "
                f"in the folder of {name.split('.')[0]}.py, or check the name."
            ) from error
        raise UsageError(
            f"'{name}' needs the package '{error.name}', which is not installed: install it."
        ) from error
    except EtudeError:
        raise
    except Exception as error:  # someone else's module may fail in any way
        raise UsageError(f"'{name}' cannot be imported: {describe(error)}.") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no file {path}; check the path.")
    path = path.resolve()
    # A name of its own: a user's test.py must not be taken for an installed `test`.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with contained(lambda: f"Importing {path}"):
            spec.loader.exec_module(module)
    except EtudeError:
        del sys.modules[name]
        raise
    except Exception as error:  # someone else's module may fail in any way
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {describe(error)}.") from error
    for each in vars(module).values():
        if isinstance(each, type) and each.__module__ == name:
            copyreg.pickle(each, _by_file)
    return module


def _by_file(instance: Any) -> tuple[Any, ...]:
    """Pickle an object whose class is in a file for workers, which know no module of that name."""
    _, (kind, *arguments), *state = instance.__reduce_ex__(2)
    file = sys.modules[kind.__module__].__file__
    return (_new, (file, kind.__qualname__, *arguments), *state)


def _new(file: str, name: str, *arguments: Any) -> Any:
    """A new object of a class in a file, where a worker of a run is handed one."""
    found: Any = _from_file(Path(file))
    for part in name.split("."):
        found = getattr(found, part)
    return found.__new__(found, *arguments)
