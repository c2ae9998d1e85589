"""What is known of a dataset from its small numbers.

Nothing here loads h5py or torch: the process that opens strangers' files starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import EtudeError

Array = np.ndarray[Any, Any]


class DataError(EtudeError):
    """A dataset that cannot be used: one sentence with the file, the place in it and the fix."""

    def __init__(self, path: Path | str, what: str, episode: str | None = None) -> None:
        place = f" at {episode}" if episode else ""
        sentence = f"{path}{place}: {what.rstrip('.')}."
        # A name from a stranger's file may hold line breaks, or orders to a terminal.
        super().__init__("".join(c if c.isprintable() else "?" for c in sentence))
        self.path, self.episode, self.what = str(path), episode, what


@dataclass(frozen=True)
class Field:
    """One named array of a step: shape without the time axis, and dtype as it is stored here."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Described:
    """One episode as it would be imported, from its shapes and its small arrays."""

    name: str
    steps: int
    file_steps: int
    """Steps in the file: one more where the last has no next observation and is left out."""
    fields: Mapping[str, Field]
    """Observations by name, and "actions"."""
    total: float
    """The return."""
    success: bool | None
    """None where neither rewards nor infos say."""
    terminated: bool
    rewarded: bool
    """Whether the file has rewards; else the return is the success reward."""
    largest_action: float
    num_clipped: int
    """Numbers of the actions that are outside the range they are cut to."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Described:
        fields = {n: Field(tuple(f["shape"]), f["dtype"]) for n, f in document["fields"].items()}
        return cls(**{**document, "fields": fields})


@dataclass
class Summary:
    """A dataset without its large arrays."""

    path: Path
    format: str
    notes: list[str] = field(default_factory=list)
    """What a reader did or would do that is not plain from the file; whole sentences."""
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
    def num_steps(self) -> int:
        return sum(episode.steps for episode in self.episodes)

    @property
    def num_file_steps(self) -> int:
        return sum(episode.file_steps for episode in self.episodes)

    @property
    def num_successes(self) -> int | None:
        """None where it cannot be told of every episode."""
        known = [episode.success for episode in self.episodes]
        return None if None in known else sum(map(bool, known))

    @property
    def fields(self) -> dict[str, Field]:
        """Of the first episode; the others must have the same."""
        return dict(self.episodes[0].fields) if self.episodes else {}

    def check_alike(self) -> None:
        """Refuse episodes whose arrays are not those of the first."""
        for episode in self.episodes:
            if episode.fields != self.fields:
                names = sorted(self.fields.keys() | episode.fields.keys())
                name = next(n for n in names if self.fields.get(n) != episode.fields.get(n))
                here, first = episode.fields.get(name), self.fields.get(name)
                raise DataError(
                    self.path,
                    f"'{name}' is {here or 'missing'} here and {first or 'missing'} in "
                    f"{self.episodes[0].name}; choose arrays all episodes share with --obs",
                    episode.name,
                )
