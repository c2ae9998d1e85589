"""What differs between two manifests, in sentences: only a resume needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from etude.core.trees import Tree
from etude.runs.manifest import PACKAGES

_NAMES = {
    "system/os": "The operating system",
    "system/machine": "The machine type",
    "system/libc": "The C library",
    "cpu/model": "The CPU",
    "cpu/capability": "The instruction set torch uses",
    "git/commit": "The git commit of the project",
    "computation": "The hash of the standard computation",
    "task/model": "The hash of the simulated model",
}
_HARMLESS = ("cpu/count", "learner/ranks", "recipe", "exactness", "notes")
"""The same bits come out on any number of cores and of ranks; the rest is looked at apart."""
_DECISIVE = (
    *("computation", "cpu/capability"),
    *(f"versions/{package}" for package in PACKAGES),
    *("task/", "code/"),
)
"""What a run is not exact with any more, where it has changed. The rest only may move bits, and
the standard computation finds out whether it has."""


class Differences(NamedTuple):
    """A sentence for each thing that may change bits and is not as it was."""

    decisive: list[str]
    """A run that goes on with these is not exact."""
    possible: list[str]


def differences(old: Tree, new: Tree) -> Differences:
    """What two manifests say of two processes; what one of them does not know decides nothing."""
    before, now = _comparable(old), _comparable(new)
    found = Differences([], [])
    for path in sorted(before.keys() | now.keys()):
        a, b = before.get(path), now.get(path)
        if a != b:
            if path.startswith(("task/", "code/")) and (a is None or b is None):
                continue  # a run of a version that did not look, or code that is not used any more
            decides = path.startswith(_DECISIVE) and a is not None and b is not None
            kind = found.decisive if decides else found.possible
            kind.append(f"{_called(path)} was {_shown(a)} and is {_shown(b)} now.")
    return found


def _comparable(manifest: Tree) -> Tree:
    """Leaves by path; empty groups and absent values count as the same: not there."""
    return {
        path: leaf for path, leaf in _leaves(manifest) if path not in _HARMLESS and leaf is not None
    }


def _leaves(manifest: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; names may hold a "/" here, as those of code in files do."""
    for name, value in manifest.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _called(path: str) -> str:
    group, _, name = path.partition("/")
    known = {
        "versions": f"The version of {name}",
        "threads": f"The number of {name} threads",
        "environment": f"The environment variable {name}",
        "code": f"The version of {name.removesuffix(' (version)')}"
        if name.endswith(" (version)")
        else f"The hash of the code of {name}",
    }
    return _NAMES.get(path) or known.get(group, f"'{path}'")


def _shown(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text
