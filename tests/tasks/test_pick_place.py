from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
import pytest
from pydantic import ValidationError

from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from etude.core.contracts import Array, Observations
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.robots.kuka import FINGERS, HAND_SITE, PALM, RESPONSE, Clearance, arm_table
from etude.planning import recipes
from etude.tasks.pick_place.arm import GUESS, STAGES
from etude.tasks.pick_place.scene import (
    CUBE_HALF,
    TABLE_CENTER,
    PickPlaceRandom,
    PickPlaceReward,
    scene_spec,
)
from etude.tasks.pick_place.task import PickPlaceConfig, PickPlaceExpert
from etude.tasks.pick_place.terms import CRITIC, OUTCOMES, SLICES, STATE, lies_at

RANDOM = PickPlaceRandom(
    cube_mass=0.5, friction=0.3, servo_gain=0.2, observation_noise=0.002, observation_delay=2
)


class Watch:
    """How deep and how fast a held cube ever was, looked at after every control step."""

    def __init__(self, env: MujocoEnv) -> None:
        self._env, self._model = env, env.simulation.model
        self._data = mujoco.MjData(self._model)
        self._qpos = env.simulation.bind("qpos")
        self._cube = self._model.geom("cube").id
        self.depth = self.speed = 0.0

    def look(self) -> None:
        view = self._env.view
        for row in np.flatnonzero(view.held):
            self.speed = max(self.speed, float(np.abs(view.cube_velocity[row, :3]).max()))
            self._data.qpos[:] = self._qpos[row]
            mujoco.mj_fwdPosition(self._model, self._data)
            contact = self._data.contact
            touching = (contact.geom == self._cube).any(axis=1)
            self.depth = max(self.depth, float(-contact.dist[touching].min()))


def demonstrate(
    config: PickPlaceConfig, rows: int, episodes: int, look: bool = False
) -> tuple[dict[str, Array], Watch]:
    """The expert's first `episodes` episodes of each row: {statistic: [rows * episodes]}."""
    env, expert = config.build(rows), PickPlaceExpert(config, rows)
    watch = Watch(env)
    obs = env.reset(KEY)
    done = np.zeros(rows, np.int64)
    parts: dict[str, list[Array]] = {}
    while (done < episodes).any():
        result = env.step(expert.act(obs))
        obs = result.obs
        if look:
            watch.look()
        expert.reset(result.final_envs)
        counts = done[result.final_envs] < episodes
        done[result.final_envs] += 1
        for name, array in result.episodes.items():
            parts.setdefault(name, []).append(array[counts])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}, watch


def test_contract() -> None:
    config = PickPlaceConfig.anywhere(max_episode_steps=40)
    check_contract(lambda rows, threads: config.build(rows, threads), steps=90, exact_steps=200)


@pytest.mark.parametrize("control", ["hand", "joint"])
def test_contract_with_randomisation(control: str) -> None:
    values = {"control": control, "max_episode_steps": 40, "random": RANDOM}
    config = PickPlaceConfig.model_validate(values)
    check_contract(lambda rows, threads: config.build(rows, threads), steps=50, exact_steps=50)


def test_a_snapshot_in_the_middle_of_a_grasp_continues_on_a_new_instance() -> None:
    """Contact forces are not part of a restored state; what was felt must be remembered."""
    config = PickPlaceConfig.anywhere(random=RANDOM.model_copy(update={"observation_noise": 0.0}))
    env, expert = config.build(6), PickPlaceExpert(config, 6)
    obs = env.reset(KEY)
    actions = []
    for step in range(60):
        if step == 12:
            assert env.view.held.any()
            snapshot = env.snapshot()
        actions.append(expert.act(obs))
        result = env.step(actions[-1])
        obs = result.obs
        expert.reset(result.final_envs)
    other = config.build(6)
    other.restore(snapshot, KEY)
    for action in actions[12:]:
        again = other.step(action)
    assert_same_bits(again.obs["state"], result.obs["state"])
    assert_same_bits(again.reward, result.reward)
    assert_same_bits(other.snapshot()["simulation"]["state"], env.snapshot()["simulation"]["state"])


@pytest.mark.parametrize("make", [PickPlaceConfig, PickPlaceConfig.anywhere])
def test_no_episode_starts_solved(make: Callable[[], PickPlaceConfig]) -> None:
    config = make()
    env = config.build(64)
    still = np.zeros((64, env.spec.action.array.shape[0]), np.float32)
    for seed in range(6):
        env.reset(Key(seed))
        view = env.view
        assert (view.error >= config.min_distance).all()
        assert config.min_distance > config.radius
        assert not (view.success | view.lifted | view.carried | view.placed).any()
        side = np.array(config.cube_area) / 2 + 1e-9
        assert (np.abs(view.cube[:, :2] - TABLE_CENTER[:2] - config.cube_center) <= side).all()
        side = np.array(config.target_area) / 2 + 1e-9
        assert (np.abs(view.target[:, :2] - TABLE_CENTER[:2] - config.target_center) <= side).all()
        assert not env.step(still).terminated.any()
        np.testing.assert_allclose(view.height, 0.0, atol=5e-4)


def test_the_expert_solves_the_fixed_task() -> None:
    found, _ = demonstrate(PickPlaceConfig(), 20, 1)
    assert found["is_success"].all()
    assert found["placement_error"].mean() < 0.004
    assert found["drop_height"].mean() < 0.002
    assert (found["outcome"] == OUTCOMES.index("success")).all()


def test_the_expert_solves_the_task_anywhere_by_sound_physics() -> None:
    found, watch = demonstrate(PickPlaceConfig.anywhere(), 50, 2, look=True)
    assert found["is_success"].mean() >= 0.97
    assert found["placement_error"].mean() < 0.004
    assert found["drop_height"].mean() < 0.002
    assert 0 < watch.depth < 0.003
    assert watch.speed < 2.0


@pytest.mark.rotated
def test_the_expert_solves_a_thousand_episodes() -> None:
    found, _ = demonstrate(PickPlaceConfig.anywhere(), 100, 10)
    assert found["is_success"].mean() >= 0.99


def test_success_does_not_depend_on_the_time_step_or_the_cones() -> None:
    config = PickPlaceConfig.anywhere(substeps=50, cone="elliptic")
    found, _ = demonstrate(config, 30, 1)
    assert found["is_success"].mean() >= 0.96


@pytest.mark.rotated
def test_success_does_not_depend_on_the_integrator() -> None:
    """At 0.5 ms, where what implicitfast leaves out of a contact is small."""
    config = PickPlaceConfig.anywhere(substeps=200, integrator="implicitfast")
    found, _ = demonstrate(config, 20, 1)
    assert found["is_success"].mean() >= 0.95


def test_the_expert_copes_with_randomised_physics() -> None:
    physics = {"observation_delay": 0, "observation_noise": 0.0005}
    config = PickPlaceConfig.anywhere(random=RANDOM.model_copy(update=physics))
    found, _ = demonstrate(config, 30, 1)
    assert found["is_success"].mean() >= 0.9


class Dragger:
    """Comes down around the cube, moves it along the table into the target, and goes up again."""

    def __init__(self, rows: int, closed: bool) -> None:
        self._phase, self._waited = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._closed = closed

    def act(self, obs: Observations) -> Array:
        seen = {name: obs["state"][:, part] for name, part in SLICES.items()}
        offset, target, phase = seen["cube_offset"], seen["target_offset"], self._phase
        flat = np.linalg.norm(offset[:, :2], axis=1)
        self._waited[:] = np.where(phase == 2, self._waited + 1, self._waited)
        inside = np.abs(target[:, 1]) < 0.01
        phase[(phase == 3) & inside] = 4
        phase[(phase == 2) & (self._waited > 6)] = 3
        phase[(phase == 1) & (np.abs(offset[:, 2]) < 0.006)] = 2
        phase[(phase == 0) & (flat < 0.01)] = 1
        hover, level, up = offset.copy(), np.clip(target, -0.02, 0.02), np.zeros_like(offset)
        hover[:, 2] += 0.055
        # Along y only, with the hand's middle on the cube's, or it slips out of open fingers.
        level[:, [0, 2]] = 1.5 * offset[:, [0, 2]]
        up[:, 2] = np.where(seen["gripper"][:, 0] > 0.9, 0.1, 0.0)
        moves = np.stack([hover, offset, 0 * up, level, up])[phase, np.arange(len(offset))]
        actions = np.ones((len(offset), 4), np.float32)
        actions[:, :3] = np.clip(moves / 0.05, -1.0, 1.0)
        if self._closed:
            actions[(phase == 2) | (phase == 3), 3] = -1.0
        return actions


@pytest.mark.parametrize("closed", [False, True])
def test_a_cube_dragged_into_the_target_without_lifting_never_succeeds(closed: bool) -> None:
    rows = 12
    config = PickPlaceConfig(cube_turn=0.0, cube_area=(0, 0.02), target_area=(0, 0.02))
    env, dragger = config.build(rows), Dragger(rows, closed)
    obs = env.reset(KEY)
    rested, gripped = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for _ in range(80):
        result = env.step(dragger.act(obs))
        obs = result.obs
        assert not result.terminated.any()
        view = env.view
        slow = np.abs(view.cube_velocity).max(axis=1) < 0.01
        free = ~view.touch.any(axis=1) & (view.distance > 0.08)
        rested |= (view.error <= config.radius) & slow & free
        gripped |= view.held
    assert rested.sum() >= 3, "some must end as a success would, or this shows nothing"
    assert gripped.all() == closed
    assert not (view.lifted | view.carried | view.success).any()


def test_a_cube_let_go_of_outside_must_be_picked_up_again() -> None:
    config = PickPlaceConfig()
    env, expert = config.build(4), PickPlaceExpert(config, 4)
    obs = env.reset(KEY)
    while not env.view.carried.all():
        obs = env.step(expert.act(obs)).obs
    release = np.array([[0.0, 0.0, 0.0, 1.0]] * 4, np.float32)
    for _ in range(15):
        env.step(release)
    assert env.view.lifted.all()
    assert not env.view.carried.any()
    assert (env.view.drop > 0.02).all()


def test_a_cube_that_leaves_the_table_ends_the_episode() -> None:
    env = PickPlaceConfig().build(3)
    env.reset(KEY)
    beside = env.simulation.model.joint("cube").qposadr[0]
    env.simulation.bind("qpos")[1, beside + 1] = 0.3 + CUBE_HALF
    for _ in range(10):
        result = env.step(np.array([[0, 0, 0, 1]] * 3, np.float32))
        if result.terminated.any():
            break
    np.testing.assert_array_equal(result.terminated, [False, True, False])
    assert result.episodes["is_success"] == [0.0]
    assert result.episodes["reward/fallen"] == [-2.0]
    assert OUTCOMES[int(result.episodes["outcome"][0])] == "never reached"


STAGES_ALONE = PickPlaceReward(action_cost=0.0, success=0.0, fallen=0.0, align=0.5)


def record(
    env: MujocoEnv, act: Callable[[Observations], Array], steps: int
) -> tuple[Array, Array, Array]:
    """Rewards [steps, rows], stages [steps + 1, rows, 7], and whether [rows] terminated at last."""
    obs = env.reset(KEY)
    rewards, stages = [], [env.view.stages.copy()]
    for _ in range(steps):
        result = env.step(act(obs))
        obs = result.obs
        rewards.append(result.reward.astype(np.float64))
        stages.append(env.view.stages.copy())
    return np.array(rewards), np.array(stages), result.terminated


@pytest.mark.parametrize("shaping", [0.0, 0.3, 1.0])
def test_lingering_and_going_to_and_fro_earn_nothing(shaping: float) -> None:
    """Discounted as a learner does, a path is worth what it reached first, and its two ends.

    Only the new heights of a stage count, each when it is reached; the rest of the reward is worth
    gamma^T phi(end) - phi(start), however long and wherever the arm lingers in between.
    """
    steps, rows, gamma = 22, 12, 0.9
    config = PickPlaceConfig.anywhere(discount=gamma, shaping=shaping, reward=STAGES_ALONE)
    expert = PickPlaceExpert(config, rows)
    noise = iter(np.random.default_rng(0).normal(0, 0.2, (steps, rows, 5)).astype(np.float32))

    def hesitant(obs: Observations) -> Array:
        action, shaking = expert.act(obs), next(noise)
        shaking[:, -1] = 0.0
        return np.clip(action + shaking, -1.0, 1.0)

    rewards, stages, terminated = record(config.build(rows), hesitant, steps)
    assert not terminated.any()
    weights = np.array([getattr(config.reward, name) for name in STAGES])
    assert (stages[-1, :, STAGES.index("carry")] - stages[0, :, STAGES.index("carry")] > 0.1).any()
    news = np.diff(np.maximum.accumulate(stages, axis=0), axis=0) @ weights
    discounts = gamma ** np.arange(steps)
    potential = stages @ weights
    assert (np.diff(potential, axis=0) < -0.01).any(), "some step must lose, or this shows little"
    expected = discounts @ news + shaping * (gamma**steps * potential[-1] - potential[0])
    np.testing.assert_allclose(discounts @ rewards, expected, atol=1e-4)


@pytest.mark.parametrize("gamma", [0.9, 0.99])
def test_where_an_episode_terminates_the_potential_is_zero(gamma: float) -> None:
    """What a cube thrown off the table had been worth is given back."""
    config = PickPlaceConfig(discount=gamma, shaping=1.0, reward=STAGES_ALONE)
    env = config.build(2)
    env.reset(KEY)
    beside = env.simulation.model.joint("cube").qposadr[0]
    env.simulation.bind("qpos")[1, beside + 1] = 0.3 + CUBE_HALF
    weights = np.array([getattr(config.reward, name) for name in STAGES])
    terminated, best = np.zeros(2, np.bool_), env.view.stages.copy()
    while not terminated.any():
        before = env.view.stages.copy()
        best = np.maximum(best, before)
        result = env.step(np.array([[0, 0, 0, 1]] * 2, np.float32))
        terminated = result.terminated
    np.testing.assert_array_equal(terminated, [False, True])
    assert (before[1] @ weights) > 0.1
    assert result.reward[1] == pytest.approx(-(before[1] @ weights), abs=2e-2)
    after = env.view.stages[0]
    news = np.maximum(after - best[0], 0.0)
    expected = (gamma * after - before[0] + news) @ weights
    assert result.reward[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("change", [{"episodic": True}, {"shaping": 0.0}])
def test_a_sum_of_rewards_is_not_shaped(change: dict[str, Any]) -> None:
    """In a sum a potential does not cancel: it would pay to hold the cube until time runs out."""

    def rewards(config: PickPlaceConfig) -> Array:
        env = config.build(4)
        env.reset(KEY)
        return np.array([env.step(action).reward for action in random_actions(env, 20)])

    shaped = PickPlaceConfig(reward=STAGES_ALONE)
    assert rewards(shaped).min() < -1e-3
    assert rewards(shaped.model_copy(update=change)).min() >= 0.0


def test_the_cube_lies_at_the_target_by_millimetres() -> None:
    offsets = np.array([[0, 0, 0], [0.03, 0, 0], [0, 0, -0.008], [0.03, 0, 0.008], [0.1, 0, 0]])
    expected = np.exp([0.0, -1.0, -1.0, -2.0, -((0.1 / 0.03) ** 2)])
    np.testing.assert_allclose(lies_at(offsets)[:, 0], expected)


def test_the_bonus_exceeds_what_is_left_to_gain_at_a_success() -> None:
    """Otherwise it would pay to put a success off."""
    config, rows = PickPlaceConfig(), 8
    env, expert = config.build(rows), PickPlaceExpert(config, rows)
    weights = np.array([getattr(config.reward, name) for name in STAGES])
    obs, done, left = env.reset(KEY), 0, []
    while done < rows:
        best = env.view.best_stages.copy()
        result = env.step(expert.act(obs))
        ended = result.final_envs[result.terminated[result.final_envs]]
        left += [*((1.0 - best[ended]) @ weights)]
        done, obs = done + len(ended), result.obs
        expert.reset(result.final_envs)
    assert max(left) < config.reward.success


def test_hand_actions_move_the_hand_and_nothing_else() -> None:
    env = PickPlaceConfig.anywhere(start_jitter=0.0).build(5)
    env.reset(KEY)
    before, yaw = env.view.hand.copy(), env.view.hand_yaw.copy()
    actions = np.zeros((5, 5), np.float32)
    actions[[0, 1, 2, 3], [0, 1, 2, 3]] = 0.5
    env.step(actions)
    moved, turned = env.view.hand - before, env.view.hand_yaw - yaw
    covered = 1 - np.exp(-1)
    np.testing.assert_allclose(moved[:3], 0.025 * covered * np.eye(3), atol=0.003)
    np.testing.assert_allclose(moved[3:], 0.0, atol=0.003)
    np.testing.assert_allclose(turned, [0, 0, 0, 0.2 * covered, 0], atol=0.02)


def test_no_joint_is_faster_than_its_limit() -> None:
    env = PickPlaceConfig.anywhere().build(8)
    env.reset(KEY)
    velocity = env.simulation.bind("qvel")[:, :7]
    for action in random_actions(env, 40):
        env.step(action)
        assert (np.abs(velocity) <= arm_table().speed * 1.05).all()


def test_joint_actions_move_the_joints_and_the_fingers() -> None:
    config = PickPlaceConfig(control="joint", start_jitter=0.0)
    env = config.build(9)
    env.reset(KEY)
    view = env.view
    before, opening = view.joint_position.copy(), view.opening.copy()
    actions = np.zeros((9, 8), np.float32)
    actions[np.arange(7), np.arange(7)] = 0.5
    actions[:, -1] = 1.0
    actions[8, -1] = -1.0
    env.step(actions)
    moved = view.joint_position - before
    assert (np.diag(moved[:7]) > 0.01).all()
    np.testing.assert_allclose(moved[7], 0.0, atol=1e-3)
    np.testing.assert_allclose(view.opening[:8], opening[:8], atol=1e-3)
    assert view.opening[8] < opening[8] - 0.01
    assert env.step(actions).obs["state"].shape == (9, sum(_widths()) + 7)
    with pytest.raises(UsageError):
        PickPlaceExpert(config, 1)


def _widths() -> list[int]:
    return [part.stop - part.start for part in SLICES.values()]


def test_parts_of_the_observation_are_where_they_are_said_to_be() -> None:
    env = PickPlaceConfig().build(2)
    obs = env.reset(KEY)["state"]
    for name, term in STATE.items():
        np.testing.assert_array_equal(obs[:, SLICES[name]], term(env.view).astype(np.float32))
    assert obs.shape[1] == sum(_widths())


def test_what_the_success_test_remembers_is_for_the_critic_alone() -> None:
    """Two arms that stand alike see the same, whatever has happened to their cubes before."""
    still, seen = np.array([[0, 0, 0, 1]], np.float32), []
    for carried in (False, True):
        env = PickPlaceConfig().build(1)
        env.reset(KEY)
        view, cube = env.view, env.simulation.model.joint("cube").qposadr[0]
        env.simulation.bind("qpos")[:, cube : cube + 3] = view.target
        view.carried[:] = carried
        obs = env.step(still).obs
        assert (view.carried.all(), view.placed.all()) == (carried, carried)
        parts = np.concatenate([term(view) for term in CRITIC.values()], axis=1)
        assert_same_bits(obs["critic"], parts.astype(np.float32))
        np.testing.assert_array_equal(obs["critic"][:, :2], [[carried, carried]])
        seen.append(obs["state"])
    assert_same_bits(*seen)
    config = recipes.find("pick-place").policy
    assert "critic" in config.critic_reads
    assert "critic" not in config.actor_reads


def test_fingers_feel_the_cube_and_not_the_table() -> None:
    env = PickPlaceConfig(cube_center=(0.1, -0.2)).build(2)
    env.reset(KEY)
    for _ in range(20):
        env.step(np.array([[0, 0, -1, -1]] * 2, np.float32))
    model, data = env.simulation.model, mujoco.MjData(env.simulation.model)
    data.qpos[:] = env.simulation.bind("qpos")[0]
    mujoco.mj_forward(model, data)
    pairs = {(model.geom(c.geom1).name, model.geom(c.geom2).name) for c in data.contact}
    assert {("table", finger) for finger in FINGERS} <= pairs
    assert not env.view.touch.any()


def test_randomised_episodes_start_alike_and_differ_after() -> None:
    plain, random = PickPlaceConfig(), PickPlaceConfig(random=RANDOM)
    envs = [config.build(8) for config in (plain, random)]
    for env in envs:
        env.reset(KEY)
    assert_same_bits(envs[0].view.target, envs[1].view.target)
    assert_same_bits(envs[0].view.cube, envs[1].view.cube)
    mass = envs[1].simulation.expand("body_mass")[:, envs[1].simulation.model.body("cube").id]
    assert len(set(mass.tolist())) == 8
    expand = envs[1].simulation.expand
    stiffness, damping = expand("actuator_gainprm")[:, :7, 0], expand("dof_damping")[:, :7]
    assert len(set(stiffness[:, 0].tolist())) == 8
    np.testing.assert_allclose(damping / stiffness, RESPONSE)
    assert ((mass >= 0.05) & (mass <= 0.15)).all()


def test_observations_are_late_as_asked() -> None:
    late = PickPlaceConfig(random=PickPlaceRandom(observation_delay=3))
    env, plain = late.build(16), PickPlaceConfig().build(16)
    shown, true = [env.reset(KEY)["state"]], [plain.reset(KEY)["state"]]
    for action in random_actions(plain, 12):
        shown.append(env.step(action).obs["state"])
        true.append(plain.step(action).obs["state"])
    delays = env.snapshot()["task"]["state.delay"]
    assert set(delays.tolist()) == {0, 1, 2, 3}
    for step in range(13):
        for row, delay in enumerate(delays.tolist()):
            assert_same_bits(shown[step][row], true[max(step - delay, 0)][row])


def disturbed(config: PickPlaceRandom, rows: int, steps: int) -> tuple[list[Array], list[Array]]:
    """{"state"} of the same steps as they are shown, and as they are."""
    env, plain = PickPlaceConfig(random=config).build(rows), PickPlaceConfig().build(rows)
    shown, true = [env.reset(KEY)["state"]], [plain.reset(KEY)["state"]]
    for action in random_actions(plain, steps):
        shown.append(env.step(action).obs["state"])
        true.append(plain.step(action).obs["state"])
    return shown, true


def test_noise_cannot_be_averaged_away_within_an_observation() -> None:
    """Whatever says the same of cube and target says it with the same error."""
    size, rows = 0.01, 200
    shown, true = disturbed(PickPlaceRandom(observation_noise=size), rows, 4)
    last_cube: Array | None = None
    for seen, real in zip(shown, true, strict=True):
        noise = {name: (seen - real)[:, part] for name, part in SLICES.items()}
        for name in ("hand_position", "hand_velocity", "hand_turn", "gripper", "cube_turn"):
            assert not noise[name].any(), name
        cube, target = noise["cube_offset"], noise["hand_to_target"]
        assert abs(cube.std() / size - 1) < 0.1
        assert abs(target.std() / size - 1) < 0.1
        assert abs(np.corrcoef(cube.ravel(), target.ravel())[0, 1]) < 0.15
        np.testing.assert_allclose(noise["target_offset"], target - cube, atol=1e-6)
        near = lies_at(seen[:, SLICES["target_offset"]])
        np.testing.assert_allclose(seen[:, SLICES["at_target"]], near, atol=1e-6)
        if last_cube is not None:
            moved = (cube - last_cube) / 0.1
            np.testing.assert_allclose(noise["cube_velocity"], moved, atol=2e-6)
            assert abs(np.corrcoef(cube.ravel(), last_cube.ravel())[0, 1]) < 0.15
        last_cube = cube


def test_a_measurement_that_is_shown_again_is_the_same() -> None:
    """Until the first late observation arrives, the one at the start is all there is to see."""
    late = PickPlaceRandom(observation_noise=0.01, observation_delay=3)
    env = PickPlaceConfig(random=late).build(16)
    shown = [env.reset(KEY)["state"]]
    for action in random_actions(env, 4):
        shown.append(env.step(action).obs["state"])
    delays = env.snapshot()["task"]["state.delay"]
    assert delays.max() == 3
    for row, delay in enumerate(delays.tolist()):
        for step in range(1, delay + 1):
            assert_same_bits(shown[step][row], shown[0][row])
        assert (shown[delay + 1][row] != shown[0][row]).any()


def lying_down(model: mujoco.MjModel, hand: Array) -> Array:
    """[7] joint angles that put the hand at [3] m, its fingers level and pointing away."""
    data, site = mujoco.MjData(model), model.site(HAND_SITE).id
    data.qpos[:7] = GUESS
    wanted = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    translation, rotation = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for _ in range(200):
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        turn = 0.5 * np.cross(data.site_xmat[site].reshape(3, 3), wanted, axis=0).sum(axis=1)
        error = np.concatenate([hand - data.site_xpos[site], turn])
        mujoco.mj_jacSite(model, data, translation, rotation, site)
        jacobian = np.concatenate([translation, rotation])[:, :7]
        square = jacobian @ jacobian.T + 0.0025 * np.eye(6)
        data.qpos[:7] += jacobian.T @ np.linalg.solve(square, error)
    assert np.abs(error).max() < 1e-6
    return np.array(data.qpos[:7])


@pytest.mark.parametrize("gap", [0.004, -0.0003])
def test_a_cube_under_the_palm_is_not_let_go_of(gap: float) -> None:
    """Fingers touch nothing and are 11 cm away, and the palm lies on the cube, or just over it."""
    env = PickPlaceConfig(control="joint").build(2)
    env.reset(KEY)
    model, palm_half = env.simulation.model, 0.035
    hand = TABLE_CENTER + np.array([0.1, 0.0, 2 * CUBE_HALF + palm_half + gap])
    qpos, cube = env.simulation.bind("qpos"), model.joint("cube").qposadr[0]
    qpos[:, :7] = lying_down(model, hand)
    qpos[:, cube : cube + 2] = hand[:2] - [0.138 - 0.045, 0.0]
    # The same arm, and a cube that lies beside it.
    qpos[1, cube + 1] += 0.2
    env.view.target[:, :2] = qpos[:, cube : cube + 2]
    env.view.carried[:] = True
    succeeded = np.zeros(2, np.bool_)
    for _ in range(3):
        result = env.step(np.array([[*[0] * 7, 1]] * 2, np.float32))
        succeeded |= result.terminated
        assert env.view.placed[0]
        assert env.view.distance[0] > 0.1
        assert not env.view.touch[0].any()
    np.testing.assert_array_equal(succeeded, [False, True])


def test_clearance_is_the_distance_to_the_nearest_surface() -> None:
    """Against MuJoCo's own distance to a sphere so small that it is a point."""
    env = PickPlaceConfig().build(1)
    spec = scene_spec(0.0125)
    spot = spec.worldbody.add_body(name="spot", mocap=True)
    spot.add_geom(name="spot", type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[1e-4, 0, 0])
    model = spec.compile()
    data, clearance = mujoco.MjData(model), Clearance(env.simulation)
    stream, nearest = np.random.default_rng(0), set()
    names = (PALM, *arm_table().names)
    for _ in range(200):
        angles = stream.uniform(*arm_table().range.T)
        data.qpos[:7] = angles
        env.simulation.bind("qpos")[0, :7] = angles
        env.simulation.forward()
        mujoco.mj_kinematics(model, data)
        about = data.geom(names[stream.integers(len(names))]).xpos
        point = about + stream.uniform(-0.3, 0.3, 3)
        data.mocap_pos[0] = point
        mujoco.mj_forward(model, data)
        ids = [model.geom(name).id for name in names]
        found = [
            mujoco.mj_geomDistance(model, data, i, model.geom("spot").id, 9, None) for i in ids
        ]
        if min(found) < 0.0:
            continue
        nearest.add(names[int(np.argmin(found))])
        assert clearance.of(point[None])[0] == pytest.approx(min(found) + 1e-4, abs=1e-5)
    assert len(nearest) >= 6


def test_a_config_that_would_start_solved_is_refused() -> None:
    with pytest.raises(ValidationError):
        PickPlaceConfig(min_distance=0.02)
    with pytest.raises(ValidationError):
        PickPlaceConfig(radius=0.05)
