"""Run folders below a folder, and what is known of them at a glance; nothing heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_RECIPE, _CHECKPOINTS = "recipe.yaml", "checkpoints"
_UNFINISHED = ".tmp-"
_DEEPEST = 5
"""Levels of folders that are looked into."""


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / _RECIPE).is_file() and (path / _CHECKPOINTS).is_dir()


def find_runs(folder: Path, level: int = 0) -> Iterator[Path]:
    """Every run in a folder or below it, or the folder itself; links are not followed."""
    if is_run(folder):
        yield folder
    elif level < _DEEPEST:
        for path in _folders(folder):
            if not path.name.startswith("."):
                yield from find_runs(path, level + 1)


def find_unfinished(folder: Path, level: int = 0) -> Iterator[Path]:
    """Every run that someone began to create and did not come to its end."""
    if is_run(folder) and not folder.name.startswith(_UNFINISHED):
        return
    for path in _folders(folder) if level < _DEEPEST else ():
        if path.name.startswith(_UNFINISHED):
            yield path
        elif not path.name.startswith("."):
            yield from find_unfinished(path, level + 1)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:  # not a folder, gone by now, or not ours to read
        return []
    return sorted(found)


def disk_bytes(path: Path) -> int:
    """Bytes that a file or a whole folder takes on the disk; links are not followed."""
    total = 0
    waiting = [os.fspath(path)]
    while waiting:
        here = waiting.pop()
        with suppress(OSError):  # a run that trains removes files meanwhile
            total += os.lstat(here).st_blocks * 512
            if os.path.isdir(here) and not os.path.islink(here):
                waiting += [entry.path for entry in os.scandir(here)]
    return total


def changed_at(*paths: Path) -> float:
    """When one of these was last changed, in seconds since 1970; 0 where none is there."""
    times = [0.0]
    for path in paths:
        with suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times)
