"""What of runs nobody needs any more, and how it is freed.

A run keeps all that a resume or an evaluation reads: its newest whole checkpoint, the policies that
are marked (best, final) or that its recipe asks to keep, its replay, rows and reports. A run that
is being written is left alone, and so are the checkpoints of one that another run starts from.

Only what carries Etude's seal is freed: that of a run is in its manifest, those of a checkpoint are
in the manifests of its parts. Files are deleted by their names, so that nothing goes with them. A
run that holds anything which Etude does not write is left as it is.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from etude.core.errors import EtudeError
from etude.runs import checkpoint, files
from etude.runs.finding import disk_bytes, find_unfinished, last_modified
from etude.runs.folder import MANIFEST, METRICS, RECIPE, RunFolder, find_foreign, has_seal
from etude.runs.lock import is_locked

Say = Callable[[str], None]
Settings = list[tuple[tuple[str, ...], str]]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Many times as fast in C; some builds of PyYAML are without it."""
QUIET = 3600.0
"""Seconds since a run was last written, before it may be taken away as a whole."""
_NOTHING = "Runs that ended before they had saved anything"
_ASIDE = "Checkpoints that were set aside, as damaged or by `etude resume --checkpoint`"
_SET_ASIDE = re.compile(rf"[0-9]{{12,}}({checkpoint.DAMAGED}|{checkpoint.ASIDE})(-[0-9]+)?")


def _silent(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Surplus:
    """Something that nobody needs."""

    path: Path
    why: str
    bytes: int
    run: Path | None
    """The run it is a part of; None where it goes as a whole."""


def find_surplus(runs: Sequence[Path], quiet: float = QUIET, say: Say = _silent) -> list[Surplus]:
    """What can be freed of these runs; nothing is changed. `say` gets what is left, and why.

    Hashes of checkpoints are not checked: `free` does that, of the one that a run keeps.
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
        if mine and (stranger := _stranger(run, whole=any(each.run is None for each in mine))):
            say(f"{run} is left: {stranger}.")
        else:
            found += mine
    return found


def find_killed_runs(folder: Path, quiet: float = QUIET) -> list[Surplus]:
    """Runs in a folder whose creation, or removal, was killed."""
    return [
        Surplus(path, "Left by runs that were killed at their start", disk_bytes(path), None)
        for path in find_unfinished(folder)
        if _is_own_leftover(path) and _is_quiet(path, quiet) and not is_locked(path)
    ]


def delete_surplus(found: Sequence[Surplus], quiet: float = QUIET) -> Iterator[tuple[Surplus, str]]:
    """Take things away, each with "" or with why it was left; what has changed since is left."""
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
    with RunFolder.open(run) as folder:  # its one writer from here on
        own = has_seal(run) and not _stranger(run, whole=any(each.run is None for each in parts))
        now = _of_run(run, _settings(run), False, quiet, locked=True) if own else []
        still = {each.path for each in now}
        gone = [each.path for each in parts if each.path in still]
        if run in gone:
            # A rename first, so that a kill leaves no half of a run under its name.
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
    """Delete what Etude writes of a run, its manifest last: it shows whose the rest is."""
    files.remove_files(gone, sorted(_inside(gone, gone), key=MANIFEST.__eq__))


def _inside(folder: Path, start: Path) -> list[str]:
    """All that is in a folder, from another folder on."""
    return [str(path.relative_to(start)) for path in sorted(folder.rglob("*"), reverse=True)]


def _stranger(run: Path, whole: bool) -> str:
    """What of a run is not Etude's, in words; "" if nothing is. whole: all of it would go."""
    if (path := find_foreign(run)) is not None:
        return f"Etude has not written {path}"
    if whole and (run / "wandb").exists():
        return f"{run / 'wandb'} is W&B's, and may hold what was not uploaded"
    if whole and (changed := RunFolder(run).changed_texts()):
        return f"{run / changed[0]} was changed after Etude had written it"
    return ""


def _is_own_leftover(path: Path) -> bool:
    """Whether a `.tmp-` folder is of a run that was being made or removed, and of nothing else."""
    return has_seal(path) and find_foreign(path) is None and not (path / "wandb").exists()


def _of_run(
    run: Path,
    settings: Settings | None,
    is_start: bool,
    quiet: float,
    locked: bool = False,
) -> list[Surplus]:
    """What can be freed of a run; is_start: another run starts from it. locked: by this process,
    which is about to free it, so that the checkpoint which stays is verified."""
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
    """A run without any checkpoint, if it failed or never logged a row: only its recipe is lost."""
    failures, rows = run / "failures", run / METRICS
    failed = failures.is_dir() and any(failures.iterdir())
    logged = rows.exists() and rows.stat().st_size > 0
    if (logged and not failed) or not (locked or _is_quiet(run, quiet)):
        return []
    return [Surplus(run, _NOTHING, disk_bytes(run), None)]


def _is_quiet(path: Path, quiet: float) -> bool:
    return time.time() - last_modified(path, path / METRICS, path / "failures") >= quiet


def _checkpoints(settings: Settings, folder: Path, verify: bool) -> list[tuple[Path, str]]:
    """Checkpoints besides the newest, the marked ones and those that the recipe keeps."""
    if any(name.endswith(checkpoint.REPLACED) for name in os.listdir(folder)):
        return []  # a resume puts things in order first
    every = dict(settings).get(("checkpoint", "keep_every"), "null")
    if every != "null" and not every.isdecimal():
        return []
    try:
        newest = _newest(folder, verify)
        if newest is None:
            return []  # nothing is known to be good, so nothing is given up
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
    """The newest checkpoint that can be resumed: by all its hashes, or as far as sizes tell."""
    if verify:
        return checkpoint.newest_verified(folder, lambda text: None, repair=False)
    return next(filter(checkpoint.looks_whole, checkpoint.resumable(folder)), None)


def _best(newest: Path) -> int:
    """The step that a checkpoint remembers as the best, of a copy without links; -1 for none."""
    saver = checkpoint.load_document(newest).get("saver")
    best = saver.get("best") if isinstance(saver, dict) else None
    return best if isinstance(best, int) else -1


def _settings(run: Path) -> Settings | None:
    """The texts of a run's recipe by their fields; None where it cannot be read.

    Read as events, without making objects of them: thousands of runs have thousands of recipes.
    """
    try:
        with (run / RECIPE).open("rb") as stream:
            return [*_scalars(yaml.parse(stream.read(1 << 18), Loader=_Loader))]
    except Exception:  # the parser has many errors, some of them its own mistakes
        return None


def _scalars(events: Iterable[Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """((field, field within), text) of every value in a YAML text; entries of lists are "-"."""
    path: list[str | None] = []
    """Of each level: "-" in a list, the field in a mapping, None before its next field."""
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
    """The runs that the recipes of others name: as what they start from, or a reward of theirs."""
    places, needed = {run.resolve() for run in settings}, set[Path]()
    named = cache(lambda text: _named_by(text, places))
    for run, content in settings.items():
        for _, text in content or ():
            if found := named(text):
                needed |= found - {run.resolve()}
    return needed


def _named_by(text: str, places: set[Path]) -> set[Path]:
    """The folder among these that a text is the path of, or of something in it."""
    if "\0" in text:
        return set()
    path = Path(os.path.realpath(text))
    return {path, *path.parents} & places


def _named(folders: list[Path]) -> str:
    """Some folders, in words."""
    if len(folders) == 1:
        return f"{folders[0]} is"
    return f"{folders[0]} and {len(folders) - 1:,} more folders with a {RECIPE} are"
