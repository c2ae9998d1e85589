from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from etude.core.contracts import Array
from etude.core.errors import NonFinite
from etude.core.keys import Key
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.robots.kuka import arm_table
from etude.tasks.reach import BOX_CENTER, ReachConfig, ReachReward


def test_contract() -> None:
    check_contract(lambda rows, threads: ReachConfig().build(rows, threads))


def resolved_rate(env: MujocoEnv) -> Array:
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
    env = ReachConfig().build(50)
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
    env = config.build(256, 2)
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
    env = ReachConfig(hold_steps=3, reward=ReachReward(action_cost=0)).build(4)
    env.reset(KEY)
    still = np.zeros((4, 7), np.float32)
    env.view.target[:2] = env.view.hand[:2]
    env.step(still)
    env.view.target[1] += 1.0  # row 1 leaves for one step and must start again
    assert not env.step(still).terminated.any()
    env.view.target[1] = env.view.hand[1]
    result = env.step(still)
    np.testing.assert_array_equal(result.terminated, [True, False, False, False])
    np.testing.assert_array_equal(result.final_envs, [0])
    assert result.episodes["is_success"] == [1.0]
    assert result.episodes["reward/success"] == [ReachReward().success]
    assert result.final_obs["state"][0, -1] == 1.0
    assert result.obs["state"][0, -1] == 0.0


def test_truncation_keeps_the_observation_before_the_reset() -> None:
    short, long = ReachConfig(max_episode_steps=7).build(5), ReachConfig().build(5)
    short.reset(KEY)
    long.reset(KEY)
    for step, action in enumerate(random_actions(short, 7)):
        one, two = short.step(action), long.step(action)
        assert one.truncated.all() == (step == 6)
    assert not one.terminated.any()
    np.testing.assert_array_equal(one.final_envs, np.arange(5))
    assert_same_bits(one.final_obs["state"], two.obs["state"])
    assert_same_bits(one.reward, two.reward)
    assert (one.obs["state"] != one.final_obs["state"]).any(axis=1).all()


def test_an_episodes_start_depends_on_row_and_number_only() -> None:
    config = ReachConfig(max_episode_steps=3)
    starts = []
    for seed in (0, 1):
        env = config.build(5)
        env.reset(KEY)
        starts.append([env.step(a).obs["state"] for a in random_actions(env, 3, seed)][-1])
    assert_same_bits(starts[0], starts[1])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_shaping_terms_telescope_so_lingering_earns_nothing(seed: int) -> None:
    """Over an episode each potential term is worth its end minus its start, whatever the path."""
    config = ReachConfig(max_episode_steps=12)
    env = config.build(6)
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
    env = ReachConfig().build(2)
    env.reset(KEY)
    before = env.view.joint_position.copy()
    env.step(np.array([[1] * 7, [0] * 7], np.float32))
    moved = env.view.joint_position - before
    assert (moved[0] > 0).all()
    np.testing.assert_allclose(moved[1], 0, atol=1e-3)
    for _ in range(200):
        env.step(np.ones((2, 7), np.float32))
        assert (env.view.joint_position <= arm_table().range[:, 1] + 0.01).all()


TARGET_COLUMNS = slice(17, 25)
"""Target, offset, distance and share held; before them the arm's own angles, speeds and hand."""


def test_contract_of_the_memory_task() -> None:
    check_contract(lambda rows, threads: ReachConfig(shown_steps=5).build(rows, threads))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), shown=st.integers(1, 8))
def test_nothing_but_memory_carries_a_target_past_the_shown_steps(seed: int, shown: int) -> None:
    """Twins from the same pose see two targets, act at will while held, and then look alike."""
    config = ReachConfig(shown_steps=shown, max_episode_steps=shown + 4)
    twins = config.build(6), config.build(6)
    for env in twins:
        env.reset(Key(seed))
    twins[1].view.target[:] = np.random.default_rng(seed).uniform(-1, 1, (6, 3))
    start = twins[0].view.joint_position.copy()
    one, two = (
        [env.step(action) for action in random_actions(env, shown, seed + index)]
        for index, env in enumerate(twins)
    )
    for step, (first, second) in enumerate(zip(one, two, strict=True), 1):
        arms = [np.delete(result.obs["state"], TARGET_COLUMNS, 1) for result in (first, second)]
        assert_same_bits(arms[0], arms[1])
        targets = [result.obs["state"][:, TARGET_COLUMNS] for result in (first, second)]
        if step < shown:
            assert (targets[0][:, :3] != targets[1][:, :3]).all()
        else:
            assert_same_bits(targets[0], np.zeros((6, 8), np.float32))
            assert_same_bits(targets[1], np.zeros((6, 8), np.float32))
    assert_same_bits(twins[0].view.joint_position.copy(), start)
    assert (twins[0].view.joint_velocity == 0).all()
    for action in random_actions(twins[0], 4, seed):
        first, second = (env.step(action) for env in twins)
        assert (first.obs["state"][:, :7] != start.astype(np.float32)).all()
        if not first.final_envs.size:
            assert_same_bits(first.obs["state"], second.obs["state"])
            assert (first.obs["state"][:, TARGET_COLUMNS] == 0).all()
    np.testing.assert_array_equal(first.final_envs, np.arange(6))
    assert_same_bits(first.final_obs["state"], second.final_obs["state"])
    assert (first.obs["state"][:, 17:20] == twins[0].view.target.astype(np.float32)).all()


def test_the_memory_task_shows_what_reach_shows_and_costs_nothing_meanwhile() -> None:
    memory, plain = ReachConfig(shown_steps=3).build(5), ReachConfig().build(5)
    assert_same_bits(memory.reset(KEY)["state"], plain.reset(KEY)["state"])
    assert memory.spec.observations["state"] == plain.spec.observations["state"]
    for action in random_actions(memory, 6):
        result, expected = memory.step(action), plain.step(np.zeros_like(action))
        shown = memory.view.shown[0, 0]
        # A value function sees the target for as long as there is one.
        columns = memory.view.target, memory.view.offset, memory.view.distance[:, None]
        target = np.concatenate(columns, axis=1).astype(np.float32)
        assert_same_bits(result.obs["critic"][:, :7], target)
        if not shown:
            continue
        assert_same_bits(result.obs["state"], expected.obs["state"])
        np.testing.assert_allclose(result.reward, 0, atol=1e-12)


def test_holding_counts_only_once_the_arm_is_free() -> None:
    env = ReachConfig(shown_steps=4, hold_steps=2).build(3)
    env.reset(KEY)
    env.view.target[:] = env.view.hand
    still = np.zeros((3, 7), np.float32)
    for _ in range(4):
        assert not env.step(still).terminated.any()
        assert (env.view.held == 0).all()
    assert not env.step(still).terminated.any()
    result = env.step(still)
    assert result.terminated.all()
    assert (result.final_obs["state"][:, TARGET_COLUMNS] == 0).all()
    assert (result.episodes["is_success"] == 1).all()


def test_a_snapshot_in_the_midst_of_the_shown_steps_continues_to_the_bit() -> None:
    config = ReachConfig(shown_steps=3, max_episode_steps=8)
    env = config.build(4)
    env.reset(KEY)
    actions = random_actions(env, 12)
    for step in range(11):
        env.step(actions[step])
        other = config.build(4)
        other.restore(env.snapshot(), KEY)
        kept = env.snapshot()
        for action in actions[step + 1 :]:
            one, two = env.step(action), other.step(action)
            assert_same_bits(one.obs["state"], two.obs["state"])
            assert_same_bits(one.reward, two.reward)
        env.restore(kept, KEY)


def test_a_remembered_target_is_reached_in_the_time_left() -> None:
    env = ReachConfig(shown_steps=5).build(50)
    env.reset(KEY)
    success: list[float] = []
    while len(success) < 200:
        success.extend(env.step(resolved_rate(env)).episodes.get("is_success", ()))
    assert np.mean(success) >= 0.99


def test_a_bad_action_is_found_even_while_the_arm_is_held() -> None:
    env = ReachConfig(shown_steps=5).build(2)
    env.reset(KEY)
    with pytest.raises(NonFinite):
        env.step(np.full((2, 7), np.nan, np.float32))


def test_the_shown_steps_must_leave_time_to_move() -> None:
    ReachConfig(shown_steps=49)
    for steps in (0, 50):
        with pytest.raises(ValidationError, match="shown_steps"):
            ReachConfig(shown_steps=steps)


def test_weightless_terms_are_not_reported_and_unknown_ones_refused() -> None:
    env = ReachConfig(reward=ReachReward(hold=0)).build(1)
    assert "reward/hold" not in env.spec.statistics
    with pytest.raises(ValidationError):
        ReachConfig.model_validate({"reward": {"progres": 1.0}})
