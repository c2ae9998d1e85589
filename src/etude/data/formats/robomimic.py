"""robomimic's and LIBERO's HDF5 files.

    data/demo_<n>    actions, obs/<name>; possibly next_obs/<name>, states, rewards, dones
    mask/<name>      names of the episodes of a subset

Both libraries write the same layout; LIBERO adds the sentence of the task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from etude.core.contracts import Array
from etude.data.formats.base import (
    DataError,
    DatasetFormat,
    DatasetReader,
    ExportedDataset,
    FileEpisode,
    LazyArray,
    in_words,
    one_line,
)
from etude.data.formats.hdf5 import Guarded, HDF5Reader, is_hdf5

_MAX_NAME = 64
_LIBERO = ("problem_info", "bddl_file_name")


class RobomimicFormat(DatasetFormat):
    """robomimic and LIBERO: HDF5 files with data/demo_0, ...; one file per task is written."""

    kind: Literal["robomimic"] = "robomimic"

    def recognise(self, path: Path) -> bool:
        if not is_hdf5(path):
            return False
        guarded = Guarded(path)
        return guarded.group(guarded.root, "data") is not None

    def read(self, path: Path) -> DatasetReader:
        guarded = Guarded(path)
        data = guarded.group(guarded.root, "data")
        names = [] if data is None else guarded.names(data)
        names = [name for name in names if name.startswith("demo")]
        if not names:
            raise DataError(path, "has no group data/demo_0; is it a robomimic file?")
        return RobomimicReader(guarded, data, names)

    def write(self, data: ExportedDataset, folder: Path) -> list[str]:
        tasks = list(dict.fromkeys(data.tasks))
        counts, steps = dict.fromkeys(tasks, 0), dict.fromkeys(tasks, 0)
        with ExitStack() as stack:
            groups = {}
            for number, task in enumerate(tasks):
                words = re.sub(r"[^A-Za-z0-9]+", "_", task).strip("_")[:100] or "all"
                name = (
                    f"{words}_demo.hdf5" if len(tasks) == 1 else f"{number:03d}_{words}_demo.hdf5"
                )
                group = stack.enter_context(h5py.File(folder / name, "w")).create_group("data")
                group.attrs["env_args"] = "{}"
                group.attrs["problem_info"] = json.dumps({"language_instruction": task})
                groups[task] = group
            for episode in data.episodes():
                demo = groups[episode.task].create_group(f"demo_{counts[episode.task]}")
                counts[episode.task] += 1
                steps[episode.task] += len(episode.actions)
                demo.attrs["num_samples"] = len(episode.actions)
                demo["actions"], demo["rewards"] = episode.actions, episode.rewards
                dones: Array = np.zeros(len(episode.actions), np.uint8)
                dones[-1] = episode.terminated
                demo["dones"] = dones
                for name, array in episode.obs.items():
                    packed = {"compression": "gzip"} if array.dtype == np.uint8 else {}
                    demo.create_dataset(f"obs/{name}", data=array[:-1], **packed)
                    demo.create_dataset(f"next_obs/{name}", data=array[1:], **packed)
            for task, group in groups.items():
                group.attrs["total"] = steps[task]
        unknown = any(success is None for success in data.successes)
        return ["These files record success only through their rewards."] if unknown else []


class RobomimicReader(HDF5Reader):
    """An open file of robomimic or LIBERO."""

    def __init__(self, guarded: Guarded, data: Any, names: Sequence[str]) -> None:
        super().__init__(guarded, names, _masks(guarded, len(names)))
        self._data = data
        self.title = "LIBERO" if any(name in data.attrs for name in _LIBERO) else "robomimic"
        self.task = _instruction(guarded.text(data, "problem_info")) or in_words(self.path.stem)

    def episode(self, name: str) -> FileEpisode:
        guarded = self.guarded
        group = guarded.group(self._data, name)
        if group is None:
            raise guarded.error(name, "is not a group")
        actions = guarded.actions(group)
        inside = guarded.group(group, "obs")
        obs = {} if inside is None else guarded.arrays(inside)
        states = guarded.child(group, "states")
        if isinstance(states, h5py.Dataset):
            obs["states"] = guarded.lazy(states, "states")
        dones = guarded.small(group, "dones", len(actions))
        return FileEpisode(
            obs,
            actions,
            guarded.small(group, "rewards", len(actions)),
            terminated=None if dones is None else bool(dones[-1]),
            last_obs=self._last_obs(group, obs),
        )

    def _last_obs(self, group: Any, obs: dict[str, LazyArray]) -> dict[str, LazyArray]:
        """The last of the next observations, where these have as many rows as the observations."""
        inside = self.guarded.group(group, "next_obs")
        following = {} if inside is None else self.guarded.arrays(inside, last=True)
        return {
            name: replace(array, shape=(1, *array.shape[1:]))
            for name, array in following.items()
            if name in obs and array.shape == obs[name].shape
        }


def _masks(guarded: Guarded, num_episodes: int) -> dict[str, set[str]]:
    """The lists of episodes in the group `mask`; only fixed-size text is read."""
    group = guarded.group(guarded.root, "mask")
    masks: dict[str, set[str]] = {}
    for name in guarded.names(group) if group is not None else ():
        member = guarded.child(group, name)
        if not isinstance(member, h5py.Dataset) or member.dtype.kind != "S":
            continue
        guarded.check_storage(member, f"mask/{name}")
        if member.dtype.itemsize <= _MAX_NAME and member.size <= num_episodes:
            texts = guarded.read(member, name).reshape(-1).tolist()
            masks[name] = {text.decode("ascii", "replace") for text in texts}
    return masks


def _instruction(problem: str | None) -> str:
    """The sentence in LIBERO's description of a problem; "" without one."""
    try:
        found = json.loads(problem or "{}")
    except (ValueError, RecursionError):
        return ""
    sentence = found.get("language_instruction") if isinstance(found, dict) else None
    if isinstance(sentence, list):  # some versions keep its words
        sentence = " ".join(map(str, sentence))
    return one_line(sentence) if isinstance(sentence, str) else ""
