"""Datasets that share files: a manifest of shards, and a table of episodes in them.

    dataset.json       the shards by hash, and the hashes of the two tables
    episodes.bin       one `ENTRY` per episode: shard, episode in it, first step, length, return
    labels.json        names, tasks and success of the episodes, see `Labels`
    excluded.json      numbers of the episodes that are left out, if any are
    shards/<hash>/     a sealed `EpisodeStore` each, whose files datasets share by hard links

A shard never changes, so datasets are added, merged, filtered and clipped by writing another table,
without copying steps. A dataset that was imported or recorded is a sealed store, which counts as
one shard with all of its episodes. `open_episodes` opens either, without the episodes that
`excluded.json` lists; the list changes the hash of the dataset, and without it the hash is that of
before. A manifest contains no paths, so
an untrusted one cannot read files outside its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.files import (
    DESCRIPTION,
    EXCLUDED,
    WatchedFiles,
    other_data,
    read_excluded,
    read_geometry,
    read_json,
)
from etude.data.store.labels import LABELS, Labels
from etude.data.store.log import DamagedStore, file_size
from etude.data.store.sampling import Transitions, aligned_bytes
from etude.runs.files import explain_os_errors

MANIFEST, TABLE, SHARDS = "dataset.json", "episodes.bin", "shards"
FORMAT, VERSION = "etude-dataset", 1
ENTRY = np.dtype(
    [("shard", "<i8"), ("episode", "<i8"), ("start", "<i8"), ("length", "<i8"), ("return", "<f8")]
)
"""One episode: steps `start` to `start + length` of an episode of a shard, and their return."""
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_SHARDS = 100_000


class Dataset:
    """Episodes of several sealed stores as one dataset; the module's docstring has the layout."""

    lanes = 1
    num_excluded = 0
    """Episodes of the folder that are excluded."""

    def __init__(
        self, path: Path, shards: Sequence[EpisodeStore], table: Array, labels: Labels, seal: str
    ) -> None:
        """table: [episodes] of `ENTRY`, checked; seal: the hash of the dataset."""
        self.path, self.shards, self.table, self.labels = path, shards, table, labels
        self._seal = seal
        self.release: Callable[[], None] = lambda: None
        """Called by `close`: another process may edit the dataset from then on."""
        self._described = WatchedFiles(path, (MANIFEST, TABLE, LABELS), seal)
        whole = [shard.lengths for shard in shards]
        lengths = np.zeros(len(table), np.int64)
        for s, rows in _by_shard(table["shard"]):
            lengths[rows] = whole[s][table["episode"][rows]]
        self._cut: Array = table["start"] + table["length"] < lengths
        """[episodes] bool: ends before the episode in the shard."""

    @classmethod
    def open(cls, path: Path, reads: Collection[str] | None = None) -> Dataset:
        """Open a dataset; blocks are checked when they are first read, everything else now."""
        path = Path(path)
        document, names = _read_manifest(path)
        geometries = [read_geometry(path / SHARDS / name) for name in names]
        shared = shared_observations([geometry.observations for geometry in geometries])
        wanted = shared if reads is None else [name for name in shared if name in reads]
        shards = [EpisodeStore.open(path / SHARDS / name, wanted) for name in names]
        for name, shard in zip(names, shards, strict=True):
            if shard.seal_sha256 != name:
                raise DamagedStore(shard.path, "is not the shard that the dataset names")
        table = _read_table(path / TABLE, document["episodes"])
        _check_table(table, shards, path / TABLE)
        known = read_json(path / LABELS, document["labels"])
        labels = Labels.parse(known, len(table), path / LABELS)
        text = json.dumps(document, sort_keys=True)
        return cls(path, shards, table, labels, hashlib.sha256(text.encode()).hexdigest())

    @cached_property
    def geometry(self) -> StoreGeometry:
        """The fields that steps have in all shards, and the length of the longest episode."""
        return shared_geometry([s.geometry for s in self.shards], int(self.lengths.max(initial=1)))

    @property
    def lengths(self) -> Array:
        """[episodes] int64."""
        return self.table["length"].copy()

    @property
    def returns(self) -> Array:
        """[episodes] float64."""
        return self.table["return"].copy()

    @property
    def num_episodes(self) -> int:
        return len(self.table)

    @property
    def num_transitions(self) -> int:
        return int(self.table["length"].sum())

    @property
    def time(self) -> int:
        """All steps, as in a store with one lane."""
        return self.num_transitions

    @property
    def disk_bytes(self) -> int:
        """Bytes of all shards on disk; other datasets may share them."""
        return sum(shard.disk_bytes for shard in self.shards)

    def transitions(
        self, places: Array, offsets: Array, counts: Array | None = None
    ) -> Transitions:
        """Steps `offsets` [n] of the episodes `places` [n]; as in `EpisodeStore.transitions`."""
        entries = self.table[places]

        def read(shard: EpisodeStore, rows: Any) -> dict[str, Array]:
            more = None if counts is None else counts[rows]
            return _flat(shard.transitions(*_located(entries, offsets, rows), more))

        steps = self._joined(entries, read)
        found = Transitions(*(_nested(steps, field) for field in Transitions._fields))
        newest = offsets if counts is None else offsets + counts - 1
        found.truncated[self._cut[places] & (newest == entries["length"] - 1)] = True
        return found

    def columns(self, names: Collection[str], places: Array, offsets: Array) -> dict[str, Array]:
        """Some fields of steps `offsets` [n] of the episodes `places` [n], {name: [n, ...]}."""
        entries = self.table[places]
        return self._joined(
            entries, lambda shard, rows: shard.columns(names, *_located(entries, offsets, rows))
        )

    def column(self, name: str, places: Array, offsets: Array) -> Array:
        """One field of steps `offsets` [n] of the episodes `places` [n]."""
        return self.columns((name,), places, offsets)[name]

    def _joined(
        self, entries: Array, read: Callable[[EpisodeStore, Any], dict[str, Array]]
    ) -> dict[str, Array]:
        """Read each shard's rows of `entries`, and join the arrays in the order of the entries."""
        parts = [(rows, read(self.shards[s], rows)) for s, rows in _by_shard(entries["shard"])]
        if len(parts) == 1:
            return parts[0][1]
        joined = {name: aligned(len(entries), array) for name, array in parts[0][1].items()}
        for rows, arrays in parts:
            for name, array in arrays.items():
                joined[name][rows] = array
        return joined

    def episode(self, number: int) -> tuple[Transitions, float]:
        """One episode: its T transitions and its return."""
        if not 0 <= number < self.num_episodes:
            raise UsageError(f"{self.path} holds {self.num_episodes:,} episodes, not {number:,}.")
        length = int(self.table["length"][number])
        steps = self.transitions(np.full(length, number), np.arange(length))
        return steps, float(self.table["return"][number])

    def check_blocks(self) -> None:
        """Read every block of every shard; raises `DamagedStore` at the first bad one."""
        for shard in self.shards:
            shard.check_blocks()

    def check_unchanged(self) -> None:
        """Raise if a file that is in use was changed."""
        for shard in self.shards:
            shard.check_unchanged()
        self._described.check_unchanged(lambda: open_episodes(self.path, ()).seal_sha256)

    @property
    def seal_sha256(self) -> str:
        """The hash of all content of the dataset."""
        return self._seal

    def state_dict(self) -> Tree:
        """The hash of the dataset, which never changes."""
        return {"sealed_sha256": self._seal}

    def load_state_dict(self, state: Tree) -> None:
        """Refuse the state of a run on other data."""
        if state.get("sealed_sha256") != self._seal:
            raise other_data(self.path)

    def close(self) -> None:
        self.release()
        for shard in self.shards:
            shard.close()


Episodes = EpisodeStore | Dataset
"""A finished dataset of either kind."""


def is_dataset(path: Path) -> bool:
    """Whether a folder has an episode store or a manifest, intact or not."""
    found = any(os.path.lexists(path / name) for name in (DESCRIPTION, MANIFEST))
    return path.is_dir() and found


def open_whole(path: Path, reads: Collection[str] | None = None) -> Episodes:
    """Open a finished dataset with its excluded episodes; reads: as for `open_episodes`."""
    kind = Dataset if os.path.lexists(Path(path) / MANIFEST) else EpisodeStore
    return kind.open(Path(path), reads)


def open_episodes(path: Path, reads: Collection[str] | None = None) -> Episodes:
    """Open a finished dataset without its excluded episodes.

    reads: the observations of each step to read, None for all.
    """
    data = open_whole(path, reads)
    return without(data, excluded_of(data))


def excluded_of(whole: Episodes) -> Array:
    """[n] int64, ascending: the episodes of a dataset that are excluded."""
    return read_excluded(whole.path, whole.seal_sha256, whole.num_episodes)


def without(whole: Episodes, excluded: Array) -> Episodes:
    """A dataset without some of its episodes, if any; it has another hash."""
    if not len(excluded):
        return whole
    kept = np.delete(np.arange(whole.num_episodes), excluded)
    table, shards = table_of(whole)[kept], shards_of(whole)
    text = json.dumps([whole.seal_sha256, excluded.tolist()])
    seal = hashlib.sha256(text.encode()).hexdigest()
    found = Dataset(whole.path, shards, table, labels_of(whole.labels, kept, shards, table), seal)
    found.num_excluded = len(excluded)
    return found


def num_excluded(data: Episodes) -> int:
    """Number of episodes that are excluded from an open dataset."""
    return data.num_excluded if isinstance(data, Dataset) else 0


def shards_of(data: Episodes) -> Sequence[EpisodeStore]:
    """The sealed stores of a dataset."""
    return data.shards if isinstance(data, Dataset) else [data]


def table_of(data: Episodes) -> Array:
    """[episodes] of `ENTRY`: the episodes of a dataset in its shards."""
    if isinstance(data, Dataset):
        return data.table.copy()
    table: Array = np.zeros(data.num_episodes, ENTRY)
    table["episode"] = np.arange(len(table))
    table["length"], table["return"] = data.lengths, data.returns
    return table


def sources_of(shards: Sequence[EpisodeStore], table: Array) -> Array:
    """[episodes]: the episode of its shard with which each entry shares steps."""
    sources: Array = np.zeros(len(table), np.int64)
    for s, rows in _by_shard(table["shard"]):
        sources[rows] = shards[s].labels.groups[table["episode"][rows]]
    return sources


def labels_of(
    labels: Labels, numbers: Array, shards: Sequence[EpisodeStore], table: Array
) -> Labels:
    """Labels of the episodes `numbers` [n], each in the group of the episode it was cut from.

    table: [n] of `ENTRY`, of the same episodes.
    """
    keys = np.stack([table["shard"], sources_of(shards, table)])
    _, first, place = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    found = Labels()
    found.extend(labels, numbers.tolist(), first[place.reshape(-1)].tolist())
    return found


def geometry_of(path: Path) -> StoreGeometry:
    """The fields of a dataset, read from its small files alone."""
    if not os.path.lexists(path / MANIFEST):
        return read_geometry(path)
    geometries = [read_geometry(path / SHARDS / name) for name in _read_manifest(path)[1]]
    return shared_geometry(geometries, max(g.max_episode_steps for g in geometries))


def examine(path: Path) -> dict[Path, str]:
    """The fault of each file of a dataset, "" for intact files."""
    found: dict[Path, str] = {}
    try:
        if os.path.lexists(path / MANIFEST):
            _, names = _read_manifest(path)
            for name in names:
                found |= EpisodeStore.examine(path / SHARDS / name)
            if not any(found.values()):
                Dataset.open(path)
                found |= dict.fromkeys((path / name for name in (MANIFEST, TABLE, LABELS)), "")
        else:
            found = EpisodeStore.examine(path)
        if os.path.lexists(path / EXCLUDED) and not any(found.values()):
            open_episodes(path, ())
            found[path / EXCLUDED] = ""
    except DamagedStore as error:
        found[error.path] = error.what
    return found


def shared_observations(all_of_them: Sequence[Mapping[str, Any]]) -> list[str]:
    """The observations that all have in the same size, in the order of the first."""
    first = all_of_them[0]
    return [n for n, spec in first.items() if all(o.get(n) == spec for o in all_of_them)]


def shared_geometry(geometries: Sequence[StoreGeometry], longest: int) -> StoreGeometry:
    """The geometry of the fields that all have in the same size; refuses too few of them."""
    specs = [geometry.specs for geometry in geometries]
    if any(s["actions"] != specs[0]["actions"] for s in specs):
        raise UsageError("The datasets have actions of different sizes and cannot be one dataset.")
    names = set(shared_observations(specs))
    kept = {name: spec for name, spec in specs[0].items() if name in names}
    if not shared_observations([g.observations for g in geometries]):
        raise UsageError("The datasets have no observation in common and cannot be one dataset.")
    return StoreGeometry(kept, lanes=1, max_episode_steps=longest)


def _by_shard(shards: Array) -> list[tuple[int, Any]]:
    """(shard, its rows) of a column of shards; a slice of all rows if there is one shard."""
    if not len(shards):
        return []
    if (shards == shards[0]).all():
        return [(int(shards[0]), slice(None))]
    return [(int(s), np.flatnonzero(shards == s)) for s in np.unique(shards)]


def _located(entries: Array, offsets: Array, rows: Any) -> tuple[Array, Array]:
    """Episodes and offsets of steps within their shard."""
    return entries["episode"][rows], entries["start"][rows] + offsets[rows]


def _flat(steps: Transitions) -> dict[str, Array]:
    """{"obs/<name>": ..., "actions": ...}."""
    flat: dict[str, Array] = {}
    for name, value in steps._asdict().items():
        nested = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name}/{key}": array for key, array in nested.items()}
    return flat


def _nested(flat: dict[str, Array], field: str) -> Any:
    """One field of `Transitions` from flat arrays."""
    if (array := flat.get(f"{field}/")) is not None:
        return array
    prefix = f"{field}/"
    return {n.removeprefix(prefix): a for n, a in flat.items() if n.startswith(prefix)}


def aligned(num: int, like: Array) -> Array:
    """An array [num, ...] at an address of 64 bytes, see `Columns`."""
    shape = (num, *like.shape[1:])
    size = int(np.prod(shape)) * like.dtype.itemsize
    return aligned_bytes(size).view(like.dtype).reshape(shape)


def _read_manifest(path: Path) -> tuple[Tree, list[str]]:
    """Read and check the manifest of a dataset; returns it and the names of its shards."""
    document = read_json(path / MANIFEST)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise DamagedStore(path / MANIFEST, "does not describe a dataset of this version")
    names = document.get("shards")
    names = names if isinstance(names, list) and 0 < len(names) <= _MAX_SHARDS else [None]
    hashes = [*names, document.get("episodes"), document.get("labels")]
    if not all(isinstance(h, str) and _HASH.fullmatch(h) for h in hashes):
        raise DamagedStore(path / MANIFEST, "does not name its shards and tables by their hashes")
    return document, names


def _read_table(path: Path, sha256: str) -> Array:
    size = file_size(path)
    with explain_os_errors("read", path):
        data = path.read_bytes()
    if size % ENTRY.itemsize or hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedStore(path, "is damaged: its SHA-256 is not what was recorded")
    return np.frombuffer(data, ENTRY)


def _check_table(table: Array, shards: Sequence[EpisodeStore], path: Path) -> None:
    """Refuse entries outside of their shards."""
    sane = (table["shard"] >= 0) & (table["shard"] < len(shards))
    sane &= (table["start"] >= 0) & (table["length"] >= 1) & np.isfinite(table["return"])
    for s, rows in _by_shard(np.where(sane, table["shard"], -1)):
        if s < 0:
            continue
        lengths, episodes = shards[s].lengths, table["episode"][rows]
        inside = (episodes >= 0) & (episodes < len(lengths))
        whole = lengths[np.where(inside, episodes, 0)]
        # A difference, since a sum could overflow.
        inside &= table["start"][rows] <= whole - table["length"][rows]
        sane[rows] &= inside
    if not sane.all():
        raise DamagedStore(path, f"is invalid at episode {np.argmin(sane):,}")
