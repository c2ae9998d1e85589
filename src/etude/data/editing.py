"""Datasets made of others: merged, filtered, clipped. Files are linked, and no step is copied.

A dataset never changes, since a run stores the hash of its dataset. An edit makes a new dataset,
whose tables are all that takes disk space. `exclude` is the one exception: it changes which
episodes of a dataset are used, and with them its hash, and it can be undone.
"""

from __future__ import annotations

import csv
import errno
import fnmatch
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.data.importing import ABOUT, made_whole, read_about, success_of_clip
from etude.data.store.episodes import EpisodeStore
from etude.data.store.files import EXCLUDED, write_excluded, write_json
from etude.data.store.labels import LABELS, MAX_EMBEDDING, Labels
from etude.data.store.manifest import (
    FORMAT,
    MANIFEST,
    SHARDS,
    TABLE,
    VERSION,
    Dataset,
    Episodes,
    excluded_of,
    labels_of,
    open_whole,
    shards_of,
    shared_geometry,
    sources_of,
    table_of,
    without,
)
from etude.runs import files
from etude.runs.file_system import AlreadyLocked, FolderLock

_APART = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems that cannot link a file to the new place."""


@dataclass(frozen=True)
class Selection:
    """Episodes of shards in memory, which edits take and return."""

    shards: list[EpisodeStore]
    table: Array
    """[episodes] of `ENTRY`."""
    labels: Labels
    about: list[dict[str, Any]]
    """`about.json` of the datasets."""
    notes: tuple[str, ...] = ()

    def only(self, numbers: Array) -> Selection:
        """Some of the episodes, `numbers` [n], each in the group of the episode it was cut from."""
        table = self.table[numbers]
        labels = labels_of(self.labels, numbers, self.shards, table)
        return replace(self, table=table, labels=labels)

    @property
    def whole(self) -> Array:
        """[episodes] int64: steps of the whole episodes in the shards."""
        lengths: Array = np.zeros(len(self.table), np.int64)
        for s, shard in enumerate(self.shards):
            rows = self.table["shard"] == s
            lengths[rows] = shard.lengths[self.table["episode"][rows]]
        return lengths


def select(paths: Sequence[Path]) -> Selection:
    """All episodes of some datasets, one after the other; shared episodes are taken once."""
    shards: dict[str, EpisodeStore] = {}
    tables, labels, about, notes = [], Labels(), [], []
    for path in paths:
        whole = open_whole(path)
        excluded = excluded_of(whole)
        data = without(whole, excluded)
        if len(excluded):
            notes.append(f"{len(excluded):,} excluded episodes of {path} are left out.")
        table = table_of(data)
        places = [_place(shards, shard) for shard in shards_of(data)]
        table["shard"] = np.array(places)[table["shard"]]
        tables.append(table)
        numbers = range(len(table))
        labels.extend(data.labels, numbers, [len(labels) + n for n in numbers])
        about.append({"path": str(path), **read_about(path)})
    table = np.concatenate(tables)
    shared_geometry(
        [shard.geometry for shard in shards.values()], 1
    )  # refuses datasets that share too little
    keys = np.stack([table[name] for name in ("shard", "episode", "start", "length")])
    _, first = np.unique(keys, axis=1, return_index=True)
    dropped = len(table) - len(first)
    said = f"{dropped:,} episodes are in more than one of the datasets and are taken once."
    notes += [said] if dropped else []
    found = Selection([*shards.values()], table, labels, about, tuple(notes))
    return found.only(np.sort(first))


def _place(shards: dict[str, EpisodeStore], shard: EpisodeStore) -> int:
    """The number of a shard, which another dataset may have too."""
    shards.setdefault(shard.seal_sha256, shard)
    return list(shards).index(shard.seal_sha256)


@dataclass(frozen=True)
class Filter:
    """Conditions on episodes, all of which must be met."""

    task: str | None = None
    """A pattern like *drawer* for the sentence of the task."""
    name: str | None = None
    """A pattern for the name of the episode."""
    kind: str | None = None
    success: Literal["yes", "no", "unknown"] | None = None
    min_return: float | None = None
    max_return: float | None = None
    min_steps: int | None = None
    max_steps: int | None = None
    episodes: int | None = None
    """Largest number of episodes, the first ones."""

    def chosen(self, table: Array, labels: Labels) -> Array:
        """Numbers of the episodes that meet the conditions, ascending int64.

        table: [episodes] of `ENTRY`.
        """
        kept: Array = np.ones(len(table), bool)
        for pattern, values in (
            (self.task, labels.tasks),
            (self.name, labels.names),
            (self.kind, labels.kinds),
        ):
            if pattern is not None:
                kept &= np.array([fnmatch.fnmatchcase(value, pattern) for value in values], bool)
        if self.success is not None:
            wanted = {"yes": True, "no": False, "unknown": None}[self.success]
            kept &= np.array([success is wanted for success in labels.successes], bool)
        for low, high, column in (
            (self.min_return, self.max_return, "return"),
            (self.min_steps, self.max_steps, "length"),
        ):
            kept &= (table[column] >= (-np.inf if low is None else low)) & (
                table[column] <= (np.inf if high is None else high)
            )
        return np.flatnonzero(kept)[: self.episodes]


def filter_episodes(selection: Selection, wanted: Filter) -> Selection:
    """Keep the episodes that meet the conditions of a filter."""
    numbers = wanted.chosen(selection.table, selection.labels)
    if not len(numbers):
        tasks = list(dict.fromkeys(selection.labels.tasks))[:3]
        some = f" (tasks are {'; '.join(map(repr, tasks))})" if wanted.task else ""
        raise UsageError(
            f"None of {len(selection.table):,} episodes meets the conditions{some}: relax them, or "
            "see `etude data inspect`."
        )
    return selection.only(numbers)


def clip(selection: Selection, start: int = 0, stop: int | None = None) -> Selection:
    """Keep steps `start` to `stop` of every episode, as in a slice of Python: negative numbers
    count from the end. Empty episodes are dropped."""
    lengths = selection.table["length"]
    first = np.clip(start if start >= 0 else lengths + start, 0, lengths)
    last = lengths if stop is None else np.clip(stop if stop >= 0 else lengths + stop, 0, lengths)
    numbers = np.flatnonzero(last > first)
    if not len(numbers):
        raise UsageError(
            f"No episode has a step in this range: they have {lengths.min():,} to "
            f"{lengths.max():,} steps; choose another --start or --stop."
        )
    cut = selection.only(numbers)
    first, last = first[numbers], last[numbers]
    changed = np.flatnonzero((first > 0) | (last < lengths[numbers]))
    for i in changed.tolist():
        _cut(cut, i, int(first[i]), int(last[i]))
    said = f"[{start}:{'' if stop is None else stop}]"
    notes = [f"{len(changed):,} of {len(numbers):,} episodes were clipped to their steps {said}."]
    if dropped := len(lengths) - len(numbers):
        notes.append(f"{dropped:,} episodes have no such step and were left out.")
    return replace(cut, notes=(*selection.notes, *notes))


def _cut(selection: Selection, i: int, first: int, last: int) -> None:
    """Reduce entry `i` to its steps `first` to `last`."""
    entry, labels = selection.table[i], selection.labels
    shard, length = selection.shards[int(entry["shard"])], int(entry["length"])
    offsets = np.arange(length) + int(entry["start"])
    rewards = shard.column("rewards", np.full(length, entry["episode"]), offsets)
    entry["start"] += first
    entry["length"] = last - first
    entry["return"] = rewards[first:last].sum(dtype=np.float64)
    labels.kinds[i], labels.names[i] = "clip", f"{labels.names[i]}[{first}:{last}]"
    if last < length:
        labels.successes[i] = success_of_clip(labels.successes[i], rewards, last)


def write(selection: Selection, out: Path, said: str) -> Dataset:
    """Write a dataset of these episodes to a new folder, atomically.

    said: a description of the edit, for people.
    """
    with made_whole(out) as folder:
        _fill(folder, selection, said)
    return Dataset.open(out)


def exclude(path: Path, numbers: Collection[int], undo: bool = False) -> Array:
    """Exclude episodes of a dataset from all use, with the clips that were cut from them; or, to
    undo that, include them again. Returns the excluded episodes, ascending int64.

    numbers: of all episodes, as `etude data view` shows them. The steps stay as they are: the
    folder gets a list, which changes the hash of the dataset. Refused while a run learns from it.
    """
    path = Path(path)
    try:
        lock = FolderLock(path)
    except AlreadyLocked as error:
        raise UsageError(
            f"{path} is in use by a training, which holds it to its hash: wait for the end of the "
            "training, or stop it."
        ) from error
    try:
        whole = open_whole(path, ())
        before = excluded_of(whole)
        wanted = _with_clips(whole, numbers)
        change = np.setdiff1d if undo else np.union1d
        after: Array = change(before, wanted).astype(np.int64)
        if len(after) == whole.num_episodes:
            raise UsageError(
                f"These are all {len(after):,} episodes of {path}: leave at least one in it."
            )
        if not len(after):
            files.remove_files(path, [EXCLUDED] if len(before) else [])
        elif not np.array_equal(after, before):
            write_excluded(path, whole.seal_sha256, after, files.current())
        whole.close()
        return after
    finally:
        lock.release()


def _with_clips(data: Episodes, numbers: Collection[int]) -> Array:
    """Numbers of episodes, and of the clips that were cut from them."""
    known, named = data.num_episodes, np.array([*numbers], np.int64)
    if (wrong := named[(named < 0) | (named >= known)]).size:
        raise UsageError(
            f"{data.path} has no episode {wrong[0]:,}: they are numbered 0 to {known - 1:,}."
        )
    table = table_of(data)
    keys = np.stack([table["shard"], sources_of(shards_of(data), table)])
    groups = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    is_clip = np.array([kind == "clip" for kind in data.labels.kinds], bool)
    cut = is_clip & np.isin(groups, groups[named[~is_clip[named]]])
    return np.union1d(named, np.flatnonzero(cut))


def _fill(folder: Path, selection: Selection, said: str) -> None:
    used = np.unique(selection.table["shard"])
    table = selection.table.copy()
    table["shard"] = used.searchsorted(table["shard"])
    shards = [selection.shards[s] for s in used.tolist()]
    files.new_folder(folder / SHARDS)
    for shard in shards:
        _link(shard.path, folder / SHARDS / shard.seal_sha256)
    files.fsync_folder(folder / SHARDS)
    source = " and ".join(str(about.get("path")) for about in selection.about)
    about = {
        "source": f"{said} {source}",
        "format": "manifest",
        "notes": list(selection.notes),
        "of": selection.about,
    }
    files.write_file(folder / ABOUT, [json.dumps(about, indent=1).encode()])
    written = files.write_file(folder / TABLE, [table.tobytes()])
    labels = write_json(folder / LABELS, selection.labels.to_json(), files.current())
    document = {"format": FORMAT, "version": VERSION, "shards": [s.seal_sha256 for s in shards]}
    document |= {"episodes": written.sha256, "labels": labels}
    write_json(folder / MANIFEST, document, files.current())


def _link(shard: Path, folder: Path) -> None:
    """Link the files of a sealed store to another folder."""
    files.new_folder(folder)
    for file in sorted(shard.iterdir()):
        shared = file.suffix in (".json", ".bin") and file.name not in (ABOUT, EXCLUDED)
        if not shared or file.is_symlink():
            continue
        try:
            os.link(file, folder / file.name)
        except OSError as error:
            if error.errno not in _APART:
                raise
            if shard.stat().st_dev == folder.stat().st_dev and error.errno != errno.EMLINK:
                raise UsageError(
                    f"{folder.parent.parent.parent} is on a file system without hard links, which "
                    "datasets use to share files: copy the old dataset to another file system, "
                    "and make the new one there."
                ) from error
            raise UsageError(
                f"{shard} cannot be linked to {folder.parent.parent.parent}: make the new dataset "
                "on the same file system, where it takes no space, or copy the old one there first."
            ) from error
    files.fsync_folder(folder)


_MAX_BYTES = 1 << 30


def read_embeddings(path: Path) -> dict[str, list[float]]:
    """Read {sentence: vector} of float32 numbers from a file.

    npz: arrays "sentences" [n] and "vectors" [n, size]. csv: a sentence, then its numbers, in every
    row; a first row without numbers is a heading. parquet: columns "sentence" and "vector".
    """
    readers = {".npz": _from_npz, ".csv": _from_csv, ".parquet": _from_parquet}
    if path.suffix not in readers:
        raise UsageError(f"{path} is not a table of embeddings (.npz, .csv or .parquet).")
    if not path.is_file():
        raise UsageError(f"There is no file {path}; check the path.")
    if path.stat().st_size > _MAX_BYTES:
        raise UsageError(f"{path} is larger than 1 GiB, too large for a table of sentences.")
    try:
        sentences, vectors = readers[path.suffix](path)
        return _checked([str(each) for each in sentences], np.asarray(vectors, np.float32))
    except (ValueError, KeyError, OSError, TypeError, zipfile.BadZipFile) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} cannot be read as a table of embeddings: {said}.") from error


def _checked(sentences: list[str], vectors: Array) -> dict[str, list[float]]:
    if vectors.ndim != 2 or len(vectors) != len(sentences) or not len(sentences):
        raise ValueError("it does not have one vector of the same size for every sentence")
    if not 1 <= vectors.shape[1] <= MAX_EMBEDDING or not np.isfinite(vectors).all():
        raise ValueError(f"vectors are 1 to {MAX_EMBEDDING:,} finite numbers")
    if len(set(sentences)) < len(sentences):
        raise ValueError("it has a sentence twice")
    return dict(zip(sentences, vectors.tolist(), strict=True))


def _from_npz(path: Path) -> tuple[Iterable[Any], Any]:
    with np.load(path) as arrays:
        return arrays["sentences"], arrays["vectors"]


def _from_csv(path: Path) -> tuple[Iterable[Any], Any]:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if row]
    if rows and not _is_number(rows[0][-1]):
        del rows[0]
    return [row[0] for row in rows], [[float(x) for x in row[1:]] for row in rows]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _from_parquet(path: Path) -> tuple[Iterable[Any], Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow to be read: pip install 'etude[data]'.") from error
    table = pyarrow.parquet.read_table(path, columns=["sentence", "vector"])
    return table["sentence"].to_pylist(), table["vector"].to_pylist()
