"""The learner in one iteration: gradients, contributions of samples, activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import etude
from etude.cli.main import main as cli
from etude.evaluate import inspection
from etude.evaluate.inspection import inspect
from gates.lib.command import changed
from gates.lib.short_runs import SHORT
from toys import tiny_reach


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_what_is_watched_is_what_was_trained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_reach(4) if kind == "ppo" else changed(*SHORT["sac"])
    run = etude.train(recipe.replace(clock__iterations=1), tmp_path / "run")
    row = run.rows()[-1]
    step = int(row["timesteps"]) - 1
    monkeypatch.setattr(inspection, "LARGEST", 10_000)
    found = inspect(run.path, step)
    assert found["iteration"] == row["iterations"] - 1
    for name, value in found["metrics"].items():
        if name in row and name not in ("train/std", "train/n_updates"):
            assert value["mean"] == pytest.approx(row[name], rel=1e-6), name
    # The gradients of single samples sum to that of the minibatch.
    assert sum(each["share"] for each in found["contributions"]) == pytest.approx(1.0, abs=1e-3)
    assert all(norm >= 0.0 for norm in found["gradient_norms"].values())
    assert found["activations"]


def test_two_moments_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = etude.train(tiny_reach(4), tmp_path / "run")
    assert cli(["inspect", str(run.path), "--at", "300,600"]) == 0
    said = capsys.readouterr().out
    assert "run, iteration 1  " in said
    assert "run, iteration 2" in said
    assert cli(["inspect", str(run.path), "--at", "300", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradient_steps"] == 8
    assert cli(["inspect", str(run.path)]) != 0
