"""The disk fails, or the process dies, while a run writes its replay: nothing is lost by it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from disk_faults import Died, Failing, Mortal, Watched

import short_recipes
from etude.api import Run, resume, train
from etude.core.errors import EtudeError
from etude.runs import files
from toys import changed

RECIPE = changed(
    short_recipes.find("episodic-short"),
    algorithm={"capacity": 512, "train_batches": 1, "warmup_steps": 200},
    clock={"total_timesteps": 1_024},
    learner={"shards": 1},
    evaluation={"every": "never", "episodes": 4, "num_envs": 4, "envs_per_group": 4},
)
"""Four checkpoints; its replay is evicted from twice."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run, and the system calls by which its replay was written."""
    run, disk = tmp_path_factory.mktemp("replay") / "run", Watched()
    disk.folder = "replay"
    with files.using(disk):
        train(RECIPE, run)
    return run, disk.calls


def some(calls: list[str], name: str, few: int = 2) -> list[int]:
    """Numbers of a few calls of one kind, the first and the last among them."""
    numbers = [number for number, call in enumerate(calls) if call == name]
    return sorted({numbers[i * (len(numbers) - 1) // max(few - 1, 1)] for i in range(few)})


@pytest.mark.rotated
def test_the_replay_is_written_through_the_one_disk(untouched: tuple[Path, list[str]]) -> None:
    _, calls = untouched
    assert {"mkdir", "open", "write", "fsync", "truncate", "rename"} <= set(calls)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "code", "lasting"),
    [
        ("write", errno.ENOSPC, True),
        ("truncate", errno.ENOSPC, True),
        ("fsync", errno.EIO, False),
    ],
)
def test_a_disk_that_fails_under_the_replay(
    name: str, code: int, lasting: bool, untouched: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run, calls = untouched
    disk = Failing(some(calls, name, 3)[1], code, lasting)
    disk.folder = "replay"
    with files.using(disk), pytest.raises(EtudeError) as caught:
        train(RECIPE, tmp_path / "run")
    said = str(caught.value)
    assert "replay" in said
    assert said.startswith("Could not")
    resume(tmp_path / "run")
    assert Run(tmp_path / "run").fingerprint() == Run(run).fingerprint()


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "moment"),
    [("open", "after"), ("write", "torn"), ("fsync", "before"), ("truncate", "after")],
)
def test_death_while_the_replay_is_written(
    name: str, moment: str, untouched: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run, calls = untouched
    for number in some(calls, name):
        folder = tmp_path / f"{number}"
        disk = Mortal(number, moment)
        disk.folder = "replay"
        with files.using(disk), pytest.raises(Died):
            train(RECIPE, folder)
        resume(folder)
        assert Run(folder).fingerprint() == Run(run).fingerprint()
