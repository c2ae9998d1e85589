"""What `etude eval` says about a reward that was learned from a dataset."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from etude.api import train
from etude.cli.train import finish
from etude.evaluate import evaluation
from etude.planning import recipes
from toys import changed, tiny_reward_only, toy_dataset


def test_a_learned_reward_is_judged_on_what_was_held_out_and_drawn(tmp_path: Path) -> None:
    recipe = recipes.find("reward-only")
    sizes = {"rrd_batch_size": 64, "rrd_sample_size": 4, "network": {"reads": ("state",)}}
    data = {"dataset": str(toy_dataset(tmp_path / "data", 80)), "progress": "progress"}
    recipe = changed(
        recipe,
        algorithm={**data, "rrd": recipe.algorithm.rrd.model_dump(mode="json") | sizes},
        clock={"epochs": 2, "cycles": 2, "iterations": 2},
        evaluation={"every": "1 epoch"},
    )
    run = train(recipe, tmp_path / "run")
    said: list[str] = []
    found = evaluation.examine(run.recipe, run.path, 100, None, False, said.append)
    last = run.rows()[-1]
    # The best of the run's two evaluations, judged again on the same episodes.
    best = max(row.get("eval/reward_progress", -1.0) for row in run.rows())
    assert found["eval/reward_progress"] == pytest.approx(best)
    assert found["eval/reward_progress_low"] > 0.5
    # Beside it a constant reward, and the network as it was at the start.
    assert found["untrained/reward_progress"] != found["eval/reward_progress"]
    scores = next(line for line in said if line.startswith("eval/reward_progress "))
    assert scores.split()[1] == f"{best:.2f}"
    assert scores.split("0.5 ")[-1].split()[0] == f"{found['untrained/reward_progress']:.2f}"
    assert last["updates"] == 400
    assert "8 held-out episodes" in said[0]
    charts = sorted(Path(found["folder"]).glob("episode-*.svg"))
    assert len(charts) == 3
    for chart in charts:
        names = {node.get("id") for node in ElementTree.parse(chart).getroot().iter()}
        assert {"reward", "sum", "progress"} <= names


def test_a_run_without_a_best_reward_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One episode held out is not enough to tell a reward from a constant."""
    recipe = tiny_reward_only(tmp_path, 1, 1, "1 epoch")
    recipe = recipe.replace(algorithm__held_out=0.01)
    run = train(recipe, tmp_path / "run")
    row = run.rows()[-1]
    assert (row["eval/reward_progress_low"], row["eval/reward_progress_high"]) == (0.0, 1.0)
    assert run.summary()["best"] is None
    assert not (run.path / "checkpoints" / "best").exists()
    finish(run)
    said = capsys.readouterr().out
    assert "a constant reward scores 0.5" in said
    assert "No evaluation did better than chance: there is no best, the newest is kept." in said
    found = evaluation.examine(run.recipe, run.path, 100, None, False, print)
    assert found["eval/reward_progress"] == row["eval/reward_progress"]
    assert "this reward is not better than a constant one" in capsys.readouterr().out
