"""Readers of demonstration files: robomimic, LIBERO and Minari, in one form.

An episode of T steps has observations {name: [T + 1, ...]}, actions [T, n] and rewards [T]. One is
read at a time. Where a file has no observation after the last action, that action is left out
and its reward goes to the step before, so that every return stays. (To repeat the last
observation instead would mark the end of every demonstration by a step that changes nothing: a
reward model that sees s - s' would learn this mark and nothing else.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from etude.datasets.hdf5 import NAME, Guarded
from etude.datasets.summary import Array, DataError, Described, Field

_MOST_DEPTH, _MOST_ARRAYS = 4, 64
_MOST_SMALL = 64 << 20
"""Bytes of an array that is read to describe an episode: actions, rewards, flags."""


@dataclass(frozen=True)
class Options:
    """What is asked of a reader."""

    obs: tuple[str, ...] = ()
    """Observations to read; () for all."""
    mask: str | None = None
    """Read only the episodes that this mask of a robomimic file lists."""
    success_reward: float | None = None
    """Given at the end of every success instead of the file's rewards; None keeps these."""
    assume_success: bool = False
    """Whether episodes that do not say how they ended count as successes."""
    episode_bytes: int = 2 << 30
    """No episode may need more memory."""


@dataclass
class Episode:
    """One episode, read."""

    name: str
    obs: dict[str, Array]
    actions: Array
    rewards: Array
    terminated: bool


@dataclass(frozen=True)
class Parts:
    """The arrays of one episode in the file, checked and not yet read."""

    obs: dict[str, Any]
    following: dict[str, Any] | None
    """Next observations; None where there are none, or where `obs` has one row more."""
    actions: Any
    steps: int
    """Steps as imported."""
    file_steps: int


class Source(ABC):
    """An open file of episodes."""

    format = ""
    task = ""
    """What the episodes were to do, in words."""

    def __init__(self, guarded: Guarded, options: Options) -> None:
        self.guarded, self.options = guarded, options
        self.masks: dict[str, int] = {}
        self.names: list[str] = []

    @abstractmethod
    def _open(self, name: str) -> Any:
        """The group of an episode."""

    @abstractmethod
    def _observations(self, group: Any) -> dict[str, Any]:
        """{name: array} of everything that could be an observation, default ones first."""

    @abstractmethod
    def _parts(self, group: Any) -> Parts: ...

    @abstractmethod
    def _end(self, group: Any, parts: Parts) -> tuple[Array | None, bool | None, bool | None]:
        """Rewards [file steps] or None, success or None, terminated or None, as the file says."""

    def describe(self, name: str) -> Described:
        """An episode from its shapes and small arrays; large ones are not read."""
        self.guarded.episode = name
        group = self._open(name)
        parts = self._parts(group)
        rewards, rewarded, success, terminated = self._rewards(group, parts)
        actions = self._numbers(parts.actions, "actions")
        fields = {n: self.guarded.field(d) for n, d in parts.obs.items()}
        fields["actions"] = _action_field(parts.actions, self.guarded)
        self._check_size(parts, fields)
        return Described(
            name=name,
            steps=parts.steps,
            file_steps=parts.file_steps,
            fields=fields,
            total=float(rewards.sum(dtype=np.float64)),
            success=success,
            terminated=terminated,
            rewarded=rewarded,
            largest_action=float(np.abs(actions.astype(np.float64)).max(initial=0.0)),
        )

    def read(self, name: str) -> Episode:
        """A whole episode; a number that is not finite is refused with its place."""
        guarded = self.guarded
        guarded.episode = name
        group = self._open(name)
        parts = self._parts(group)
        rewards, _, _, terminated = self._rewards(group, parts)
        actions = self._numbers(parts.actions, "actions")
        made = guarded.convert(actions, "actions")[: parts.steps]
        made = made.astype(_action_field(parts.actions, guarded).dtype)
        obs = {n: self._with_last(n, dataset, parts) for n, dataset in parts.obs.items()}
        return Episode(name, obs, made, rewards, terminated)

    def _with_last(self, name: str, dataset: Any, parts: Parts) -> Array:
        """[T + 1, ...] of one observation."""
        whole = self.guarded.convert(self.guarded.read(dataset, name), name)
        if parts.following is None:
            return whole
        last = self.guarded.convert(np.asarray(parts.following[name][-1:]), name)
        return np.concatenate([whole, last])

    def _rewards(self, group: Any, parts: Parts) -> tuple[Array, bool, bool | None, bool]:
        """Rewards [T] float32 as imported, whether they are known, success, and termination.

        Unknown rewards are zeros. Unknown success is None. An episode that does not say how it
        ended was truncated: its recording stopped, and nothing tells that the task did.
        """
        given, success, terminated = self._end(group, parts)
        if success is None and self.options.assume_success:
            success = True
        worth, rewards = self.options.success_reward, np.zeros(parts.steps, np.float32)
        known = given is not None if worth is None else success is not None
        if worth is not None:
            rewards[-1] = worth if success else 0.0
        elif given is not None:
            rewards = self.guarded.convert(given, "rewards")[:, 0].astype(np.float32)
            if parts.steps < parts.file_steps:
                rewards[-2] += rewards[-1]
                rewards = rewards[:-1]
        return rewards, known, success, bool(terminated)

    def _numbers(self, dataset: Any, label: str) -> Array:
        """A small array."""
        if dataset.nbytes > _MOST_SMALL:
            raise self.guarded.refuse(label, f"has {dataset.nbytes:,} bytes, which is absurd")
        return self.guarded.read(dataset, label)

    def _small(self, group: Any, name: str, steps: int) -> Array | None:
        """[steps] of a small array, or None without it."""
        dataset = self.guarded.array(group, name)
        if dataset is None:
            return None
        if dataset.shape not in ((steps,), (steps, 1)):
            raise self.guarded.refuse(
                name, f"has the shape {dataset.shape} beside {steps:,} actions; the file is damaged"
            )
        return self._numbers(dataset, name).reshape(steps)

    def _chosen(self, group: Any) -> dict[str, Any]:
        """The observations that are read: those asked for, or all."""
        known = self._observations(group)
        wanted = self.options.obs or [n for n in known if not n.startswith("states")]
        if not wanted:
            wanted = list(known)
        if not wanted:
            raise DataError(self.guarded.path, "has no observations", self.guarded.episode)
        if missing := [name for name in wanted if name not in known]:
            raise DataError(
                self.guarded.path,
                f"has no observation '{missing[0]}'; it has {', '.join(known) or 'none'}",
                self.guarded.episode,
            )
        for name in wanted:
            self.guarded.check(known[name], name)
        return {name: known[name] for name in wanted}

    def _collect(self, group: Any, prefix: str = "", depth: int = _MOST_DEPTH) -> dict[str, Any]:
        """{name: array} of a group and the groups in it, whose names are joined by dots."""
        if not depth:
            raise self.guarded.refuse(str(group.name), "is nested too deeply")
        found: dict[str, Any] = {}
        for name in self.guarded.names(group):
            full = f"{prefix}{name}"
            if not NAME.fullmatch(full):
                raise self.guarded.refuse(full, "is no name for an observation; rename it")
            member = self.guarded.child(group, name)
            if isinstance(member, h5py.Group):
                found |= self._collect(member, f"{full}.", depth - 1)
            else:
                found[full] = member
            if len(found) > _MOST_ARRAYS:
                raise self.guarded.refuse(str(group.name), f"has over {_MOST_ARRAYS} arrays")
        return found

    def _check_size(self, parts: Parts, fields: dict[str, Field]) -> None:
        size = sum(
            (parts.steps + 1) * int(np.prod(f.shape, dtype=np.float64)) * np.dtype(f.dtype).itemsize
            for f in fields.values()
        )
        if size > self.options.episode_bytes:
            raise DataError(
                self.guarded.path,
                f"needs {size:,} bytes of memory; raise --memory, or read fewer arrays (--obs)",
                self.guarded.episode,
            )


def sparse_success(rewards: Array | None) -> bool | None:
    """Whether an episode succeeded, where rewards are 0 until it does and 1 from then on."""
    if rewards is None or not np.isin(rewards, (0, 1)).all():
        return None
    if len(rewards) > 1 and rewards[0] == 1:  # a reward for every step that is survived
        return None
    return bool((rewards == 1).any())


def _action_field(dataset: Any, guarded: Guarded) -> Field:
    found = guarded.field(dataset)
    return Field(found.shape, "float32" if found.dtype.startswith("float") else "int64")
