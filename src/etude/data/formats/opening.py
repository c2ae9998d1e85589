"""Datasets of other systems, opened in a subprocess with memory and time limits.

    with open_dataset(path, "read") as dataset:
        for episode in dataset.episodes(): ...

The parent meets only JSON and arrays whose size it has agreed to, whatever the file holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np

from etude.core.limited import LimitedProcess, Limits, ReaderEnded
from etude.core.trees import Tree
from etude.data.formats.summary import Array, DataError, Described, Episode, ReadOptions, Summary

Job = Literal["scan", "check", "read"]
"""Describe the episodes; also read every number; also give them."""
_CHILD = "etude.data.formats.child"
_KINDS = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32"}


_ADVICE = {
    "slow": "the file is damaged, or raise --seconds",
    "crashed": "the file is damaged, get a whole copy of it",
    "early": "is h5py installed and whole?",
    "broken": "the reader is broken",
}
"""What to do where the reader ended, by why."""


def scan(path: Path, options: ReadOptions | None = None, limits: Limits | None = None) -> Summary:
    """What a file holds, from its shapes and small arrays."""
    with open_dataset(path, "scan", options, limits) as dataset:
        return dataset.summary


def open_dataset(
    path: Path,
    job: Job,
    options: ReadOptions | None = None,
    limits: Limits | None = None,
    skip: int = 0,
) -> Dataset:
    """Describe all episodes of a file; `episodes` then gives those after the first `skip`."""
    path = Path(path)
    if not path.exists():
        raise DataError(path, "there is no such file or folder; check the path")
    dataset = Dataset(path, job, options or ReadOptions(), limits or Limits(), skip)
    try:
        dataset._describe()
    except BaseException:
        dataset.close()
        raise
    return dataset


@dataclass
class Dataset:
    """A file of episodes, as the process that reads it describes it."""

    path: Path
    job: Job
    options: ReadOptions
    limits: Limits
    skip: int = 0
    summary: Summary = field(init=False)
    _episode: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        order = {"path": str(self.path), "job": self.job, "options": asdict(self.options)}
        self._process = LimitedProcess(_CHILD, order | {"skip": self.skip}, self.limits)

    def _describe(self) -> None:
        header = self._next()
        self.summary = Summary(self.path, str(header["format"]), str(header["task"]))
        self.summary.masks = dict(header["masks"])
        while (header := self._next())["kind"] != "all described":
            if header["kind"] == "described":
                self.summary.episodes.append(Described.from_json(header["episode"]))
        if not self.summary.episodes:
            raise DataError(self.path, "holds no episode")
        self.summary.notes += notes_of(self.summary.episodes, self.options)

    def episodes(self) -> Iterator[Episode]:
        """With the job "read": every episode once, in the order of the file.

        Like `progress`, it raises at the first number that is not finite.
        """
        while (header := self._next())["kind"] != "end":
            if header["kind"] == "arrays":
                yield self._receive(header)

    def progress(self) -> Iterator[str]:
        """With the job "check": the names of the episodes that are being read."""
        while (header := self._next())["kind"] != "end":
            yield str(header["episode"])

    def _next(self) -> Tree:
        """The next header; raises what the reader reports, or what became of it."""
        try:
            header = self._process.header()
        except ReaderEnded as error:
            raise self._failed(f"{error.words}; {_ADVICE[error.why]}") from error
        if header["kind"] == "error":
            raise DataError(self.path, str(header["what"]), header["episode"])
        if header["kind"] == "begin":
            self._episode = str(header["episode"])
        return header

    def _receive(self, header: Tree) -> Episode:
        arrays: dict[str, Array] = {}
        left = self.limits.memory
        for name, kind, shape in header["arrays"]:
            size = math.prod(shape) * np.dtype(kind).itemsize if kind in _KINDS else left + 1
            left -= size
            if left < 0 or size < 0:
                raise self._failed(f"'{name}' is larger than agreed")
            arrays[name] = np.frombuffer(self._read(size), kind).reshape(shape)
        obs = {n.removeprefix("obs/"): a for n, a in arrays.items() if n.startswith("obs/")}
        ended = bool(header["terminated"])
        name = str(header["episode"])
        return Episode(name, obs, arrays["actions"], arrays["rewards"], ended)

    def _read(self, size: int) -> bytearray:
        try:
            return self._process.read(size)
        except ReaderEnded as error:
            raise self._failed(f"{error.words}; {_ADVICE[error.why]}") from error

    def _failed(self, what: str) -> DataError:
        return DataError(self.path, what, self._episode)

    def close(self) -> None:
        """End the reader, wherever it is."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def notes_of(episodes: Sequence[Described], options: ReadOptions) -> list[str]:
    """What an import does that is not plain from the files."""
    notes, num = [], f"{len(episodes):,}"
    shortened = sum(episode.steps < episode.file_steps for episode in episodes)
    if shortened:
        notes.append(
            f"{shortened:,} of {num} episodes have no observation after their last "
            "action: that step is left out and its reward given to the step before, so that "
            "returns stay."
        )
    unrewarded = sum(not episode.rewarded for episode in episodes)
    if options.success_reward is not None:
        reward = f"{options.success_reward:g}"
        notes.append(f"The file's rewards are replaced by {reward} at the end of successes.")
        if unrewarded:
            notes.append(
                f"{unrewarded:,} of {num} episodes do not say whether they succeeded: their "
                "rewards stay unknown. --assume-success takes them for successes."
            )
    elif unrewarded:
        notes.append(
            "If the episodes without rewards all succeeded, --assume-success --success-reward 1 "
            "says so."
        )
    return notes
