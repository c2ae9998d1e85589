"""Runs that need more memory than there is end in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
import short_recipes
from etude.api import Run, resume, train
from etude.cli import main as cli
from etude.core.errors import UsageError
from etude.planning import memory
from etude.planning.memory import OutOfMemory
from etude.planning.recipes import Recipe
from etude.rl import off_policy as replay
from etude.runs import checkpoint, manifest, tensors
from etude.training.loop import Callback, Context
from toys import changed, tiny_reach

LARGE = 1 << 50


def refused_for(size: int, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, folder: Path) -> str:
    """What a machine with so much memory says of a run, which is not begun."""
    monkeypatch.setattr(memory, "machine_memory", lambda: (size, size))
    with pytest.raises(UsageError) as caught:
        train(recipe, folder / "refused")
    assert not (folder / "refused").exists()
    return str(caught.value)


def replaying(capacity: int, **sections: dict[str, Any]) -> Recipe:
    """SAC on reach with episodes of up to 12 steps: 10 iterations of 480 steps, 2 to an epoch."""
    return changed(
        short_recipes.find("episodic-short"),
        collector={"num_envs": 16, "envs_per_group": 8},
        policy={"hidden": (8,)},
        algorithm={
            **{"rollout_steps": 30, "train_batches": 1, "batch_size": 8, "warmup_steps": 0},
            "capacity": capacity,
        },
        **{
            "clock": {"total_timesteps": 10 * 480, "iterations": 1, "cycles": 2},
            "evaluation": {"every": "never", "episodes": 4, "num_envs": 4, "envs_per_group": 4},
            **sections,
        },
    )


class Greedy(Callback):
    """Asks for a petabyte after the first checkpoint."""

    def __init__(self, library: str) -> None:
        self.library = library

    def iteration_end(self, context: Context, fragments: object) -> None:
        if context.clock.now.iterations == 3:
            if self.library == "torch":
                torch.empty(LARGE)
            np.empty(LARGE)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_allocation_that_is_refused(library: str, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(OutOfMemory, match=r"The plan expects [\d.]+ MiB at the peak") as caught:
        train(tiny_reach(4), tmp_path / "run", [Greedy(library)], say=said.append)
    assert "llocate" in str(caught.value)
    assert "Traceback" in next((tmp_path / "run" / "failures").rglob("error.txt")).read_text()
    assert any("the last good checkpoint is untouched" in text for text in said)
    resume(tmp_path / "run")
    assert Run(tmp_path / "run").fingerprint()["policy"]


def test_a_plan_that_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, said = tiny_reach(1), list[str]()
    planned = etude.plan(recipe)
    monkeypatch.setattr(memory, "machine_memory", lambda: (1 << 10, 1 << 9))
    with pytest.raises(UsageError, match=r"The policy has .* and this machine has 1\.0 KiB"):
        train(recipe, tmp_path / "run")
    with pytest.raises(UsageError, match=r"a buffer of .* and this machine has 1\.0 KiB"):
        memory.check_plan(planned.bytes, tmp_path / "run", said.append)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory, "machine_memory", lambda: (1 << 40, 1 << 9))
    train(recipe, tmp_path / "run", say=said.append)
    assert "at the peak, and this machine has 1.0 TiB of memory, 512 B of it free" in said[0]

    assert "at the peak, and this machine has" in refused_for(
        1 << 20, monkeypatch, recipe, tmp_path
    )

    def refuse(arguments: list[str]) -> None:
        raise MemoryError

    monkeypatch.setitem(cli.VERBS, "list", refuse)
    assert cli.main(["list"]) == 1
    assert capsys.readouterr().err.startswith("Out of memory: an allocation failed.")


class Used(Callback):
    """The most that a folder takes on the disk, at any iteration's end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def iteration_end(self, context: Context, fragments: object) -> None:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        self.most = max(self.most, sum(path.stat().st_blocks * 512 for path in files))


@pytest.mark.parametrize(("every", "keep_last"), [("2 iterations", 3)])
def test_a_replay_takes_no_more_disk_than_planned(
    every: str, keep_last: int, tmp_path: Path
) -> None:
    """What was evicted stays until no kept checkpoint names it: several times the capacity."""
    recipe = replaying(2 * 16 * 13, checkpoint={"every": every, "keep_last": keep_last})
    planned, used = etude.plan(recipe).bytes, Used(tmp_path / "run" / "replay")
    train(recipe, tmp_path / "run", [used])
    whole = planned["replay"] + planned["replay_held"]
    assert 0.3 * whole < used.most <= whole
    assert keep_last == 1 or used.most > planned["replay"]


def test_a_replay_that_cannot_fit_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, said = replaying(2 * 16 * 13), list[str]()
    planned = etude.plan(recipe).bytes
    monkeypatch.setattr(memory, "free_space", lambda folder: planned["replay"] - 1)
    with pytest.raises(UsageError, match=r"a replay of .* on disk, and .* of free space"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory, "free_space", lambda folder: planned["replay"] + (1 << 20))
    memory.check_plan(etude.plan(recipe).bytes, tmp_path / "run", said.append)
    assert "of old replay that checkpoints keep" in said[0]
    monkeypatch.setattr(memory, "free_space", lambda folder: 0)
    assert cli.main(["plan", "reach"]) == 0
    assert "`etude train` would refuse this here" in capsys.readouterr().out


def test_a_replay_of_more_files_than_a_checkpoint_can_name() -> None:
    recipe = replaying(1 << 50, clock={"total_timesteps": 10**17, "iterations": 10**12})
    with pytest.raises(UsageError, match=r"lower algorithm\.capacity"):
        etude.plan(recipe)
    assert replay._MOST_BLOCKS * 67 < 1 << 24


@pytest.mark.parametrize("allocate", [np.empty, torch.empty])
def test_a_checkpoint_that_does_not_fit_into_memory_is_not_damaged(
    allocate: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_reach(2), tmp_path / "run")
    module = np if allocate is np.empty else torch
    refusals = {np: MemoryError(), torch: RuntimeError("can't allocate memory: 12")}

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise refusals[module]

    newest = checkpoint.newest_verified(tmp_path / "run" / "checkpoints")
    assert newest is not None
    with monkeypatch.context() as patch:
        patch.setattr(getattr(tensors, "np" if module is np else "torch"), "empty", refuse)
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            checkpoint.load_training(newest)
    assert caught.value is refusals[module]
    with pytest.raises(MemoryError), checkpoint.explain_mismatch(newest, "policy"):
        raise MemoryError


def test_a_thread_that_has_no_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise MemoryError

    monkeypatch.setattr(manifest, "_results", refuse)
    with pytest.raises(MemoryError):
        manifest.standard_digest.__wrapped__()
