"""Find and delete surplus data of runs.

A run keeps everything that a resume or an evaluation reads: its newest complete checkpoint, the
policies that are marked (best, final) or kept by its recipe, its replay, rows and reports. Runs
that are being written and the checkpoints of runs that other runs start from are not touched.

Only data with Etude's seal is deleted: a run has it in its manifest, a checkpoint in the manifests
of its parts. Files are deleted by name. A run with any foreign file is left as it is.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from etude.core.errors import EtudeError
from etude.runs import checkpoint, files
from etude.runs.documents import decode_sealed
from etude.runs.file_system import is_locked
from etude.runs.finding import disk_bytes, find_unfinished, last_modified
from etude.runs.folder import HASHES, MANIFEST, METRICS, MOST_TEXT, RECIPE, RunFolder

Say = Callable[[str], None]
Settings = list[tuple[tuple[str, ...], str]]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader is many times as fast, and missing in some builds of PyYAML."""
QUIET = 3600.0
"""Seconds after the last write of a run before it may be deleted as a whole."""
_NOTHING = "Runs that ended before they had saved anything"
_ASIDE = "Checkpoints that were set aside, as damaged or by `etude resume --checkpoint`"
_SET_ASIDE = re.compile(rf"[0-9]{{12,}}({checkpoint.DAMAGED}|{checkpoint.ASIDE})(-[0-9]+)?")

_TEXTS = r"(recipe\.yaml|manifest\.json|plan\.(txt|json)|summary\.json|wandb\.json|metrics\.jsonl)"
_OWN_FILES = re.compile(
    rf"{_TEXTS}|\.tmp-{_TEXTS}-[0-9]+|(recipe\.yaml|metrics\.jsonl)\.damaged(-[0-9]+)?"
    r"|reporting\.log|\.lock|\.locked-[0-9]+|events\.out\.tfevents\.[0-9]{10,}\.[0-9]+(\.final)?(-[0-9]+)?"
    r"|failures/[0-9-]+/(error\.txt|context\.json|reproduction\.safetensors)"
    r"|replay/shard-[0-9]+/([a-z]+-[0-9]{12,}\.bin|(\.tmp-)?store\.json)"
    r"|\.tmp-probe-[0-9-]+/((from/|to/)?[a-z]+)"
    r"|evaluations/[\w-]+/(\.tmp-)?[\w.-]+\.(csv|json|txt|png|mp4|webp|gif)(-[0-9]+)?"
)
_OWN_FOLDERS = re.compile(
    r"checkpoints|\.tmp-probe-[0-9-]+(/from|/to)?|failures(/[0-9-]+)?|replay(/shard-[0-9]+)?"
    r"|evaluations(/([0-9]{12,}(-[a-z]+)?|checkpoints)(-[0-9]+)?)?"
)
"""Files and folders that Etude writes into a run folder, except checkpoints."""


def _silent(text: str) -> None:
    """Print nothing."""


@dataclass(frozen=True)
class Surplus:
    """Data that is no longer needed."""

    path: Path
    why: str
    bytes: int
    run: Path | None
    """The run it is a part of; None if it is a whole run."""


def find_surplus(runs: Sequence[Path], quiet: float = QUIET, say: Say = _silent) -> list[Surplus]:
    """Find surplus data of runs; nothing is changed. `say`: prints which runs are left, and why.

    Hashes of checkpoints are not verified here: `delete_surplus` verifies the one that a run keeps.
    """
    own = [run for run in runs if has_seal(run)]
    if others := sorted({*runs} - {*own}):
        say(
            f"{_named(others)} left: no manifest.json with Etude's seal shows that Etude made "
            f"{'it' if len(others) == 1 else 'them'} (versions before seals made none)."
        )
    settings = {run: _settings(run) for run in own}
    needed, found = _started_from(settings), list[Surplus]()
    for run in own:
        mine = _of_run(run, settings[run], run.resolve() in needed, quiet)
        if mine and (
            found_foreign := _foreign_data(run, whole=any(each.run is None for each in mine))
        ):
            say(f"{run} is left: {found_foreign}.")
        else:
            found += mine
    return found


def find_killed_runs(folder: Path, quiet: float = QUIET) -> list[Surplus]:
    """Leftovers in a folder of runs whose creation or removal was killed."""
    return [
        Surplus(path, "Left by runs that were killed at their start", disk_bytes(path), None)
        for path in find_unfinished(folder)
        if _is_own_leftover(path) and _is_quiet(path, quiet) and not is_locked(path)
    ]


def delete_surplus(found: Sequence[Surplus], quiet: float = QUIET) -> Iterator[tuple[Surplus, str]]:
    """Delete surplus data, unless it has changed; yields each with "" or why it was left."""
    for run in dict.fromkeys(each.run or each.path for each in found):
        parts = [each for each in found if (each.run or each.path) == run]
        try:
            yield from _free(run, parts, quiet)
        except EtudeError as error:
            yield parts[0], str(error)


def _free(run: Path, parts: list[Surplus], quiet: float) -> Iterator[tuple[Surplus, str]]:
    if run.name.startswith(checkpoint.TEMPORARY):
        if _is_own_leftover(run):
            _remove_run(run)
        yield parts[0], "" if not run.exists() else f"{run} has changed and is left."
        return
    with RunFolder.open(run) as folder:  # its only writer from here on
        own = has_seal(run) and not _foreign_data(
            run, whole=any(each.run is None for each in parts)
        )
        now = _of_run(run, _settings(run), False, quiet, locked=True) if own else []
        still = {each.path for each in now}
        gone = [each.path for each in parts if each.path in still]
        if run in gone:
            # Renamed first, so that a kill does not leave an incomplete run under its name.
            moved = files.free_path(
                run.with_name(f"{checkpoint.TEMPORARY}{run.name}-{os.getpid()}")
            )
            files.rename(run, moved)
            files.fsync_folder(run.parent)
            _remove_run(moved)
        else:
            for path in gone:
                if path.parent == folder.path:
                    files.remove_files(folder.path, [*_inside(path, folder.path), path.name])
            checkpoint.drop(
                folder.checkpoints, [path for path in gone if path.parent != folder.path]
            )
        for each in parts:
            yield each, "" if each.path in still else f"{each.path} has changed and is left."


def _remove_run(gone: Path) -> None:
    """Delete all files of a run, the manifest with the seal last."""
    files.remove_files(gone, sorted(_inside(gone, gone), key=MANIFEST.__eq__))


def _inside(folder: Path, start: Path) -> list[str]:
    """Paths of everything in a folder, relative to `start`."""
    return [str(path.relative_to(start)) for path in sorted(folder.rglob("*"), reverse=True)]


def _foreign_data(run: Path, whole: bool) -> str:
    """Foreign data in a run, in words, or ""; whole: the run would be deleted as a whole."""
    if (path := find_foreign(run)) is not None:
        return f"Etude has not written {path}"
    if whole and (run / "wandb").exists():
        return f"{run / 'wandb'} is W&B's, and may contain data that was not uploaded"
    if whole and (changed := RunFolder(run).changed_texts()):
        return f"{run / changed[0]} was changed after Etude had written it"
    return ""


def _is_own_leftover(path: Path) -> bool:
    """Whether a `.tmp-` folder is a leftover of the creation or removal of a run."""
    return has_seal(path) and find_foreign(path) is None and not (path / "wandb").exists()


def _of_run(
    run: Path,
    settings: Settings | None,
    is_start: bool,
    quiet: float,
    locked: bool = False,
) -> list[Surplus]:
    """Surplus data of a run.

    is_start: another run starts from it. locked: by this process, before it deletes data, so that
    the remaining checkpoint is verified.
    """
    if not locked and is_locked(run):
        return []
    checkpoints = run / "checkpoints"
    if not os.listdir(checkpoints):
        return [] if is_start else _of_nothing(run, quiet, locked)
    left = (path for folder in (run, checkpoints) for path in sorted(folder.iterdir()))
    found = [
        (path, "Left by saves that were killed")
        for path in left
        if path.name.startswith(checkpoint.TEMPORARY)
    ]
    if not is_start and settings is not None:
        found += _checkpoints(settings, checkpoints, verify=locked)
    return [Surplus(path, why, disk_bytes(path), run) for path, why in found]


def _of_nothing(run: Path, quiet: float, locked: bool) -> list[Surplus]:
    """A run without checkpoints, if it failed or has no rows: only its recipe is lost."""
    failures, rows = run / "failures", run / METRICS
    failed = failures.is_dir() and any(failures.iterdir())
    logged = rows.exists() and rows.stat().st_size > 0
    if (logged and not failed) or not (locked or _is_quiet(run, quiet)):
        return []
    return [Surplus(run, _NOTHING, disk_bytes(run), None)]


def _is_quiet(path: Path, quiet: float) -> bool:
    return time.time() - last_modified(path, path / METRICS, path / "failures") >= quiet


def _checkpoints(settings: Settings, folder: Path, verify: bool) -> list[tuple[Path, str]]:
    """Checkpoints except the newest, the marked ones and those that the recipe keeps."""
    if any(name.endswith(checkpoint.REPLACED) for name in os.listdir(folder)):
        return []  # a resume must repair it first
    every = dict(settings).get(("checkpoint", "keep_every"), "null")
    if every != "null" and not every.isdecimal():
        return []
    try:
        newest = _newest(folder, verify)
        if newest is None:
            return []  # none is known to be complete, so all stay
        kept = [] if checkpoint.marked_checkpoint(folder, "best") else [_best(newest)]
        older, gone = checkpoint.surplus(
            folder, 1, None if every == "null" else int(every), kept, verified=newest
        )
    except EtudeError:  # saved by another version, for example
        return []
    aside = [folder / name for name in sorted(os.listdir(folder)) if _SET_ASIDE.fullmatch(name)]
    found = [(path, _ASIDE) for path in aside if checkpoint.is_own(path)]
    found += [(path / "training", "Training states of older checkpoints") for path in older]
    return found + [(path, "Older checkpoints, neither the newest nor the best") for path in gone]


def _newest(folder: Path, verify: bool) -> Path | None:
    """The newest resumable checkpoint, verified by all its hashes or only by sizes."""
    if verify:
        return checkpoint.newest_verified(folder, lambda text: None, repair=False)
    return next(filter(checkpoint.looks_whole, checkpoint.resumable(folder)), None)


def _best(newest: Path) -> int:
    """The best step in a checkpoint's state, for copies of runs without links; -1 without one."""
    best = checkpoint.best_in(checkpoint.load_document(newest))
    return -1 if best is None else best.step


def _settings(run: Path) -> Settings | None:
    """[(field, text)] of a run's recipe; None if it cannot be read.

    Parsed as events without constructing objects, because there may be thousands of runs.
    """
    try:
        with (run / RECIPE).open("rb") as stream:
            return [*_scalars(yaml.parse(stream.read(1 << 18), Loader=_Loader))]
    except Exception:  # the parser raises many types of errors
        return None


def _scalars(events: Iterable[Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """((field, subfield, ...), text) of all values in a YAML text; entries of lists are "-"."""
    path: list[str | None] = []
    """Per level: "-" in a list, the field in a mapping, None before its next field."""
    for event in events:
        kind = type(event)
        if kind is yaml.ScalarEvent:
            if path and path[-1] is None:
                path[-1] = event.value
                continue
            yield tuple(name or "" for name in path), event.value
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            path.append(None if kind is yaml.MappingStartEvent else "-")
            continue
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            path.pop()
        if path and path[-1] != "-":
            path[-1] = None


def _started_from(settings: Mapping[Path, Settings | None]) -> set[Path]:
    """Runs that the recipes of others name, to start from or as a reward."""
    places, needed = {run.resolve() for run in settings}, set[Path]()
    named = cache(lambda text: _named_by(text, places))
    for run, content in settings.items():
        for _, text in content or ():
            if found := named(text):
                needed |= found - {run.resolve()}
    return needed


def _named_by(text: str, places: set[Path]) -> set[Path]:
    """The folders among `places` that contain the path in a text."""
    if "\0" in text:
        return set()
    path = Path(os.path.realpath(text))
    return {path, *path.parents} & places


def _named(folders: list[Path]) -> str:
    """Folders in words, as the beginning of a sentence."""
    if len(folders) == 1:
        return f"{folders[0]} is"
    return f"{folders[0]} and {len(folders) - 1:,} more folders with a {RECIPE} are"


def has_seal(folder: Path) -> bool:
    """Whether a folder has a manifest with Etude's seal, complete run or not."""
    try:
        return HASHES in decode_sealed(files.read_start(folder / MANIFEST, MOST_TEXT), must=True)
    except ValueError:
        return False


def find_foreign(folder: Path) -> Path | None:
    """A path in a run folder that Etude does not write; None without any.

    W&B's folder is skipped: its files are neither Etude's nor foreign.
    """
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        for name, is_folder in _entries(folder / inside):
            path = f"{inside}{name}"
            if is_folder and path in ("checkpoints", "wandb"):
                continue
            if not (_OWN_FOLDERS if is_folder else _OWN_FILES).fullmatch(path):
                return folder / path
            waiting += [f"{path}/"] if is_folder else []
    for name, _ in _entries(folder / "checkpoints"):
        if not checkpoint.is_written_by_save(folder / "checkpoints" / name):
            return folder / "checkpoints" / name
    return None


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """[(name, whether it is a folder)] of a folder; [] if it is missing."""
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        return sorted((each.name, each.is_dir(follow_symlinks=False)) for each in found)
    return []
