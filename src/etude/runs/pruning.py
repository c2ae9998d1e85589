"""What of runs nobody needs any more, and how it is freed.

A run keeps all that a resume or an evaluation reads: its newest whole checkpoint, the policies that
are marked (best, final) or that its recipe asks to keep, its replay, rows and reports. A run that
is being written is left alone, and so are the checkpoints of one that another run starts from.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from etude.core.errors import EtudeError
from etude.runs import checkpoint, files
from etude.runs.finding import changed_at, disk_bytes, find_unfinished, is_written
from etude.runs.folder import METRICS, RECIPE, RunFolder

QUIET = 3600.0
"""Seconds since a run was last written, before it may be taken away as a whole."""
_NOTHING = "Runs that ended before they had saved anything"
_ASIDE = "Checkpoints that were set aside, as damaged or by `etude resume --checkpoint`"
_SET_ASIDE = re.compile(rf"[0-9]{{12,}}({checkpoint.DAMAGED}|{checkpoint.ASIDE})(-[0-9]+)?")


@dataclass(frozen=True)
class Surplus:
    """Something that nobody needs."""

    path: Path
    why: str
    bytes: int
    run: Path | None
    """The run it is a part of; None where it goes as a whole."""


def surplus_of(runs: Sequence[Path], quiet: float = QUIET) -> list[Surplus]:
    """What can be freed of these runs; nothing is changed."""
    needed = _started_from(runs)
    return [each for run in runs for each in _of_run(run, run.resolve() in needed, quiet)]


def unfinished(folder: Path, quiet: float = QUIET) -> list[Surplus]:
    """Runs in a folder whose creation was killed."""
    return [
        Surplus(path, "Left by runs that were killed at their start", disk_bytes(path), None)
        for path in find_unfinished(folder)
        if _is_quiet(path, quiet) and not is_written(path)
    ]


def free(found: Sequence[Surplus], quiet: float = QUIET) -> Iterator[tuple[Surplus, str]]:
    """Take things away, each with "" or with why it was left; what has changed since is left."""
    for run in dict.fromkeys(each.run or each.path for each in found):
        parts = [each for each in found if (each.run or each.path) == run]
        try:
            yield from _free(run, parts, quiet)
        except EtudeError as error:
            yield parts[0], str(error)


def _free(run: Path, parts: list[Surplus], quiet: float) -> Iterator[tuple[Surplus, str]]:
    if run.name.startswith(checkpoint.TEMPORARY):
        files.remove_tree(run)
        yield parts[0], ""
        return
    with RunFolder.open(run) as folder:  # its one writer from here on
        still = {each.path for each in _of_run(run, False, quiet, locked=True)}
        for each in parts:
            if each.path not in still:
                yield each, f"{each.path} has changed and is left."
            elif each.run is None:
                _remove_run(run)
                yield each, ""
            elif each.path.parent == folder.path:
                files.remove_tree(each.path)
                yield each, ""
            else:
                checkpoint.drop(folder.checkpoints, [each.path])
                yield each, ""


def _remove_run(run: Path) -> None:
    """A rename first, so that a kill leaves no half of a run under its name."""
    gone = run.with_name(f"{checkpoint.TEMPORARY}{run.name}-{os.getpid()}")
    files.rename(run, gone)
    files.fsync_folder(run.parent)
    files.remove_tree(gone)


def _of_run(run: Path, is_start: bool, quiet: float, locked: bool = False) -> list[Surplus]:
    """What can be freed of a run; is_start: another run starts from it."""
    if not locked and is_written(run):
        return []
    checkpoints = run / "checkpoints"
    if not os.listdir(checkpoints):
        return [] if is_start else _of_nothing(run, quiet, locked)
    found = [(path, "Left by saves that were killed") for path in _temporary(run, checkpoints)]
    if not is_start:
        found += _checkpoints(run, checkpoints)
    return [Surplus(path, why, disk_bytes(path), run) for path, why in found]


def _temporary(*folders: Path) -> list[Path]:
    paths = (path for folder in folders for path in sorted(folder.iterdir()))
    return [path for path in paths if path.name.startswith(checkpoint.TEMPORARY)]


def _of_nothing(run: Path, quiet: float, locked: bool) -> list[Surplus]:
    """A run without any checkpoint, if it failed or never logged a row: only its recipe is lost."""
    failures, rows = run / "failures", run / METRICS
    failed = failures.is_dir() and any(failures.iterdir())
    logged = rows.exists() and rows.stat().st_size > 0
    if (logged and not failed) or not (locked or _is_quiet(run, quiet)):
        return []
    return [Surplus(run, _NOTHING, disk_bytes(run), None)]


def _is_quiet(path: Path, quiet: float) -> bool:
    return time.time() - changed_at(path, path / METRICS, path / "failures") >= quiet


def _checkpoints(run: Path, folder: Path) -> list[tuple[Path, str]]:
    """Checkpoints besides the newest, the marked ones and those that the recipe keeps."""
    settings, names = _settings(run), os.listdir(folder)
    if settings is None or any(name.endswith(checkpoint.REPLACED) for name in names):
        return []  # a resume puts things in order first
    section = settings.get("checkpoint")
    every = section.get("keep_every") if isinstance(section, dict) else None
    try:
        newest = checkpoint.newest_verified(folder, lambda text: None, repair=False)
        if newest is None:
            return []  # nothing is known to be good, so nothing is given up
        saver = checkpoint.load_document(newest).get("saver")
        best = saver.get("best") if isinstance(saver, dict) else None
        kept = [best] if isinstance(best, int) else []
        older, gone = checkpoint.surplus(folder, 1, every if isinstance(every, int) else None, kept)
    except EtudeError:  # saved by another version, for example
        return []
    found = [(folder / name, _ASIDE) for name in sorted(names) if _SET_ASIDE.fullmatch(name)]
    found += [(path / "training", "Training states of older checkpoints") for path in older]
    return found + [(path, "Older checkpoints, neither the newest nor the best") for path in gone]


def _settings(run: Path) -> dict[str, Any] | None:
    """The recipe of a run as plain data; None where it cannot be read."""
    try:
        with (run / RECIPE).open("rb") as stream:
            content = yaml.safe_load(stream.read(1 << 18))
    except Exception:  # the parser has many errors, some of them its own mistakes
        return None
    return content if isinstance(content, dict) else None


def _started_from(runs: Sequence[Path]) -> set[Path]:
    """The runs that the recipes of others name: as what they start from, or a reward of theirs."""
    places = {run.resolve() for run in runs}
    needed: set[Path] = set()
    for run in runs:
        for text in _texts(_settings(run)):
            path = Path(os.path.realpath(text))
            needed.update(({path, *path.parents} & places) - {run.resolve()})
    return needed


def _texts(content: Any) -> Iterator[str]:
    """Texts in a recipe that may be paths."""
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str) and "\0" not in item:
            yield item
        elif isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
