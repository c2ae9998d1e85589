"""The formats: robomimic and LIBERO demonstrations, and Minari's episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py

from etude.datasets.hdf5 import Guarded
from etude.datasets.readers import Options, Parts, Source, sparse_success
from etude.datasets.summary import Array, DataError

MAIN_FILE = Path("data") / "main_data.hdf5"
"""Where Minari keeps a dataset's episodes."""
_MOST_NAME, _MOST_SENTENCE = 64, 1000
_LIBERO = ("problem_info", "bddl_file_name")


class Demonstrations(Source):
    """robomimic and LIBERO: `data/demo_<n>` with actions, obs, next_obs, states, rewards, dones."""

    format = "robomimic"

    def __init__(self, guarded: Guarded, options: Options, data: Any) -> None:
        super().__init__(guarded, options)
        self._data = data
        self.names = [name for name in guarded.names(data) if name.startswith("demo")]
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

    def _open(self, name: str) -> Any:
        group = self.guarded.group(self._data, name)
        if group is None:
            raise self.guarded.refuse(name, "is not a group")
        return group

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

    def __init__(self, guarded: Guarded, options: Options) -> None:
        super().__init__(guarded, options)
        if options.mask is not None:
            raise DataError(guarded.path, "has no masks, being Minari's; leave out --mask")
        self.names = [n for n in guarded.names(guarded.root) if n.startswith("episode_")]
        folder = guarded.path.parent.parent if guarded.path.name == MAIN_FILE.name else None
        self.task = _words(guarded.path.stem if folder is None else folder.name)

    def _open(self, name: str) -> Any:
        group = self.guarded.group(self.guarded.root, name)
        if group is None:
            raise self.guarded.refuse(name, "is not a group")
        return group

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
    return _plain(said) if isinstance(said, str) else ""


def _words(stem: str) -> str:
    """A file's name as words: LIBERO's names are sentences."""
    return _plain(stem.removesuffix("_demo").replace("_", " "))


def _plain(text: str) -> str:
    """One line of printable characters."""
    text = " ".join(text.split())[:_MOST_SENTENCE]
    return "".join(c if c.isprintable() else "?" for c in text)


def open_source(path: Path, options: Options) -> Source:
    """Whichever reader fits; a folder is Minari's."""
    if path.is_dir():
        if not (path / MAIN_FILE).is_file():
            raise DataError(
                path, f"has no {MAIN_FILE}, as a Minari folder would; name an HDF5 file"
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
