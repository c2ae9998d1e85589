"""What is known of a dataset from its small numbers.

Nothing here loads h5py or torch: the process that opens strangers' files starts with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import EtudeError

Array = np.ndarray[Any, Any]
_MOST_SENTENCE = 1000


class DataError(EtudeError):
    """A dataset that cannot be used: one sentence with the file, the place in it and the fix."""

    def __init__(self, path: Path | str, what: str, episode: str | None = None) -> None:
        place = f" at {episode}" if episode else ""
        super().__init__(f"{path}{place}: {what.rstrip('.')}.")
        self.path, self.episode, self.what = str(path), episode, what


@dataclass(frozen=True)
class ReadOptions:
    """What is read of a file."""

    obs: tuple[str, ...] = ()
    """Observations to read; () for all."""
    mask: str | None = None
    """Read only the episodes that this mask of a robomimic file lists."""
    success_reward: float | None = None
    """Given at the end of every success instead of the file's rewards; None keeps these."""
    assume_success: bool = False
    """Whether episodes that do not say how they ended count as successes."""


@dataclass
class Episode:
    """One episode: obs {name: [T + 1, ...]}, actions [T, n], rewards [T] float32."""

    name: str
    obs: dict[str, Array]
    actions: Array
    rewards: Array
    terminated: bool


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
    """Whether its rewards are known; unknown ones are imported as zeros."""
    largest_action: float
    task: str = ""
    """What this episode was to do, in words; "" where the whole file has one task."""

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Described:
        fields = {n: Field(tuple(f["shape"]), f["dtype"]) for n, f in document["fields"].items()}
        return cls(**{**document, "fields": fields})


@dataclass
class Summary:
    """A dataset without its large arrays."""

    path: Path
    format: str
    task: str = ""
    """What its episodes were to do, in words."""
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
    def num_file_steps(self) -> int:
        return sum(episode.file_steps for episode in self.episodes)

    @property
    def num_successes(self) -> int | None:
        """None where the success of an episode is unknown."""
        known = [episode.success for episode in self.episodes]
        return None if None in known else sum(map(bool, known))

    @property
    def fields(self) -> dict[str, Field]:
        """Of the first episode."""
        return dict(self.episodes[0].fields) if self.episodes else {}


def shared_fields(
    summaries: Sequence[Summary], wanted: Collection[str] = ()
) -> tuple[dict[str, Field], list[str]]:
    """The arrays that are the same size in all episodes of all files, and the names of the others.

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
                    f"{summaries[0].episodes[0].name} of {summaries[0].path}; put them into "
                    "datasets of their own",
                    episode.name,
                )
    shared = {name: field for name, field in first.items() if name not in others}
    if len(shared) < 2:
        raise DataError(
            summaries[0].path,
            "shares no observation with all other episodes; import fewer files together",
        )
    return shared, sorted(others)


def sparse_success(rewards: Array | None) -> bool | None:
    """Whether an episode succeeded, where rewards are 0 until it does and 1 from then on."""
    if rewards is None or not np.isin(rewards, (0, 1)).all():
        return None
    if len(rewards) > 1 and rewards[0] == 1:  # a reward for every step that is survived
        return None
    return bool((rewards == 1).any())


def settled_rewards(
    given: Array | None, success: bool | None, steps: int, file_steps: int, options: ReadOptions
) -> tuple[Array, bool, bool | None]:
    """Rewards [steps] float32 as imported, whether they are known, and success.

    given: the file's, [file steps]. Where its last step is left out, that step's reward goes to the
    one before.
    """
    if success is None and options.assume_success:
        success = True
    at_success, rewards = options.success_reward, np.zeros(steps, np.float32)
    known = given is not None if at_success is None else success is not None
    if at_success is not None:
        rewards[-1] = at_success if success else 0.0
    elif given is not None:
        rewards = given.astype(np.float32)
        if steps < file_steps:
            rewards[-2] += rewards[-1]
            rewards = rewards[:-1]
    return rewards, known, success


def plain(text: str) -> str:
    """One line of printable characters."""
    text = " ".join(text.split())[:_MOST_SENTENCE]
    return "".join(c if c.isprintable() else "?" for c in text)
