"""What `etude eval` says about a reward that was learned from a dataset."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from etude.api import train
from etude.planning import recipes
from etude.reports import evaluation
from toys import changed, toy_dataset


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
    best = max(row.get("eval/rank_correlation", -1.0) for row in run.rows())
    assert found["eval/rank_correlation"] == pytest.approx(best)
    assert last["updates"] == 400
    assert "8 episodes" in said[0]
    charts = sorted(Path(found["folder"]).glob("episode-*.svg"))
    assert len(charts) == 3
    for chart in charts:
        curves = ElementTree.parse(chart).getroot().findall("{http://www.w3.org/2000/svg}polyline")
        assert len(curves) == 3  # the reward, its running sum, and the progress
