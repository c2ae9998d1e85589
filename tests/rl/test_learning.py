"""It learns: tasks that are solved in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.api import train
from etude.planning import recipes
from toys import changed


@pytest.mark.rotated
def test_cartpole_is_balanced(tmp_path: Path) -> None:
    recipe = changed(recipes.find("ppo"), clock={"total_timesteps": 80_000})
    run = train(recipe, tmp_path / "run")
    assert run.summary()["best"][1] >= 400
    assert run.evaluate(episodes=20)["eval/mean_reward"] >= 400


@pytest.mark.rotated
def test_reach_is_learned(tmp_path: Path) -> None:
    run = train(recipes.find("reach"), tmp_path / "run")
    assert run.evaluate(episodes=100)["eval/success_rate"] >= 0.9


@pytest.mark.rotated
def test_halfcheetah_improves(tmp_path: Path) -> None:
    """An untrained policy stands still, a return of about 0 in a thousand steps."""
    recipe = changed(
        recipes.find("halfcheetah"),
        policy={"hidden": (64, 64), "init_std": 0.5},
        algorithm={"learning_rate": 5e-4, "minibatch_size": 128, "update_epochs": 10},
        clock={"total_timesteps": 32_768, "iterations": 2},
        evaluation={"episodes": 4, "num_envs": 4, "envs_per_group": 4, "every": "8192 steps"},
    )
    run = train(recipe, tmp_path / "run")
    rewards = [row["eval/mean_reward"] for row in run.rows() if "eval/mean_reward" in row]
    assert max(rewards) > rewards[0] + 300
    assert run.evaluate(episodes=4)["eval/mean_reward"] > rewards[0] + 100
