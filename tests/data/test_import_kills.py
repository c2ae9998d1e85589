"""An import that is killed goes on, and ends with the same bytes."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from etude.cli.data import run as data_main
from etude.core.errors import UsageError
from etude.core.limited import Limits
from etude.data import importing
from etude.data.formats.base import ReadOptions
from etude.data.store.episodes import EpisodeStore


def write(path: Path, num: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file.create_group("data")
        for number in range(num):
            steps = int(rng.integers(5, 30))
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = rng.normal(size=(steps, 3))
            demo["obs/state"] = rng.normal(size=(steps, 5))
            demo["rewards"] = demo["dones"] = np.eye(steps, dtype=np.uint8)[-1]
    return path


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"{name}.hdf5", 6, seed) for seed, name in enumerate("ab")]


def killed(sources: list[Path], out: Path, steps: int) -> None:
    """Start an import in a process of its own, and kill it when it has so many steps."""
    reads, writes = os.pipe()
    process = os.fork()
    if not process:
        importing.SAVE_SECONDS = 0.0

        def tick(done: int, total: int) -> None:
            if done >= steps:
                os.write(writes, b".")
                time.sleep(60)  # to be killed here

        importing.import_dataset(sources, out, ReadOptions(), Limits(), 5, tick=tick)
        os._exit(1)
    assert os.read(reads, 1) == b"."
    os.kill(process, signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    os.close(reads)
    os.close(writes)


@pytest.mark.rotated
def test_kills_change_nothing(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    data_main(["import", *map(str, sources), str(whole), "--add-truncated", "5"])
    for steps in (1, 60, 200):
        killed(sources, out, steps)
        assert importing.is_unfinished(out)
    read = []
    opened = importing.open_dataset

    def noted(*arguments: Any, **options: Any) -> Any:
        read.append(options["skip"])
        return opened(*arguments, **options)

    monkeypatch.setattr(importing, "open_dataset", noted)
    data_main(["import", *map(str, sources), str(out), "--add-truncated", "5"])
    assert len(read) == 1  # the first file was not opened again
    assert read[0] > 0
    names = {file.name for file in whole.iterdir()}
    assert {file.name for file in out.iterdir()} == names
    for name in names - {importing.ABOUT}:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert EpisodeStore.open(out).num_episodes == 17


def test_an_unfinished_import_is_gone_on_with_by_the_same_command_only(
    sources: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed(sources, out, 60)
    with pytest.raises(UsageError, match="was never finished"):
        EpisodeStore.open(out)
    for arguments in (["--add-truncated", "4"], []):
        with pytest.raises(UsageError, match="other files, or with other options"):
            data_main(["import", *map(str, sources), str(out), *arguments])
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    same = ["import", *map(str, sources), str(out), "--add-truncated", "5"]
    with pytest.raises(UsageError, match="Another process is importing"):
        data_main(same)
    os.close(held)
    time.sleep(0.01)
    os.utime(sources[1])  # as if it had been written anew
    with pytest.raises(UsageError, match="other files"):
        data_main(same)
    assert importing.is_unfinished(out)
