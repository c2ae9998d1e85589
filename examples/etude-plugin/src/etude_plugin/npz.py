"""A dataset format: a folder with a NumPy file for every episode."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from etude.plugin import DatasetFormat, DatasetReader, ExportedDataset, FileEpisode

OBS = "obs/"


class NpzFormat(DatasetFormat):
    """NumPy: a folder with episode_0.npz, episode_1.npz, ..."""

    kind: Literal["npz"] = "npz"
    compress: bool = Field(False, description="Compress the files.")

    def recognise(self, path: Path) -> bool:
        return path.is_dir() and any(path.glob("episode_*.npz"))

    def read(self, path: Path) -> DatasetReader:
        return NpzReader(path)

    def write(self, data: ExportedDataset, folder: Path) -> list[str]:
        """Writes every episode; returns a sentence for everything that these files cannot hold."""
        save = np.savez_compressed if self.compress else np.savez
        for number, episode in enumerate(data.episodes()):
            arrays: dict[str, Any] = {
                "actions": episode.actions,  # [T, n]
                "rewards": episode.rewards,  # [T]
                "terminated": np.array(episode.terminated),
                "task": np.array(episode.task),
                **{OBS + name: array for name, array in episode.obs.items()},  # [T + 1, ...]
            }
            save(folder / f"episode_{number}.npz", **arrays)
        known = [success for success in data.successes if success is not None]
        return ["These files do not state success."] if known else []


class NpzReader(DatasetReader):
    title = "NumPy"

    def __init__(self, path: Path) -> None:
        names = [file.stem for file in path.glob("episode_*.npz")]
        super().__init__(path, sorted(names, key=lambda name: (len(name), name)))

    def episode(self, name: str) -> FileEpisode:
        # Files of others are untrusted: pickles could run code.
        with np.load(self.path / f"{name}.npz", allow_pickle=False) as file:
            arrays = dict(file)
        return FileEpisode(
            obs={n.removeprefix(OBS): a for n, a in arrays.items() if n.startswith(OBS)},
            actions=arrays["actions"],
            rewards=arrays.get("rewards"),
            terminated=bool(arrays["terminated"]),
            task=str(arrays["task"]),
        )
