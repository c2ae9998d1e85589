"""Code of a run: whether what a recipe names may run, how it is loaded, and its hashes.

A recipe is data, but some of its texts can name code: `module:name`, `file.py:name`, an environment
of a package, a Ray cluster. What a person names on the command line or in Python may run. What a
recipe file names needs their trust, once: `require_trust` records every text of a file that was
read, and whatever would run code calls `check` first. Trust is remembered outside of any run
folder, per recipe file:

    $XDG_STATE_HOME/etude/trusted/<SHA-256 of the file's path>.json

A process that Etude starts is handed only what was checked in the one that starts it.

Hashes of the code that a run computes with are compared at a resume, between ranks and with actors.
They cover Etude's sources, every module that the import statements of a recipe's kinds and
environment reach outside the standard library, and the versions of required packages. Modules of a
project are hashed one by one, an installed package as a whole. No module is imported for it.
"""

from __future__ import annotations

import ast
import copyreg
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from etude.core.errors import EtudeError, UsageError, describe_error, exits_as_errors


class Untrusted(UsageError):
    """Code that a file names and that is not trusted."""


class _Source(NamedTuple):
    """A file that names code, and whether it was opened with trust."""

    path: Path
    trust: bool


_doubted: dict[str, _Source] = {}
_vouched: set[str] = set()
_used: dict[str, Path | None] = {}
"""{name of code that was allowed in this process: its file, if there is one}"""


def trust_texts(texts: Iterable[str]) -> None:
    """Trust texts that a person has typed, unless a file had named them before."""
    _vouched.update(text for text in texts if text not in _doubted)


def require_trust(texts: Iterable[str], path: Path, trust: bool) -> None:
    """Require trust for the texts of a recipe file that name code.

    Texts of this file that are trusted already stay so.
    """
    real = Path(os.path.realpath(path))
    new = {text for text in texts if _doubted.get(text) != _Source(real, True)}
    _doubted.update((text, _Source(real, trust)) for text in new - _vouched)


def check_trust(name: str, what: str, origin: Path | None = None) -> None:
    """Raise `Untrusted` for code that a file names and that is not trusted.

    what: the action, as in "file.yaml names 'x', which would <what>"; origin: the file of the
    code, whose contents are trusted too.
    """
    source = _doubted.get(name)
    if source is not None and source.trust:
        _record(source.path, {name: {"from": _text(origin), "sha256": _sha256(origin)}})
    elif source is not None and (name not in _used or _used[name] != origin):
        why = _objection(_recorded(source.path).get(name), origin)
        if why:
            raise Untrusted(
                f"{source.path} names '{name}', which would {what}, {why}. This is code, and runs "
                "with your rights: read it, then pass --trust once (trust=True in Python). It "
                "is remembered for this file on this machine."
            )
    _used[name] = origin


def remember_trust(path: Path, texts: Iterable[str]) -> None:
    """Remember the trust in code that this file names; for files written by this process."""
    named = {text: _used[text] for text in texts if text in _used}
    if named:
        entries = {n: {"from": _text(origin), "sha256": None} for n, origin in named.items()}
        _record(Path(os.path.realpath(path)), entries)


def code_files(texts: Iterable[str]) -> dict[str, Path]:
    """{text: file of the code that it names} of texts that were allowed in this process."""
    found = {text: _used.get(text) for text in texts}
    return {text: origin for text, origin in found.items() if origin is not None}


def names_code(texts: Iterable[str]) -> bool:
    """Whether one of the texts names code that was allowed in this process."""
    return any(text in _used for text in texts)


def _objection(known: dict[str, Any] | None, origin: Path | None) -> str:
    """Why code is not trusted, given the record of its name; "" if it is."""
    if known is None or known["from"] != _text(origin):
        return "and it is not trusted here yet"
    changed = known["sha256"] not in (None, _sha256(origin))
    return "and has changed since it was trusted" if changed else ""


def _text(origin: Path | None) -> str:
    return "" if origin is None else str(origin)


def _sha256(origin: Path | None) -> str | None:
    if origin is None:
        return None
    try:
        return hashlib.sha256(origin.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def _store(path: Path) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    return Path(state) / "etude" / "trusted" / f"{name}.json"


def _recorded(path: Path) -> dict[str, dict[str, Any]]:
    """{name: record} of the trusted code of the file at a path."""
    try:
        content = json.loads(_store(path).read_text())
        return {str(n): {key: e[key] for key in ("from", "sha256")} for n, e in content["code"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _record(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Record trusted code of a file; if it cannot be saved, for this process only."""
    for name in entries:
        _doubted.pop(name, None)
    code, store = {**_recorded(path), **entries}, _store(path)
    beside = store.with_name(f".tmp-{store.name}-{os.getpid()}")
    try:
        store.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.write_text(json.dumps({"file": str(path), "code": list(code.items())}, indent=2))
        os.replace(beside, store)
    except OSError as error:
        print(f"Trust in {path} could not be kept: {store}: {error.strerror}.", file=sys.stderr)


def load_object(target: str, example: str, default: str = "") -> Any:
    """Load the object `module:name` or `file.py:name`, which runs the module.

    `example`: for the error message. `default`: name for a `target` without one.
    """
    where, colon, name = target.rpartition(":")
    if default and not colon:
        where, name = target, default
    if not where or not name:
        raise UsageError(f"'{target}' does not name code: write {example}.")
    module = load_module(target, where)
    if name not in vars(module):
        public = [known for known in vars(module) if not known.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "check the spelling."
        raise UsageError(f"{where} has no '{name}'; {hint}")
    return vars(module)[name]


def load_module(target: str, where: str) -> ModuleType:
    """Import the module or file `where` of a `target` that is trusted."""
    check_module_trust(target, where)
    return _from_file(Path(where)) if where.endswith(".py") else _from_name(where)


def check_module_trust(target: str, where: str) -> None:
    """Raise `Untrusted` if the module or file of a `target` is not trusted."""
    if where.endswith(".py"):
        origin: Path | None = Path(where).resolve()
    else:
        origin = file_of(where)
    if origin is not None and not origin.is_file():
        origin = None
    place = where if origin is None or str(origin) == where else f"{where} from {origin}"
    check_trust(target, f"import {place}", origin)


def file_of(module: str) -> Path | None:
    """The file of a module, found without importing its packages."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def find_spec(module: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its packages."""
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
    """The spec of a package by other finders, as editable installs have."""
    for finder in sys.meta_path:
        if finder is not PathFinder and (spec := finder.find_spec(name, None)) is not None:
            return spec
    return None


def module_or_file(kind: Any) -> str:
    """The module of a class or function, or its file if the module is not importable."""
    name = kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return name if file is None or find_spec(name) is not None else str(file)


def _from_name(name: str) -> ModuleType:
    # Last, so that a file here does not shadow an installed package.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        with exits_as_errors(lambda: f"Importing '{name}'"):
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
    except Exception as error:  # user code may raise anything
        raise UsageError(f"'{name}' cannot be imported: {describe_error(error)}.") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no file {path}; check the path.")
    path = path.resolve()
    # A unique name: a user's test.py must not shadow an installed `test`.
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
        with exits_as_errors(lambda: f"Importing {path}"):
            spec.loader.exec_module(module)
    except EtudeError:
        del sys.modules[name]
        raise
    except Exception as error:  # user code may raise anything
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {describe_error(error)}.") from error
    for each in vars(module).values():
        if isinstance(each, type) and each.__module__ == name:
            copyreg.pickle(each, _by_file)
    return module


def _by_file(instance: Any) -> tuple[Any, ...]:
    """Pickle an object by the file of its class, for workers without a module of that name."""
    _, (kind, *arguments), *state = instance.__reduce_ex__(2)
    file = sys.modules[kind.__module__].__file__
    return (_new, (file, kind.__qualname__, *arguments), *state)


def _new(file: str, name: str, *arguments: Any) -> Any:
    """Unpickle an object of a class in a file."""
    found: Any = _from_file(Path(file))
    for part in name.split("."):
        found = getattr(found, part)
    return found.__new__(found, *arguments)


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
