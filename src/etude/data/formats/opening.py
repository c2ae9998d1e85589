"""Datasets of other systems, opened in a subprocess with memory and time limits.

    with open_dataset(path, "read") as dataset:
        for episode in dataset.episodes(): ...

The files are untrusted. The parent receives only JSON, and arrays whose size it has agreed to,
whatever a file holds. The subprocess runs this module:

    python -P -m etude.data.formats.opening '{"path": ..., "job": "scan" | "check" | "read"}'

`etude.core.limited` describes the protocol and the limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import EtudeError
from etude.core.limited import (
    FrameWriter,
    LimitedProcess,
    Limits,
    ReaderEnded,
    limit_seconds,
    serve,
)
from etude.core.trees import Tree
from etude.data.formats.base import (
    DataError,
    Described,
    Episode,
    Field,
    OpenEpisode,
    ReadOptions,
    check_format,
    error_line,
    one_line,
    open_reader,
)

Job = Literal["scan", "check", "read"]
"""Describe the episodes; also read every number; also send the numbers."""
_CHILD = "etude.data.formats.opening"
_DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32"}
_ADVICE = {
    "slow": "the file is damaged, or raise --seconds",
    "crashed": "the file is damaged, get a whole copy of it",
    "early": "check that the library of its format is installed",
    "broken": "the reader is broken",
}
"""Advice if the subprocess ended, by reason."""


@dataclass
class Summary:
    """A dataset without its large arrays."""

    path: Path
    format: str
    task: str = ""
    """The task of its episodes in words."""
    notes: list[str] = field(default_factory=list)
    """Changes by an import that are not obvious from the file; whole sentences."""
    masks: dict[str, int] = field(default_factory=dict)
    episodes: list[Described] = field(default_factory=list)

    @property
    def lengths(self) -> Array:
        """[episodes] int64."""
        return np.array([episode.steps for episode in self.episodes], np.int64)

    @property
    def returns(self) -> Array:
        """[episodes] float64."""
        return np.array([episode.total for episode in self.episodes], np.float64)

    @property
    def num_file_steps(self) -> int:
        return sum(episode.file_steps for episode in self.episodes)

    @property
    def num_successes(self) -> int | None:
        """None if the success of an episode is unknown."""
        known = [episode.success for episode in self.episodes]
        return None if None in known else sum(map(bool, known))

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of the first episode."""
        return dict(self.episodes[0].fields) if self.episodes else {}


def shared_fields(
    summaries: Sequence[Summary], wanted: Collection[str] = ()
) -> tuple[dict[str, Field], list[str]]:
    """The arrays that have the same size in all episodes of all files, and names of the others.

    Actions, and the observations that are `wanted` by name, must be among the former.
    """
    first, others = summaries[0].fields, set[str]()
    for summary in summaries:
        for episode in summary.episodes:
            names = first.keys() | episode.fields.keys()
            others |= {n for n in names if episode.fields.get(n) != first.get(n)}
            for name in sorted(others.intersection({"actions", *wanted})):
                here, there = episode.fields.get(name), first.get(name)
                raise DataError(
                    summary.path,
                    f"'{name}' is {here or 'missing'} here and {there or 'missing'} in "
                    f"{summaries[0].episodes[0].name} of {summaries[0].path}; import them into "
                    "separate datasets",
                    episode.name,
                )
    shared = {name: field for name, field in first.items() if name not in others}
    if len(shared) < 2:
        raise DataError(
            summaries[0].path,
            "shares no observation with all other episodes; import fewer files together",
        )
    return shared, sorted(others)


def notes_of(episodes: Sequence[Described], options: ReadOptions) -> list[str]:
    """Describe changes by an import that are not obvious from the files."""
    notes, num = [], f"{len(episodes):,}"
    shortened = sum(episode.steps < episode.file_steps for episode in episodes)
    if shortened:
        notes.append(
            f"{shortened:,} of {num} episodes have no observation after their last "
            "action: that step is left out and its reward added to the step before, so that "
            "returns stay the same."
        )
    unrewarded = sum(not episode.rewarded for episode in episodes)
    if options.success_reward is not None:
        reward = f"{options.success_reward:g}"
        notes.append(f"The file's rewards are replaced by {reward} at the end of successes.")
        if unrewarded:
            notes.append(
                f"{unrewarded:,} of {num} episodes do not say whether they succeeded: their "
                "rewards stay unknown. --assume-success counts them as successes."
            )
    elif unrewarded:
        notes.append(
            "If the episodes without rewards all succeeded, --assume-success --success-reward 1 "
            "says so."
        )
    return notes


# The parent.


def scan(
    path: Path,
    options: ReadOptions | None = None,
    limits: Limits | None = None,
    kind: str | None = None,
) -> Summary:
    """A file's content, from its shapes and small arrays."""
    with open_dataset(path, "scan", options, limits, kind=kind) as dataset:
        return dataset.summary


def open_dataset(
    path: Path,
    job: Job,
    options: ReadOptions | None = None,
    limits: Limits | None = None,
    skip: int = 0,
    kind: str | None = None,
    only: int | None = None,
) -> Dataset:
    """Describe all episodes of a file; `episodes` then gives those after the first `skip`.

    kind: the format of the file; None for the first that recognises it. only: the number of one
    episode, to describe and read no other.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(path, "there is no such file or folder; check the path")
    check_format(kind)
    order = {"path": str(path), "job": job, "skip": skip, "kind": kind, "only": only}
    dataset = Dataset(path, order, options or ReadOptions(), limits or Limits())
    try:
        dataset._describe()
    except BaseException:
        dataset.close()
        raise
    return dataset


class Dataset:
    """A file of episodes, as the subprocess that reads it describes it."""

    summary: Summary

    def __init__(self, path: Path, order: Tree, options: ReadOptions, limits: Limits) -> None:
        self.path, self.options, self.limits = path, options, limits
        self._episode: str | None = None
        self._process = LimitedProcess(_CHILD, order | {"options": asdict(options)}, limits)

    def _describe(self) -> None:
        header = self._next()
        self.summary = Summary(self.path, str(header["format"]), str(header["task"]))
        self.summary.masks = dict(header["masks"])
        while (header := self._next())["kind"] != "all described":
            if header["kind"] == "described":
                self.summary.episodes.append(Described.from_json(header["episode"]))
        if not self.summary.episodes:
            raise DataError(self.path, "has no episodes")
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
        """The next header; raises the reader's error, or the reason why it ended."""
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
        for name, dtype, shape in header["arrays"]:
            size = math.prod(shape) * np.dtype(dtype).itemsize if dtype in _DTYPES else left + 1
            left -= size
            if left < 0 or size < 0:
                raise self._failed(f"'{name}' is larger than agreed")
            try:
                data = self._process.read(size)
            except ReaderEnded as error:
                raise self._failed(f"{error.words}; {_ADVICE[error.why]}") from error
            arrays[name] = np.frombuffer(data, dtype).reshape(shape)
        obs = {n.removeprefix("obs/"): a for n, a in arrays.items() if n.startswith("obs/")}
        name, ended = str(header["episode"]), bool(header["terminated"])
        return Episode(name, obs, arrays["actions"], arrays["rewards"], ended)

    def _failed(self, what: str) -> DataError:
        return DataError(self.path, what, self._episode)

    def close(self) -> None:
        """End the subprocess."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The subprocess.


def run(order: dict[str, Any], writer: FrameWriter) -> None:
    """Do what the parent ordered; every failure is sent as one sentence."""
    seconds = float(order["seconds"])
    current: str | None = None
    try:
        limit_seconds(seconds)
        options = ReadOptions(**{**order["options"], "obs": tuple(order["options"]["obs"])})
        reader = open_reader(Path(order["path"]), order.get("kind"))
        reader.max_bytes = int(order["memory"]) // 2
        names = reader.chosen_names(options.mask)
        if (only := order.get("only")) is not None:
            names = names[only : only + 1]
        masks = {name: len(members) for name, members in reader.masks.items()}
        writer.send("source", format=reader.title, task=one_line(reader.task), masks=masks)
        for current in names:
            limit_seconds(seconds)
            writer.send("begin", episode=current)
            described = OpenEpisode(reader, current, options).describe()
            writer.send("described", episode=asdict(described))
        writer.send("all described")
        for current in names[order["skip"] :] if order["job"] != "scan" else ():
            limit_seconds(seconds)
            writer.send("begin", episode=current)
            episode = OpenEpisode(reader, current, options).read()
            if order["job"] == "read":
                _send_episode(writer, episode)
        writer.send("end")
    except DataError as error:
        writer.send("error", episode=error.episode or current, what=error.what)
    except MemoryError:
        writer.send("error", episode=current, what="needs too much memory; raise --memory")
    except EtudeError as error:
        writer.send("error", episode=current, what=str(error))
    except Exception as error:  # HDF5 may fail in any way on a damaged file
        what = f"cannot be read ({error_line(error)}); get a whole copy of the file"
        writer.send("error", episode=current, what=what)


def _send_episode(writer: FrameWriter, episode: Episode) -> None:
    """Send names, dtypes and shapes of an episode's arrays, then their bytes in that order."""
    arrays: dict[str, Array] = {"actions": episode.actions, "rewards": episode.rewards}
    arrays |= {f"obs/{name}": array for name, array in episode.obs.items()}
    shapes = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    data = (array.reshape(-1).view("uint8").data for array in arrays.values())
    writer.send("arrays", data, episode=episode.name, arrays=shapes, terminated=episode.terminated)


if __name__ == "__main__":
    serve(run)
