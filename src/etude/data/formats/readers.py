"""Readers of demonstration files: robomimic, LIBERO and Minari, in one form.

An episode of T steps has observations {name: [T + 1, ...]}, actions [T, n] and rewards [T]. One is
read at a time. Where a file has no observation after the last action, that action is left out
and its reward goes to the step before, so that every return stays. (To repeat the last
observation instead would mark the end of every demonstration by a step that changes nothing: a
reward model that sees s - s' would learn this mark and nothing else.)
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from etude.data.formats.hdf5 import NAME, Guarded
from etude.data.formats.lerobot import INFO, LeRobot
from etude.data.formats.summary import (
    Array,
    DataError,
    Described,
    Episode,
    Field,
    ReadOptions,
    plain,
    settled_rewards,
    sparse_success,
)

_MOST_DEPTH, _MOST_ARRAYS = 4, 64
_MOST_SMALL = 64 << 20
"""Bytes of an array that is read to describe an episode: actions, rewards, flags."""
MAIN_FILE = Path("data") / "main_data.hdf5"
"""Where Minari keeps a dataset's episodes."""
_MOST_NAME = 64
_LIBERO = ("problem_info", "bddl_file_name")


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
    max_bytes = 2 << 30
    """Memory that an episode may take."""
    task = ""
    """What the episodes were to do, in words."""

    def __init__(self, guarded: Guarded, parent: Any, prefix: str, options: ReadOptions) -> None:
        """`parent`: the group of groups, one per episode, whose names begin with `prefix`."""
        self.guarded, self.options, self._parent = guarded, options, parent
        self.masks: dict[str, int] = {}
        self.names = [name for name in guarded.names(parent) if name.startswith(prefix)]

    @property
    def episode(self) -> str | None:
        """The episode that is being read, for messages."""
        return self.guarded.episode

    def _open(self, name: str) -> tuple[Any, Parts]:
        """The group of an episode, and its arrays."""
        self.guarded.episode = name
        group = self.guarded.group(self._parent, name)
        if group is None:
            raise self.guarded.refuse(name, "is not a group")
        return group, self._parts(group)

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
        group, parts = self._open(name)
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
        guarded, (group, parts) = self.guarded, self._open(name)
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
        ended was truncated: its recording stopped, and whether the task had ended is unknown.
        """
        given, success, terminated = self._end(group, parts)
        given = None if given is None else self.guarded.convert(given, "rewards")[:, 0]
        rewards, known, success = settled_rewards(
            given, success, parts.steps, parts.file_steps, self.options
        )
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
        wanted = self.options.obs or [n for n in known if not n.startswith("states")] or list(known)
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
        if size > self.max_bytes:
            raise DataError(
                self.guarded.path,
                f"needs {size:,} bytes of memory; raise --memory, or read fewer arrays (--obs)",
                self.guarded.episode,
            )


def _action_field(dataset: Any, guarded: Guarded) -> Field:
    found = guarded.field(dataset)
    return Field(found.shape, "float32" if found.dtype.startswith("float") else "int64")


class Demonstrations(Source):
    """robomimic and LIBERO: `data/demo_<n>` with actions, obs, next_obs, states, rewards, dones."""

    format = "robomimic"

    def __init__(self, guarded: Guarded, options: ReadOptions, data: Any) -> None:
        super().__init__(guarded, data, "demo", options)
        if not self.names:
            raise guarded.refuse("data", "has no group demo_0, demo_1, ...; is this robomimic's?")
        if any(name in data.attrs for name in _LIBERO):
            self.format = "LIBERO"
        self.task = _instruction(guarded.text(data, "problem_info")) or _words(guarded.path.stem)
        masks = self._read_masks()
        self.masks = {name: len(members) for name, members in masks.items()}
        if options.mask is not None:
            if options.mask not in masks:
                known = ", ".join(masks) or "none"
                raise DataError(guarded.path, f"has no mask '{options.mask}'; it has {known}")
            members = masks[options.mask]
            self.names = [name for name in self.names if name in members]

    def _read_masks(self) -> dict[str, set[str]]:
        """The lists of episodes in the group `mask`; only fixed-size text is read."""
        group = self.guarded.group(self.guarded.root, "mask")
        masks: dict[str, set[str]] = {}
        for name in self.guarded.names(group) if group is not None else ():
            member = self.guarded.child(group, name)
            if not isinstance(member, h5py.Dataset) or member.dtype.kind != "S":
                continue
            self.guarded.check_storage(member, f"mask/{name}")
            if member.dtype.itemsize <= _MOST_NAME and member.size <= len(self.names):
                texts = self.guarded.read(member, name).reshape(-1).tolist()
                masks[name] = {text.decode("ascii", "replace") for text in texts}
        return masks

    def _observations(self, group: Any) -> dict[str, Any]:
        obs = self.guarded.group(group, "obs")
        found = {} if obs is None else self._collect(obs)
        states = self.guarded.child(group, "states")
        return found | ({} if states is None else {"states": states})

    def _parts(self, group: Any) -> Parts:
        obs = self._chosen(group)
        actions = self.guarded.array(group, "actions")
        if actions is None:
            raise self.guarded.refuse("actions", "is missing: without them there is no episode")
        steps = len(actions)
        following = self._next(group, obs)
        if steps < 1 or (steps < 2 and following is None):
            raise self.guarded.refuse("actions", f"has {steps} steps, too few for an episode")
        for name, dataset in [*obs.items(), *(following or {}).items()]:
            if len(dataset) != steps:
                raise self.guarded.refuse(
                    name, f"has {len(dataset):,} rows beside {steps:,} actions"
                )
        return Parts(obs, following, actions, steps - (following is None), steps)

    def _next(self, group: Any, obs: dict[str, Any]) -> dict[str, Any] | None:
        """The next observations, if there are any for all that are read."""
        found = self.guarded.group(group, "next_obs")
        known = {} if found is None else self._collect(found)
        if any(n not in known or known[n].shape != d.shape for n, d in obs.items()):
            return None
        for name in obs:
            self.guarded.check(known[name], f"next_obs/{name}")
        return {name: known[name] for name in obs}

    def _end(self, group: Any, parts: Parts) -> tuple[Array | None, bool | None, bool | None]:
        rewards = self._small(group, "rewards", parts.file_steps)
        dones = self._small(group, "dones", parts.file_steps)
        return rewards, sparse_success(rewards), None if dones is None else bool(dones[-1])


class Minari(Source):
    """`episode_<n>` with observations (one more than actions), rewards, and how it ended."""

    format = "Minari"

    def __init__(self, guarded: Guarded, options: ReadOptions) -> None:
        super().__init__(guarded, guarded.root, "episode_", options)
        if options.mask is not None:
            raise DataError(guarded.path, "has no masks, being Minari's; leave out --mask")
        folder = guarded.path.parent.parent if guarded.path.name == MAIN_FILE.name else None
        self.task = _words(guarded.path.stem if folder is None else folder.name)

    def _observations(self, group: Any) -> dict[str, Any]:
        found = self.guarded.child(group, "observations")
        if isinstance(found, h5py.Group):
            return self._collect(found)
        return {} if found is None else {"state": found}

    def _parts(self, group: Any) -> Parts:
        obs = self._chosen(group)
        actions = self.guarded.array(group, "actions")
        if actions is None or len(actions) < 1:
            raise self.guarded.refuse("actions", "is missing or empty; the file is damaged")
        for name, dataset in obs.items():
            if len(dataset) != len(actions) + 1:
                raise self.guarded.refuse(
                    name, f"has {len(dataset):,} rows, not one more than {len(actions):,} actions"
                )
        return Parts(obs, None, actions, len(actions), len(actions))

    def _end(self, group: Any, parts: Parts) -> tuple[Array | None, bool | None, bool | None]:
        rewards = self._small(group, "rewards", parts.file_steps)
        ended = self._small(group, "terminations", parts.file_steps)
        success = None
        infos = self.guarded.group(group, "infos")
        for name in ("success", "is_success") if infos is not None else ():
            found = self.guarded.child(infos, name)
            if isinstance(found, h5py.Dataset) and found.ndim == 1 and success is None:
                self.guarded.check(found, name)
                success = bool(self._numbers(found, name).any())
        if success is None:
            success = sparse_success(rewards)
        return rewards, success, None if ended is None else bool(ended[-1])


def _instruction(problem: str | None) -> str:
    """The sentence in LIBERO's description of a problem; "" without one."""
    try:
        found = json.loads(problem or "{}")
    except (ValueError, RecursionError):
        return ""
    said = found.get("language_instruction") if isinstance(found, dict) else None
    if isinstance(said, list):  # some versions keep its words
        said = " ".join(map(str, said))
    return plain(said) if isinstance(said, str) else ""


def _words(stem: str) -> str:
    """A file's name as words: LIBERO's names are sentences."""
    return plain(stem.removesuffix("_demo").replace("_", " "))


def open_source(path: Path, options: ReadOptions) -> Source | LeRobot:
    """Whichever reader fits; a folder is LeRobot's or Minari's."""
    if path.is_dir():
        if (path / INFO).is_file():
            return LeRobot(path, options)
        if not (path / MAIN_FILE).is_file():
            raise DataError(
                path,
                f"has no {MAIN_FILE}, as a Minari folder would, and no {INFO}, as LeRobot's; name "
                "an HDF5 file or such a folder",
            )
        path = path / MAIN_FILE
    guarded = Guarded(path)
    data = guarded.group(guarded.root, "data")
    if data is not None:
        return Demonstrations(guarded, options, data)
    if any(name.startswith("episode_") for name in guarded.names(guarded.root)):
        return Minari(guarded, options)
    raise DataError(
        path,
        "is HDF5 but neither robomimic, LIBERO (data/demo_0) nor Minari (episode_0); convert it "
        "to one of these",
    )
