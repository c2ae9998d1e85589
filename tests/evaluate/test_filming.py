"""Films during training: they are drawn beside the run, and change no bit of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from etude.api import Run, train
from etude.core.errors import EtudeError
from etude.envs.mujoco import rendering
from etude.evaluate import filming
from etude.planning.recipe import Recipe
from etude.runs.folder import REPORTING, films
from toys import tiny_reach

STEP = 512


def filmed(every: str = f"{STEP} steps", iterations: int = 2) -> Recipe:
    return tiny_reach(iterations, evaluation={"film_every": every})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fingerprint of the run without films."""
    return train(tiny_reach(2), tmp_path_factory.mktemp("runs") / "plain").fingerprint()


def test_a_process_that_dies_while_it_draws_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: dict[str, str]
) -> None:
    monkeypatch.setattr(filming.sys, "executable", "/bin/false")
    run = train(filmed(), tmp_path / "run")
    assert run.summary()
    assert run.fingerprint() == plain
    said = (run.path / REPORTING).read_text()
    assert f"There is no film of step {STEP}: its process ended with 1" in said
    assert films(run.path) == {}


def test_of_the_films_that_wait_the_newest_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\necho $5 >> {tmp_path}/steps\nsleep 1\nrm -r "$(dirname "$4")"\n')
    slow.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(filming.tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(filming.sys, "executable", str(slow))
    run = train(filmed("256 steps", 4), tmp_path / "run")
    steps = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert steps[0] == 256
    assert steps[-1] == 1024
    assert "drawing takes longer than training" in (run.path / REPORTING).read_text()
    assert not [*scratch.glob("etude-film-*")], "policies of films that are left out are removed"


@pytest.mark.rotated
def test_a_film_of_a_run_is_in_its_folder_and_in_its_curves(
    tmp_path: Path, plain: dict[str, str]
) -> None:
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(str(error))
    run = train(filmed(), tmp_path / "run")
    assert run.fingerprint() == plain
    assert not (run.path / REPORTING).exists()
    ((step, gif),) = films(run.path).items()
    assert step == STEP
    with Image.open(gif.with_suffix(".webp")) as moving:
        frames = [
            np.asarray(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(moving)
        ]
    assert len(frames) > 5
    assert np.abs(frames[0] - frames[len(frames) // 2]).max() > 50, "the arm moves"
    red, green, blue = np.moveaxis(frames[0], -1, 0)
    assert ((green > red + 60) & (green > blue + 60)).sum() > 20, "the target"
    (curves,) = run.path.glob("events.out.tfevents.*")
    assert gif.read_bytes() in curves.read_bytes()
    assert Run(run.path).summary()
