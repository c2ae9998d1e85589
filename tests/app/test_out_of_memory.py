"""Runs that need more memory than there is end in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.api import Run, resume, train
from etude.cli import main as cli
from etude.core.errors import UsageError
from etude.planning import out_of_memory
from etude.planning.refused_memory import OutOfMemory
from etude.training.callbacks import Callback, Context
from toys import tiny_reach

LARGE = 1 << 50


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
    monkeypatch.setattr(out_of_memory, "machine_memory", lambda: (1 << 10, 1 << 9))
    with pytest.raises(UsageError, match=r"a buffer of .* and this machine has 1\.0 KiB"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(out_of_memory, "machine_memory", lambda: (1 << 40, 1 << 9))
    train(recipe, tmp_path / "run", say=said.append)
    assert "at the peak, and this machine has 1.0 TiB of memory, 512 B of it free" in said[0]

    def refuse(arguments: list[str]) -> None:
        raise MemoryError

    monkeypatch.setitem(cli.VERBS, "list", refuse)
    assert cli.main(["list"]) == 1
    assert capsys.readouterr().err.startswith("Out of memory: an allocation was refused.")
