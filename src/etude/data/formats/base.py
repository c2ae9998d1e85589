"""Dataset formats: what a format defines, and how its episodes become those of a dataset.

A format is a kind, a config class that recognises, reads and writes files of another system. Its
fields are the options of `etude data export --format KIND`. `recognise` and `read` are called in a
subprocess with memory and time limits (`opening.py`), since the files are untrusted.

An episode of T steps has observations [T + 1, ...], actions [T, n] and rewards [T]. If a file has
no observation after the last action, that action is left out and its reward is added to the step
before, so that the return stays the same. (If the last observation were repeated instead, every
demonstration would end with a step that changes nothing, and a reward model that sees s - s' would
learn to recognise that step.)
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.config import Config
from etude.core.contracts import Array, ArraySpec
from etude.core.errors import EtudeError, UsageError
from etude.core.registry import Registry

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Valid names of observations."""
_MAX_DIMENSIONS = 7
_MAX_SENTENCE = 1000
_STORED = {
    "float64": "float32",
    "float32": "float32",
    "float16": "float16",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}
"""{dtype in a file: dtype in a dataset}; others are the same, such as uint8 of images."""


class DataError(EtudeError):
    """A dataset that cannot be used: one sentence with the file, the place in it and the fix."""

    def __init__(self, path: Path | str, what: str, episode: str | None = None) -> None:
        place = f" at {episode}" if episode else ""
        super().__init__(f"{path}{place}: {what.rstrip('.')}.")
        self.path, self.episode, self.what = str(path), episode, what


@dataclass(frozen=True)
class LazyArray:
    """An array of a file that is loaded when it is needed."""

    shape: tuple[int, ...]
    """With the time axis first."""
    dtype: np.dtype[Any]
    load: Callable[[], Array]
    check: Callable[[], None] = lambda: None
    """Raises `DataError` if the array should not be loaded; called before `load`."""

    @classmethod
    def of(cls, array: Array | LazyArray) -> LazyArray:
        """An array as a lazy one."""
        return array if isinstance(array, LazyArray) else cls(array.shape, array.dtype, array.copy)


@dataclass
class FileEpisode:
    """One episode as a file has it; what a file does not say is None."""

    obs: Mapping[str, Array | LazyArray]
    """[T + 1, ...] of each observation, or [T, ...] without the one after the last action."""
    actions: Array
    """[T, ...]."""
    rewards: Array | None = None
    """[T]."""
    terminated: bool | None = None
    """Whether the task ended the episode. Unknown counts as truncated: the recording stopped."""
    success: bool | None = None
    """Unknown is taken from rewards that are 0 until the success and 1 from then on."""
    task: str = ""
    """The task in words, if episodes differ in it."""
    last_obs: Mapping[str, Array | LazyArray] = field(default_factory=dict)
    """[1, ...]: what came after the last action, of observations that `obs` has [T, ...] of."""


class DatasetReader(ABC):
    """An open dataset of another system."""

    title = ""
    """The name of the format, for people."""
    task = ""
    """The task of all episodes, in words."""
    max_bytes = 2 << 30
    """Memory that one episode may take."""

    def __init__(
        self, path: Path, names: Sequence[str], masks: Mapping[str, Collection[str]] | None = None
    ) -> None:
        """names: of all episodes. masks: {name of a subset: names of its episodes}."""
        self.path, self.names, self.masks = path, names, masks or {}

    @abstractmethod
    def episode(self, name: str) -> FileEpisode:
        """One episode; large arrays should be lazy, since it is also opened to describe it."""

    def default_observations(self, names: Sequence[str]) -> Sequence[str]:
        """The observations that are read if none are chosen."""
        return names

    def chosen_names(self, mask: str | None) -> Sequence[str]:
        """The names of all episodes, or of those in a mask."""
        if mask is None:
            return self.names
        if mask not in self.masks:
            known = ", ".join(self.masks)
            fix = f"it has {known}" if known else "leave out --mask"
            raise DataError(self.path, f"has no mask '{mask}'; {fix}")
        members = set(self.masks[mask])
        return [name for name in self.names if name in members]


@dataclass
class Episode:
    """One episode: obs {name: [T + 1, ...]}, actions [T, n], rewards [T] float32."""

    name: str
    obs: dict[str, Array]
    actions: Array
    rewards: Array
    terminated: bool
    task: str = ""
    success: bool | None = None


@dataclass(frozen=True)
class ExportedDataset:
    """A dataset that is written in another format."""

    name: str
    observations: Mapping[str, ArraySpec]
    actions: ArraySpec
    num_steps: int
    tasks: Sequence[str]
    """[episodes] sentences; "" where unknown."""
    successes: Sequence[bool | None]
    """[episodes]; None where unknown."""
    rewarded: Sequence[bool]
    """[episodes]: whether rewards are known; unknown ones are zeros."""
    episodes: Callable[[], Iterator[Episode]]
    """Iterates over the episodes once, and reports progress."""


class DatasetFormat(Config):
    """The base of every dataset format; `kind` is its name on the command line."""

    kind: str

    @abstractmethod
    def recognise(self, path: Path) -> bool:
        """Whether a file or folder is in this format, judged by names and first bytes."""

    @abstractmethod
    def read(self, path: Path) -> DatasetReader:
        """Open a file or folder; raises `DataError` if it is damaged."""

    def write(self, data: ExportedDataset, folder: Path) -> list[str]:
        """Write a dataset into an empty folder; returns a sentence for everything that is lost."""
        raise UsageError(f"The format {self.kind} can only be read: choose another --format.")


FORMATS: Registry[DatasetFormat] = Registry("format", "etude.data.formats.base:DatasetFormat")


def check_format(kind: str | None) -> None:
    """Refuse a format that does not exist; None is any format."""
    if kind is not None and not FORMATS.has(kind):
        known = ", ".join(FORMATS.names())
        raise UsageError(f"There is no dataset format '{kind}': --format is one of {known}.")


def open_reader(path: Path, kind: str | None = None) -> DatasetReader:
    """Open a dataset in a format, or in the first format that recognises it."""
    if not path.is_dir() and not path.is_file():
        raise DataError(path, "is not a plain file; name a file or a folder")
    if kind is not None:
        return FORMATS.make(kind).read(path)
    for name in FORMATS.names():
        each = FORMATS.make(name)
        if each.recognise(path):
            return each.read(path)
    if path.is_dir() and (inside := min(path.glob("*.hdf5"), default=None)):
        raise DataError(path, f"is a folder of HDF5 files; name the files, for example {inside}")
    raise DataError(
        path,
        f"is in none of the formats {', '.join(FORMATS.names())}; if it is damaged, get a whole "
        "copy, otherwise convert it or name its format (--format)",
    )


# Episodes of files become episodes of a dataset.


@dataclass(frozen=True)
class ReadOptions:
    """Choice of episodes and observations of a file, and its rewards."""

    obs: tuple[str, ...] = ()
    """Observations to read; () for all."""
    mask: str | None = None
    """Read only the episodes of this mask."""
    success_reward: float | None = None
    """Reward of the last step of successes, instead of the file's rewards; None keeps those."""
    assume_success: bool = False
    """Whether episodes of unknown success count as successes."""


@dataclass(frozen=True)
class Field:
    """One array of a step: shape without the time axis, and dtype in a dataset."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array | LazyArray) -> Field:
        """The field that an array [T, ...] of a file becomes."""
        name = array.dtype.newbyteorder("=").name
        return cls(tuple(array.shape[1:]) or (1,), _STORED.get(name, name))

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Described:
    """One episode as it would be imported, from shapes and small arrays."""

    name: str
    steps: int
    file_steps: int
    """Steps in the file: one more if the last step has no next observation."""
    fields: Mapping[str, Field]
    """Observations by name, and "actions"."""
    total: float
    """The return."""
    success: bool | None
    """None where neither rewards nor infos say."""
    terminated: bool
    rewarded: bool
    """Whether its rewards are known; unknown ones are imported as zeros."""
    largest_action: float
    task: str = ""
    """The task in words; "" where the whole file has one task."""

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Described:
        fields = {n: Field(tuple(f["shape"]), f["dtype"]) for n, f in document["fields"].items()}
        return cls(**{**document, "fields": fields})


@dataclass
class OpenEpisode:
    """One episode of a reader, with the chosen observations; large arrays are not loaded yet."""

    reader: DatasetReader
    name: str
    options: ReadOptions
    file: FileEpisode = field(init=False)

    def __post_init__(self) -> None:
        self.file = self.reader.episode(self.name)
        check_array(self.reader.path, "actions", self.file.actions)
        self._file_steps = len(self.file.actions)
        self._obs = self._chosen()
        self._last = self._last_of(self._obs)
        rows = next(iter(self._obs.values())).shape[0]
        self._steps = self._file_steps - (rows == self._file_steps and not self._last)
        if self._steps < 1:
            raise self._error(f"'actions' has {self._file_steps} steps, too few for an episode")
        actions = Field.of(self.file.actions)
        kind = "float32" if actions.dtype.startswith("float") else "int64"
        self._actions = Field(actions.shape, kind)
        self._rewards, self._rewarded, self._success = self._settle_rewards()

    def _error(self, what: str) -> DataError:
        return DataError(self.reader.path, what, self.name)

    def _chosen(self) -> dict[str, LazyArray]:
        """The observations that are read, checked."""
        known = dict(self.file.obs)
        for name in known:
            if not _NAME.fullmatch(name):
                raise self._error(f"'{name}' is not a valid name for an observation; rename it")
        wanted = self.options.obs or self.reader.default_observations([*known])
        if not wanted:
            raise self._error("has no observations")
        if missing := [name for name in wanted if name not in known]:
            has = ", ".join(known) or "none"
            raise self._error(f"has no observation '{missing[0]}'; it has {has}")
        chosen = {name: LazyArray.of(known[name]) for name in wanted}
        rows = {self._file_steps, self._file_steps + 1}
        for name, array in chosen.items():
            array.check()
            check_array(self.reader.path, name, array)
            if array.shape[0] not in rows:
                raise self._error(
                    f"'{name}' has {array.shape[0]:,} rows beside {self._file_steps:,} actions"
                )
            rows = {array.shape[0]}  # all others must have as many
        return chosen

    def _last_of(self, obs: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """[1, ...] of what came after the last action; {} unless all observations have it."""
        last = self.file.last_obs
        if any(n not in last or last[n].shape != (1, *a.shape[1:]) for n, a in obs.items()):
            return {}
        found = {name: LazyArray.of(last[name]) for name in obs}
        for name, array in found.items():
            array.check()
            check_array(self.reader.path, f"next {name}", array)
        return found

    def _settle_rewards(self) -> tuple[Array, bool, bool | None]:
        """Rewards [steps] float32 as imported, whether they are known, and success."""
        given, success = self.file.rewards, self.file.success
        if given is not None:
            if given.shape not in ((self._file_steps,), (self._file_steps, 1)):
                raise self._error(
                    f"'rewards' has the shape {given.shape} beside {self._file_steps:,} actions; "
                    "the file is damaged"
                )
            given = self._convert(given, "rewards")[:, 0]
        if success is None:
            success = sparse_success(given)
        if success is None and self.options.assume_success:
            success = True
        rewards = np.zeros(self._steps, np.float32)
        if self.options.success_reward is not None:
            rewards[-1] = self.options.success_reward if success else 0.0
            return rewards, success is not None, success
        if given is None:
            return rewards, False, success
        rewards = given.astype(np.float32)
        if self._steps < self._file_steps:
            rewards[-2] += rewards[-1]
            rewards = rewards[:-1]
        return rewards, True, success

    def _convert(self, array: Array, label: str) -> Array:
        """An array [T, ...] in the dtype of a dataset, one column for plain numbers; all finite."""
        with np.errstate(over="ignore"):
            made = np.ascontiguousarray(array, dtype=Field.of(array).dtype)
        made = made.reshape(made.shape if made.ndim > 1 else (len(made), 1))
        if made.dtype.kind == "f" and not np.isfinite(made).all():
            step = int(np.argmin(np.isfinite(made).reshape(len(made), -1).all(axis=1)))
            raise self._error(
                f"'{label}' is not a finite number at step {step:,}; correct or leave out this "
                "episode"
            )
        return made

    def describe(self) -> Described:
        """The episode without its large arrays."""
        fields = {name: Field.of(array) for name, array in self._obs.items()}
        fields["actions"] = self._actions
        size = (self._steps + 1) * sum(
            int(np.prod(f.shape, dtype=np.float64)) * np.dtype(f.dtype).itemsize
            for f in fields.values()
        )
        if size > self.reader.max_bytes:
            raise self._error(
                f"needs {size:,} bytes of memory; raise --memory, or read fewer arrays (--obs)"
            )
        return Described(
            name=self.name,
            steps=self._steps,
            file_steps=self._file_steps,
            fields=fields,
            total=float(self._rewards.sum(dtype=np.float64)),
            success=self._success,
            terminated=bool(self.file.terminated),
            rewarded=self._rewarded,
            largest_action=float(np.abs(self.file.actions.astype(np.float64)).max(initial=0.0)),
            task=one_line(self.file.task),
        )

    def read(self) -> Episode:
        """The whole episode."""
        actions = self._convert(self.file.actions, "actions")[: self._steps]
        obs = {name: self._convert(array.load(), name) for name, array in self._obs.items()}
        for name, array in self._last.items():
            obs[name] = np.concatenate([obs[name], self._convert(array.load(), name)])
        return Episode(
            self.name,
            obs,
            actions.astype(self._actions.dtype),
            self._rewards,
            bool(self.file.terminated),
        )


def check_array(path: Path, label: str, array: Any) -> None:
    """Refuse an array that does not hold plain numbers, one row per step; nothing is loaded."""
    kind, shape = array.dtype, array.shape
    if kind.kind not in "fiub" or kind.itemsize > 8 or kind.subdtype is not None:
        raise DataError(
            path, f"'{label}' holds {kind} values, not plain numbers; leave it out (--obs)"
        )
    if not shape or len(shape) > _MAX_DIMENSIONS:
        raise DataError(path, f"'{label}' has the shape {shape}, not one row per step")


def sparse_success(rewards: Array | None) -> bool | None:
    """Whether an episode succeeded, if rewards are 0 until the success and 1 from then on."""
    if rewards is None or not np.isin(rewards, (0, 1)).all():
        return None
    if len(rewards) > 1 and rewards[0] == 1:  # a reward for every step that is survived
        return None
    return bool((rewards == 1).any())


def one_line(text: str) -> str:
    """One line of printable characters, at most 1,000."""
    text = " ".join(text.split())[:_MAX_SENTENCE]
    return "".join(c if c.isprintable() else "?" for c in text)


def in_words(name: str) -> str:
    """A file's name as words: names of LIBERO's files are sentences."""
    return one_line(name.removesuffix("_demo").replace("_", " "))


def error_line(error: BaseException) -> str:
    """An error's text on one line."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
