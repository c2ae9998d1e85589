"""Minari's datasets: `data/main_data.hdf5` in a folder, or that file alone.

episode_<n>    observations (one more than actions), actions, rewards, terminations,
               truncations, infos
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from etude.core.contracts import ArraySpec
from etude.data.formats.base import (
    DataError,
    DatasetFormat,
    DatasetReader,
    ExportedDataset,
    FileEpisode,
    in_words,
)
from etude.data.formats.hdf5 import Guarded, HDF5Reader, is_hdf5
from etude.runs import files

_MAIN_FILE = Path("data") / "main_data.hdf5"


class MinariFormat(DatasetFormat):
    """Minari: a folder with data/main_data.hdf5."""

    kind: Literal["minari"] = "minari"

    def recognise(self, path: Path) -> bool:
        if path.is_dir():
            return (path / _MAIN_FILE).is_file()
        if not is_hdf5(path):
            return False
        guarded = Guarded(path)
        return any(name.startswith("episode_") for name in guarded.names(guarded.root))

    def read(self, path: Path) -> DatasetReader:
        if path.is_dir():
            if not (path / _MAIN_FILE).is_file():
                raise DataError(path, f"has no {_MAIN_FILE}; is it a Minari dataset?")
            path = path / _MAIN_FILE
        return MinariReader(Guarded(path))

    def write(self, data: ExportedDataset, folder: Path) -> list[str]:
        files.new_folder(folder / "data")
        with h5py.File(folder / _MAIN_FILE, "w") as file:
            for number, episode in enumerate(data.episodes()):
                group, steps = file.create_group(f"episode_{number}"), len(episode.actions)
                group.attrs["id"], group.attrs["total_steps"] = number, steps
                for name, array in episode.obs.items():
                    group[f"observations/{name}"] = array
                group["actions"], group["rewards"] = episode.actions, episode.rewards
                last = np.arange(steps) == steps - 1
                group["terminations"] = last & episode.terminated
                group["truncations"] = last & (not episode.terminated)
                if episode.success is not None:
                    group["infos/success"] = last & episode.success
        spaces = {name: _space(spec) for name, spec in data.observations.items()}
        document = {
            "total_episodes": len(data.tasks),
            "total_steps": data.num_steps,
            "data_format": "hdf5",
            "observation_space": json.dumps({"type": "Dict", "subspaces": spaces}),
            "action_space": json.dumps(_space(data.actions)),
            "minari_version": "0.5.0",
            "jpeg_encoding": False,
            "dataset_id": f"etude/{data.name}-v0",
        }
        text = json.dumps(document, indent=1)
        files.write_file(folder / "data" / "metadata.json", [text.encode()])
        tasks = set(data.tasks) - {""}
        lost = f"Minari's files have no tasks: {len(tasks):,} sentences are left out."
        return [lost] if tasks else []


class MinariReader(HDF5Reader):
    """An open file of Minari."""

    title = "Minari"

    def __init__(self, guarded: Guarded) -> None:
        names = [n for n in guarded.names(guarded.root) if n.startswith("episode_")]
        super().__init__(guarded, names, {})
        path = guarded.path
        self.task = in_words(path.parent.parent.name if path.name == _MAIN_FILE.name else path.stem)

    def episode(self, name: str) -> FileEpisode:
        guarded = self.guarded
        group = guarded.group(guarded.root, name)
        if group is None:
            raise guarded.error(name, "is not a group")
        actions = guarded.actions(group)
        inside = guarded.child(group, "observations")
        if isinstance(inside, h5py.Group):
            obs = guarded.arrays(inside)
        else:
            obs = {} if inside is None else {"state": guarded.lazy(inside, "state")}
        for label, array in obs.items():
            if array.shape and array.shape[0] != len(actions) + 1:
                raise guarded.error(
                    label,
                    f"has {array.shape[0]:,} rows, not one more than {len(actions):,} actions",
                )
        ended = guarded.small(group, "terminations", len(actions))
        return FileEpisode(
            obs,
            actions,
            guarded.small(group, "rewards", len(actions)),
            terminated=None if ended is None else bool(ended[-1]),
            success=self._success(group),
        )

    def _success(self, group: Any) -> bool | None:
        """Whether infos say that the episode succeeded; None if they say nothing."""
        infos = self.guarded.group(group, "infos")
        for name in ("success", "is_success") if infos is not None else ():
            found = self.guarded.child(infos, name)
            if isinstance(found, h5py.Dataset) and found.ndim == 1:
                flags = self.guarded.small(infos, name)
                return None if flags is None else bool(flags.any())
        return None


def _space(spec: ArraySpec) -> dict[str, Any]:
    """A Gymnasium space that contains every array of this kind, in Minari's words."""
    kind = np.dtype(spec.dtype)
    limits = (-np.inf, np.inf) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    low, high = (np.full(spec.shape, limit, kind).tolist() for limit in limits)
    return {
        "type": "Box",
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "low": low,
        "high": high,
    }
