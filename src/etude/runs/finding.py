"""Find run folders below a folder; imports neither numpy nor torch, as `etude runs` must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_RECIPE = "recipe.yaml"
_TEMPORARY = ".tmp-"
_MAX_DEPTH = 5
"""Levels of folders that are searched for runs."""


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder."""
    return (path / _RECIPE).is_file() and (path / "checkpoints").is_dir()


def find_runs(folder: Path, level: int = 0) -> Iterator[Path]:
    """All run folders in a folder, or the folder itself; symbolic links are not followed."""
    if is_run(folder):
        yield folder
    elif level < _MAX_DEPTH:
        for path in _folders(folder):
            if not path.name.startswith("."):
                yield from find_runs(path, level + 1)


def find_unfinished(folder: Path, level: int = 0) -> Iterator[Path]:
    """Temporary folders of runs whose creation or removal was killed."""
    if is_run(folder) and not folder.name.startswith(_TEMPORARY):
        return
    for path in _folders(folder) if level < _MAX_DEPTH else ():
        if path.name.startswith(_TEMPORARY):
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
    """Disk space of a file or folder in bytes; symbolic links are not followed."""
    total = 0
    waiting = [os.fspath(path)]
    while waiting:
        here = waiting.pop()
        with suppress(OSError):  # a run that trains removes files meanwhile
            total += os.lstat(here).st_blocks * 512
            if os.path.isdir(here) and not os.path.islink(here):
                waiting += [entry.path for entry in os.scandir(here)]
    return total


def last_modified(*paths: Path) -> float:
    """Time of the last change of these files in seconds since 1970; 0 if none exists."""
    times = [0.0]
    for path in paths:
        with suppress(OSError):
            times.append(os.lstat(path).st_mtime)
    return max(times)
