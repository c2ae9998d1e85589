"""What runs leave behind, used without them: policies, and rewards that were learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import etude
import short_recipes
from etude.api import train
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.store.episodes import EpisodeStore
from etude.models.reward_networks import compute_rewards
from etude.planning import recipes
from etude.rl.reward_only import make_reward_only
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
    again = (learner.policy, steps.obs, steps.actions, steps.next_obs)
    assert not np.array_equal(compute_rewards(*again), found)
    learner.load_policy(dict(reward.network.state_dict()))
    np.testing.assert_array_equal(compute_rewards(*again), found)
    assert found.dtype == np.float64
    assert found.std() > 0.0
    alone = reward.rewards(steps.obs["state"], steps.actions.tolist(), steps.next_obs["state"])
    np.testing.assert_array_equal(alone, found)
    at = etude.load_reward(run.path / "checkpoints" / "latest")
    np.testing.assert_array_equal(at.rewards(steps.obs, steps.actions, steps.next_obs), found)
    with pytest.raises(UsageError, match=r"reads 'state' of shape \[n, 2\], not \[1, 3\]"):
        reward.rewards(np.zeros((1, 3)), np.zeros((1, 2)), np.zeros((1, 3)))


def test_the_reward_of_a_run_that_learned_one_on_the_way(tmp_path: Path) -> None:
    recipe = changed(short_recipes.find("episodic-short"), clock={"total_timesteps": 768})
    run = train(recipe, tmp_path / "run")
    reward = etude.load_reward(run.path)
    size = reward.network.observations["state"].shape[0]
    obs, actions = np.ones((3, size)), np.zeros((3, *reward.network.action.array.shape))
    found = reward.rewards(obs, actions, obs)
    assert found.shape == (3,)
    assert np.ptp(found) < 1e-6  # kernels round the rows of a small batch differently
    assert abs(found[0] - reward.rewards(2 * obs, actions, 2 * obs)[0]) > 1e-6


def test_a_run_without_one_is_refused(tmp_path: Path) -> None:
    run = train(tiny_reach(1), tmp_path / "run")
    with pytest.raises(UsageError, match="has no learned reward: give a reward-only run"):
        etude.load_reward(run.path)
    with pytest.raises(UsageError, match="has no learned reward"):
        etude.load_reward(run.path / "checkpoints" / "latest" / "policy")


@pytest.fixture(scope="module")
def asymmetric(tmp_path_factory: pytest.TempPathFactory) -> etude.Run:
    """A run whose critic reads an observation that its actor does not."""
    recipe = changed(
        recipes.find("reach-memory"),
        policy={"kind": "mlp", "hidden": (8,), "critic_reads": ("critic", "state")},
        collector={"num_envs": 4, "envs_per_group": 2, "threads": 1},
        algorithm={"rollout_steps": 8, "horizon": 1, "minibatch_size": 16, "update_epochs": 1},
        clock={"total_timesteps": 64, "cycles": 1, "iterations": 1},
        evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2},
    )
    return train(recipe, tmp_path_factory.mktemp("asymmetric") / "run")


def test_a_policy_acts_without_what_only_its_critic_reads(asymmetric: etude.Run) -> None:
    policy = asymmetric.policy()
    specs = policy.policy.observations
    assert list(specs) == ["critic", "state"]  # the actor's is not the first
    state = Key(3).generator().normal(size=(5, *specs["state"].shape)).astype(np.float32)
    actions = policy.act({"state": state})
    assert actions.shape == (5, 7)
    np.testing.assert_array_equal(policy.act(state), actions)
    full = {"state": state, "critic": np.full((5, *specs["critic"].shape), np.nan)}
    np.testing.assert_array_equal(policy.act(full), actions)
    np.testing.assert_allclose(policy.act(state[2]), actions[2], rtol=1e-4, atol=1e-5)


def test_wrong_observations_are_answered_in_a_sentence(asymmetric: etude.Run) -> None:
    policy = asymmetric.policy()
    size = policy.policy.observations["state"].shape[0]
    with pytest.raises(UsageError, match=r"acts on 'state'; 'state' is missing from 'critic'"):
        policy.act({"critic": np.zeros(3)})
    with pytest.raises(UsageError, match=rf"reads 'state' as \({size},\).*given 'state' \(3,\)"):
        policy.act(np.zeros(3))
    with pytest.raises(UsageError, match=r"given 'state' \(2, 3\)"):
        policy.act({"state": np.zeros((2, 3))})
    with pytest.raises(UsageError, match=r"given 'state' \(\)"):
        policy.act(1.0)
