from __future__ import annotations

import numpy as np
import pytest
from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.core.contracts import Array
from etude.core.keys import Key
from etude.envs.kuka_scene import arm_table
from etude.envs.reach import BOX_CENTER, Reach, ReachConfig, ReachReward


def test_contract() -> None:
    check_contract(lambda rows, threads: Reach(ReachConfig(), rows, threads))


def resolved_rate(env: Reach) -> Array:
    """Actions [rows, 7] that move the hand to the target: damped least squares."""
    body = int(env.simulation.model.site("hand").bodyid[0])
    jacobian, _ = env.simulation.jacobians(body, env.view.hand)
    transposed = jacobian.transpose(0, 2, 1)
    damped = jacobian @ transposed + 1e-3 * np.eye(3)
    motion = (transposed @ np.linalg.solve(damped, env.view.offset[:, :, None]))[:, :, 0]
    reached_in_a_step = 1 - np.exp(-1)
    limit = arm_table().speed * 0.1 * ReachConfig().speed
    actions = motion / reached_in_a_step / limit
    actions /= np.maximum(1.0, np.abs(actions).max(axis=1, keepdims=True))
    return actions.astype(np.float32)


def test_a_scripted_controller_solves_the_task_within_the_speed_limits() -> None:
    env = Reach(ReachConfig(), 50)
    env.reset(KEY)
    success: list[float] = []
    while len(success) < 200:
        result = env.step(resolved_rate(env))
        success.extend(result.episodes.get("is_success", ()))
        speed = np.abs(env.view.joint_velocity) / arm_table().speed
        assert speed.max() <= ReachConfig().speed * 1.05
    assert np.mean(success) >= 0.99


@pytest.mark.parametrize("seed", range(10))
def test_no_episode_starts_solved(seed: int) -> None:
    config = ReachConfig()
    env = Reach(config, 256, 2)
    obs = env.reset(Key(seed))["state"]
    view = env.view
    assert (view.held == 0).all()
    away = np.linalg.norm(view.target - view.hand, axis=1)
    assert (away >= config.min_distance).all()
    np.testing.assert_allclose(away, view.distance)
    inside = np.abs(view.target - BOX_CENTER) <= config.box_side / 2
    assert inside.all()
    assert (obs[:, -1] == 0).all()
    for _ in range(config.hold_steps - 1):
        assert not env.step(np.zeros((256, 7), np.float32)).terminated.any()


def test_success_needs_consecutive_steps() -> None:
    env = Reach(ReachConfig(hold_steps=3, reward=ReachReward(action_cost=0)), 4)
    env.reset(KEY)
    still = np.zeros((4, 7), np.float32)
    env.view.target[:2] = env.view.hand[:2]
    env.step(still)
    env.view.target[1] += 1.0  # row 1 leaves for one step and must start again
    assert not env.step(still).terminated.any()
    env.view.target[1] = env.view.hand[1]
    result = env.step(still)
    np.testing.assert_array_equal(result.terminated, [True, False, False, False])
    np.testing.assert_array_equal(result.final_rows, [0])
    assert result.episodes["is_success"] == [1.0]
    assert result.episodes["reward/success"] == [ReachReward().success]
    assert result.final_obs["state"][0, -1] == 1.0
    assert result.obs["state"][0, -1] == 0.0


def test_truncation_keeps_the_observation_before_the_reset() -> None:
    short, long = Reach(ReachConfig(max_episode_steps=7), 5), Reach(ReachConfig(), 5)
    short.reset(KEY)
    long.reset(KEY)
    for step, action in enumerate(random_actions(short, 7)):
        one, two = short.step(action), long.step(action)
        assert one.truncated.all() == (step == 6)
    assert not one.terminated.any()
    np.testing.assert_array_equal(one.final_rows, np.arange(5))
    assert_same_bits(one.final_obs["state"], two.obs["state"])
    assert_same_bits(one.reward, two.reward)
    assert (one.obs["state"] != one.final_obs["state"]).any(axis=1).all()


def test_an_episodes_start_depends_on_row_and_number_only() -> None:
    config = ReachConfig(max_episode_steps=3)
    starts = []
    for seed in (0, 1):
        env = Reach(config, 5)
        env.reset(KEY)
        starts.append([env.step(a).obs["state"] for a in random_actions(env, 3, seed)][-1])
    assert_same_bits(starts[0], starts[1])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_shaping_terms_telescope_so_lingering_earns_nothing(seed: int) -> None:
    """Over an episode each potential term is worth its end minus its start, whatever the path."""
    config = ReachConfig(max_episode_steps=12)
    env = Reach(config, 6)
    env.reset(Key(seed))
    start = env.view.distance.copy()
    total = np.zeros(6)
    for action in random_actions(env, 12, seed):
        result = env.step(action)
        total += result.reward
    end, episodes = result.episodes["final_distance"], result.episodes
    weights = config.reward
    np.testing.assert_allclose(episodes["reward/progress"], weights.progress * (start - end))
    np.testing.assert_allclose(
        episodes["reward/precision"],
        weights.precision * (np.exp(-50 * end) - np.exp(-50 * start)),
        atol=1e-12,
    )
    summed = sum(array for name, array in episodes.items() if name.startswith("reward/"))
    np.testing.assert_allclose(summed, total, rtol=1e-4, atol=1e-5)


def test_the_bonus_exceeds_all_the_shaping_near_the_target() -> None:
    reward = ReachConfig().reward
    assert reward.success > reward.precision + reward.hold


def test_actions_are_joint_motions_clipped_to_the_joint_ranges() -> None:
    env = Reach(ReachConfig(), 2)
    env.reset(KEY)
    before = env.view.joint_position.copy()
    env.step(np.array([[1] * 7, [0] * 7], np.float32))
    moved = env.view.joint_position - before
    assert (moved[0] > 0).all()
    np.testing.assert_allclose(moved[1], 0, atol=1e-3)
    for _ in range(200):
        env.step(np.ones((2, 7), np.float32))
        assert (env.view.joint_position <= arm_table().range[:, 1] + 0.01).all()


def test_weightless_terms_are_not_reported_and_unknown_ones_refused() -> None:
    env = Reach(ReachConfig(reward=ReachReward(hold=0)), 1)
    assert "reward/hold" not in env.spec.statistics
    with pytest.raises(ValidationError):
        ReachConfig.model_validate({"reward": {"progres": 1.0}})
