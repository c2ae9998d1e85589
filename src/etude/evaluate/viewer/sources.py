"""Episodes that a page can show: of a dataset, of another system's files, of a run.

Labels and lengths are read when a source is opened. Steps are read when they are shown, an episode
or a part of one at a time, so that a dataset may be larger than memory.
"""

from __future__ import annotations

import csv
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import EtudeError, UsageError
from etude.core.limited import Limits
from etude.data import editing
from etude.data.formats.base import DataError
from etude.data.formats.opening import open_dataset, scan, shared_fields
from etude.data.store.episodes import EpisodeStore
from etude.data.store.files import read_geometry
from etude.data.store.geometry import OBS, is_picture
from etude.data.store.labels import Labels
from etude.data.store.manifest import (
    ENTRY,
    Episodes,
    excluded_of,
    is_dataset,
    open_whole,
    table_of,
)
from etude.evaluate import EPISODES
from etude.runs import checkpoint
from etude.runs.folder import RECIPE, RunFolder

_FILMS = {".mp4": "video/mp4", ".webp": "image/webp"}
_MAX_TABLE = 64 << 20
_KEPT = 2
"""Episodes of files that are kept in memory."""
_TOGETHER, LONGEST = 16, 500_000
"""Successive episodes of a sample, whose steps are in the same blocks, and most steps of each."""


class Source:
    """Episodes, and how to read their steps."""

    specs: Mapping[str, ArraySpec] = {}
    """{"actions", "rewards", "obs/<name>"} of every step; {} if only results are known."""
    note = ""
    """A sentence on what can be done with the episodes."""
    dataset = ""
    """The folder for commands such as `etude data filter`; "" for other episodes."""
    can_exclude = False
    films: Mapping[str, Path] = {}
    """{name: file} of films of some episodes."""
    names: Mapping[str, Sequence[str]] = {}
    """{field: names of its numbers}, where they are known."""
    sampled = "episodes drawn at random"
    """Episodes that statistics of steps are of, if they are not of all."""

    def __init__(self, name: str, table: Array, labels: Labels) -> None:
        """table: [episodes] of `ENTRY`, of which length and return are shown."""
        self.name, self.table, self.labels = name, table, labels
        self.excluded: Array = np.zeros(len(table), bool)
        """[episodes]: left out of training."""

    @property
    def pictures(self) -> list[str]:
        """Names of the observations that are pictures."""
        return [
            name.removeprefix(OBS)
            for name, spec in self.specs.items()
            if name.startswith(OBS) and is_picture(spec)
        ]

    @property
    def curves(self) -> list[str]:
        """Names of the fields that are drawn as curves, actions and rewards first."""
        vectors = [n for n, s in self.specs.items() if n.startswith(OBS) and not is_picture(s)]
        return ["actions", "rewards", *sorted(vectors)] if self.specs else []

    def columns(self, number: int, names: Collection[str], offsets: Array) -> dict[str, Array]:
        """Some fields of the steps `offsets` [n] of an episode, {name: [n, ...]}."""
        raise NotImplementedError

    def walk(self, names: Collection[str]) -> Iterator[dict[str, Array]]:
        """Fields of whole episodes that are not excluded, in a random order."""
        (used,) = (~self.excluded).nonzero()
        starts = np.random.default_rng(0).permutation(np.arange(0, len(used), _TOGETHER))
        for start in starts.tolist():
            for number in used[start : start + _TOGETHER].tolist():
                steps = min(LONGEST, int(self.table["length"][number]))
                yield self.columns(number, names, np.arange(steps))

    def numbers(self, number: int) -> dict[str, str]:
        """Results of an episode besides length, return and success."""
        return {}

    def exclude(self, numbers: Collection[int], undo: bool) -> None:
        raise UsageError(self.note)


class DatasetSource(Source):
    """A dataset of Etude, with its excluded episodes."""

    can_exclude = True

    def __init__(self, path: Path, name: str = "") -> None:
        self.data = open_whole(path)
        super().__init__(name or path.name, table_of(self.data), self.data.labels)
        self.dataset, self.specs = str(path), _shown(self.data)
        self._mark(excluded_of(self.data))

    def columns(self, number: int, names: Collection[str], offsets: Array) -> dict[str, Array]:
        return self.data.columns(names, np.full(len(offsets), number), offsets)

    def exclude(self, numbers: Collection[int], undo: bool) -> None:
        self._mark(editing.exclude(self.data.path, numbers, undo))

    def _mark(self, excluded: Array) -> None:
        self.excluded = np.isin(np.arange(len(self.table)), excluded)


class ReplaySource(Source):
    """Finished episodes in the replay of a run, as its newest checkpoint names them."""

    note = "The replay of a run belongs to the run: its episodes cannot be excluded."

    def __init__(self, path: Path, state: Any, name: str) -> None:
        store = EpisodeStore(path, read_geometry(path), None)  # only reads
        store.verify = False  # blocks are checked when they are read
        store.load_state_dict(state)
        super().__init__(name, table_of(store), Labels.unknown(store.num_episodes))
        self._store, self.specs = store, _shown(store)

    def columns(self, number: int, names: Collection[str], offsets: Array) -> dict[str, Array]:
        return self._store.columns(names, np.full(len(offsets), number), offsets)


class FileSource(Source):
    """Files of another system, read in a subprocess with limits."""

    sampled = "episodes from the beginning"

    def __init__(self, path: Path, kind: str | None, limits: Limits) -> None:
        self._path, self._kind, self._limits = path, kind, limits
        summary = scan(path, limits=limits, kind=kind)
        labels, table = Labels(), np.zeros(len(summary.episodes), ENTRY)
        table["length"], table["return"] = summary.lengths, summary.returns
        for each in summary.episodes:
            task = each.task or summary.task
            labels.add(each.name, "whole", None, each.success, each.rewarded, task)
        super().__init__(f"{path.name} ({summary.format})", table, labels)
        fields, _ = shared_fields([summary])
        specs = {n if n == "actions" else OBS + n: f for n, f in fields.items()}
        self.specs = {n: ArraySpec(f.shape, f.dtype) for n, f in specs.items()}
        self.specs["rewards"] = ArraySpec((), "float32")
        self.note = (
            f"These are files of another system, and stay as they are. `etude data import {path} "
            "DATASET` makes a dataset, from which episodes can be excluded."
        )
        self._read: OrderedDict[int, dict[str, Array]] = OrderedDict()

    def columns(self, number: int, names: Collection[str], offsets: Array) -> dict[str, Array]:
        if number not in self._read:
            with open_dataset(
                self._path, "read", None, self._limits, kind=self._kind, only=number
            ) as dataset:
                episode = next(dataset.episodes(), None)
            if episode is None:
                raise DataError(self._path, "has fewer episodes now; start again")
            self._read[number] = _arrays(episode)
            if len(self._read) > _KEPT:
                self._read.popitem(last=False)
        return {name: self._read[number][name][offsets] for name in names}

    def walk(self, names: Collection[str]) -> Iterator[dict[str, Array]]:
        """The first episodes: files are read from their beginning."""
        with open_dataset(self._path, "read", None, self._limits, kind=self._kind) as dataset:
            for episode in dataset.episodes():
                arrays = _arrays(episode)
                yield {name: arrays[name][: len(episode.rewards)] for name in names}


class EvaluationSource(Source):
    """Results of an evaluation's episodes, with its films; their steps were not recorded."""

    note = "An evaluation keeps the results of its episodes and films of some, but not their steps."

    def __init__(self, folder: Path) -> None:
        self._rows = _rows(folder / EPISODES)
        labels, table = Labels(), np.zeros(len(self._rows), ENTRY)
        for i, row in enumerate(self._rows):
            table["length"][i], table["return"][i] = int(_number(row, "length")), row["return"]
            success = bool(_number(row, "is_success")) if "is_success" in row else None
            labels.add(f"episode {row['episode']}", row.get("kind", ""), None, success)
        super().__init__(f"evaluation {folder.name}", table, labels)
        self.films = {
            file.name: file
            for file in sorted(folder.iterdir())
            if file.suffix in _FILMS and file.is_file() and not file.is_symlink()
        }

    def numbers(self, number: int) -> dict[str, str]:
        shown = {"episode", "kind", "return", "length", "is_success"}
        return {name: text for name, text in self._rows[number].items() if name not in shown}


def film_kind(path: Path) -> str:
    """The media type of a film."""
    return _FILMS[path.suffix]


def open_sources(path: Path, kind: str | None, limits: Limits) -> list[Source]:
    """The episodes at a path: a dataset, a run, or files of another system."""
    if is_dataset(path):
        return [DatasetSource(path)]
    if (path / RECIPE).is_file() and not (path / "meta").is_dir():
        return _of_run(path)
    return [FileSource(path, kind, limits)]


def _of_run(path: Path) -> list[Source]:
    """Replay, evaluations and dataset of a run, whatever is there; newest evaluations first."""
    from etude.planning.recipe import load  # imports torch, which datasets do not need

    folder = RunFolder.open(path, write=False)
    found = [*_replays(folder)]
    for each in sorted((path / "evaluations").glob(f"*/{EPISODES}"), reverse=True):
        found.append(EvaluationSource(each.parent))
    with suppress(EtudeError):  # a recipe with code that is not trusted
        dataset = getattr(load(folder.recipe).algorithm, "dataset", "")
        if dataset and is_dataset(Path(dataset)):
            found.append(DatasetSource(Path(dataset), f"dataset {Path(dataset).name}"))
    if not found:
        raise UsageError(
            f"{path} has recorded no episodes: `etude eval {path}` records results of some, and "
            "sac and td3 keep a replay."
        )
    return found


def _replays(folder: RunFolder) -> Iterator[Source]:
    shards = sorted((folder.path / "replay").glob("shard-*"))
    newest = checkpoint.newest_verified(folder.checkpoints, lambda text: None, repair=False)
    if not shards or newest is None:
        return
    stores = checkpoint.load_training(newest)[2]["algorithm"]["stores"]
    for path, name in zip(shards, sorted(stores), strict=False):
        shard = f" of {path.name}" if len(shards) > 1 else ""
        yield ReplaySource(
            path, stores[name], f"replay at step {checkpoint.step_of(newest):,}{shard}"
        )


def _shown(data: Episodes) -> dict[str, ArraySpec]:
    specs = data.geometry.specs
    return {n: s for n, s in specs.items() if n not in ("terminated", "truncated")}


def _arrays(episode: Any) -> dict[str, Array]:
    """Fields of an episode of a file, as a dataset names them."""
    observed = {OBS + name: array for name, array in episode.obs.items()}
    return {**observed, "actions": episode.actions, "rewards": episode.rewards}


def _rows(path: Path) -> list[dict[str, str]]:
    """The table of an evaluation's episodes."""
    if path.is_symlink() or os.path.getsize(path) > _MAX_TABLE:
        raise UsageError(f"{path} is not a table of an evaluation: evaluate again.")
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        rows = [{str(k): str(v) for k, v in row.items()} for row in csv.DictReader(stream)]
    for row in rows:
        row.setdefault("episode", "")
        row["return"] = str(_number(row, "return"))
    return rows


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        found = float(row.get(name, ""))
    except ValueError:
        return 0.0
    return found if np.isfinite(found) else 0.0
