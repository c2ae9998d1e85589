"""Rewards that runs have learned, used without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import etude
from etude.algorithms.reward_model import episode_rewards, make_reward_only
from etude.app import recipes
from etude.app.run import train
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.experience.episodes import EpisodeStore
from toys import changed, tiny_reach, toy_dataset


def test_the_reward_of_a_reward_only_run(tmp_path: Path) -> None:
    recipe = recipes.find("reward-only")
    rrd = recipe.algorithm.rrd.model_dump(mode="json") | {"network": {"reads": ("state",)}}
    data = toy_dataset(tmp_path / "data")
    recipe = changed(
        recipe,
        algorithm={"dataset": str(data), "train_batches": 10, "rrd": rrd},
        clock={"epochs": 1, "cycles": 1, "iterations": 2},
    )
    run = train(recipe, tmp_path / "run")
    reward, store = etude.load_reward(run.path), EpisodeStore.open(data)
    steps, _ = store.episode(7)
    found = reward.rewards(steps.obs, steps.actions, steps.next_obs)
    learner = make_reward_only(recipe.algorithm, store, reward.network.shift.device, Key(1))
    assert not np.array_equal(episode_rewards(learner.rrd, steps), found)
    learner.load_policy(dict(reward.network.state_dict()))
    np.testing.assert_array_equal(episode_rewards(learner.rrd, steps), found)
    assert found.dtype == np.float64
    assert found.std() > 0.0
    alone = reward.rewards(steps.obs["state"], steps.actions.tolist(), steps.next_obs["state"])
    np.testing.assert_array_equal(alone, found)
    at = etude.load_reward(run.path / "checkpoints" / "latest")
    np.testing.assert_array_equal(at.rewards(steps.obs, steps.actions, steps.next_obs), found)
    with pytest.raises(UsageError, match=r"reads 'state' as rows of \(2,\), not \(1, 3\)"):
        reward.rewards(np.zeros((1, 3)), np.zeros((1, 2)), np.zeros((1, 3)))


def test_the_reward_of_a_run_that_learned_one_on_the_way(tmp_path: Path) -> None:
    recipe = changed(recipes.find("episodic-short"), clock={"total_timesteps": 768})
    run = train(recipe, tmp_path / "run")
    reward = etude.load_reward(run.path)
    size = reward.network.observations["state"].shape[0]
    obs, actions = np.ones((3, size)), np.zeros((3, *reward.network.action.array.shape))
    found = reward.rewards(obs, actions, obs)
    assert found.shape == (3,)
    assert np.ptp(found) == 0.0
    assert found[0] != reward.rewards(2 * obs, actions, 2 * obs)[0]


def test_a_run_without_one_is_refused(tmp_path: Path) -> None:
    run = train(tiny_reach(1), tmp_path / "run")
    with pytest.raises(UsageError, match="learned no reward: give a reward-only run"):
        etude.load_reward(run.path)
    with pytest.raises(UsageError, match="learned no reward"):
        etude.load_reward(run.path / "checkpoints" / "latest" / "policy")
