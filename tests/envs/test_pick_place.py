from __future__ import annotations

from collections.abc import Callable

import mujoco
import numpy as np
import pytest
from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from pydantic import ValidationError

from etude.core.contracts import Array, Observations
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.kuka_scene import FINGERS, arm_table
from etude.envs.pick_place import PickPlace, PickPlaceConfig
from etude.envs.pick_place_expert import PickPlaceExpert
from etude.envs.pick_place_random import PickPlaceRandom, hashed_normal
from etude.envs.pick_place_scene import CUBE_HALF, TABLE_CENTER
from etude.envs.pick_place_terms import OUTCOMES, SLICES, STAGES, STATE

RANDOM = PickPlaceRandom(
    cube_mass=0.5, friction=0.3, servo_gain=0.2, observation_noise=0.002, observation_delay=2
)


class Watch:
    """How deep and how fast a held cube ever was, looked at after every control step."""

    def __init__(self, env: PickPlace) -> None:
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
    env, expert = PickPlace(config, rows), PickPlaceExpert(config, rows)
    watch = Watch(env)
    obs = env.reset(KEY)
    done = np.zeros(rows, np.int64)
    parts: dict[str, list[Array]] = {}
    while (done < episodes).any():
        result = env.step(expert.act(obs))
        obs = result.obs
        if look:
            watch.look()
        expert.reset(result.final_rows)
        counts = done[result.final_rows] < episodes
        done[result.final_rows] += 1
        for name, array in result.episodes.items():
            parts.setdefault(name, []).append(array[counts])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}, watch


def test_contract() -> None:
    config = PickPlaceConfig.anywhere(max_episode_steps=40)
    check_contract(
        lambda rows, threads: PickPlace(config, rows, threads), steps=90, exact_steps=200
    )


@pytest.mark.parametrize("control", ["hand", "joint"])
def test_contract_with_randomisation(control: str) -> None:
    values = {"control": control, "max_episode_steps": 40, "random": RANDOM}
    config = PickPlaceConfig.model_validate(values)
    check_contract(lambda rows, threads: PickPlace(config, rows, threads), steps=50, exact_steps=50)


def test_a_snapshot_in_the_middle_of_a_grasp_continues_on_a_new_instance() -> None:
    """Contact forces are not part of a restored state; what was felt must be remembered."""
    config = PickPlaceConfig.anywhere(random=RANDOM.model_copy(update={"observation_noise": 0.0}))
    env, expert = PickPlace(config, 6), PickPlaceExpert(config, 6)
    obs = env.reset(KEY)
    actions = []
    for step in range(60):
        if step == 12:
            assert env.view.held.any()
            snapshot = env.snapshot()
        actions.append(expert.act(obs))
        result = env.step(actions[-1])
        obs = result.obs
        expert.reset(result.final_rows)
    other = PickPlace(config, 6)
    other.restore(snapshot, KEY)
    for action in actions[12:]:
        again = other.step(action)
    assert_same_bits(again.obs["state"], result.obs["state"])
    assert_same_bits(again.reward, result.reward)
    assert_same_bits(other.snapshot()["simulation"]["state"], env.snapshot()["simulation"]["state"])


@pytest.mark.parametrize("make", [PickPlaceConfig, PickPlaceConfig.anywhere])
def test_no_episode_starts_solved(make: Callable[[], PickPlaceConfig]) -> None:
    config = make()
    env = PickPlace(config, 64)
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


@pytest.mark.slow
def test_the_expert_solves_a_thousand_episodes() -> None:
    found, _ = demonstrate(PickPlaceConfig.anywhere(), 100, 10)
    assert found["is_success"].mean() >= 0.99


def test_success_does_not_depend_on_the_time_step_or_the_cones() -> None:
    config = PickPlaceConfig.anywhere(substeps=50, cone="elliptic")
    found, _ = demonstrate(config, 30, 1)
    assert found["is_success"].mean() >= 0.96


@pytest.mark.slow
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
    env, dragger = PickPlace(config, rows), Dragger(rows, closed)
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
    env, expert = PickPlace(config, 4), PickPlaceExpert(config, 4)
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
    env = PickPlace(PickPlaceConfig(), 3)
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


def test_stages_add_up_to_their_end_minus_their_start() -> None:
    """Whatever the path: so that lingering, or going to and fro, earns nothing."""
    steps, rows = 22, 12
    config = PickPlaceConfig.anywhere()
    short = PickPlace(config.model_copy(update={"max_episode_steps": steps}), rows)
    long, expert = PickPlace(config, rows), PickPlaceExpert(config, rows)
    obs = short.reset(KEY)
    long.reset(KEY)
    start = long.view.stages.copy()
    noise = np.random.default_rng(0).normal(0, 0.2, (steps, rows, 5)).astype(np.float32)
    noise[:, :, -1] = 0.0
    for step in range(steps):
        action = np.clip(expert.act(obs) + noise[step], -1.0, 1.0)
        result = short.step(action)
        obs = result.obs
        long.step(action)
    gained = long.view.stages - start
    assert (gained[:, STAGES.index("carry")] > 0.1).any()
    for index, name in enumerate(STAGES):
        weight = getattr(config.reward, name)
        found = result.episodes[f"reward/{name}"]
        np.testing.assert_allclose(found, weight * gained[:, index], atol=1e-9)


def test_the_bonus_exceeds_what_is_left_to_gain_at_the_target() -> None:
    reward = PickPlaceConfig().reward
    assert reward.success > reward.carry + reward.place + reward.release + reward.clear


def test_hand_actions_move_the_hand_and_nothing_else() -> None:
    env = PickPlace(PickPlaceConfig.anywhere(start_jitter=0.0), 5)
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
    env = PickPlace(PickPlaceConfig.anywhere(), 8)
    env.reset(KEY)
    velocity = env.simulation.bind("qvel")[:, :7]
    for action in random_actions(env, 40):
        env.step(action)
        assert (np.abs(velocity) <= arm_table().speed * 1.05).all()


def test_joint_actions_move_the_joints_and_the_fingers() -> None:
    config = PickPlaceConfig(control="joint", start_jitter=0.0)
    env = PickPlace(config, 9)
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
    env = PickPlace(PickPlaceConfig(), 2)
    obs = env.reset(KEY)["state"]
    for name, term in STATE.items():
        np.testing.assert_array_equal(obs[:, SLICES[name]], term(env.view).astype(np.float32))
    assert obs.shape[1] == sum(_widths())


def test_fingers_feel_the_cube_and_not_the_table() -> None:
    env = PickPlace(PickPlaceConfig(cube_center=(0.1, -0.2)), 2)
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
    envs = [PickPlace(config, 8) for config in (plain, random)]
    for env in envs:
        env.reset(KEY)
    assert_same_bits(envs[0].view.target, envs[1].view.target)
    assert_same_bits(envs[0].view.cube, envs[1].view.cube)
    mass = envs[1].simulation.expand("body_mass")[:, envs[1].simulation.model.body("cube").id]
    assert len(set(mass.tolist())) == 8
    assert ((mass >= 0.05) & (mass <= 0.15)).all()


def test_observations_are_late_and_noisy_as_asked() -> None:
    late = PickPlaceConfig(random=PickPlaceRandom(observation_delay=3))
    env, plain = PickPlace(late, 16), PickPlace(PickPlaceConfig(), 16)
    shown, true = [env.reset(KEY)["state"]], [plain.reset(KEY)["state"]]
    for action in random_actions(plain, 12):
        shown.append(env.step(action).obs["state"])
        true.append(plain.step(action).obs["state"])
    delays = env.snapshot()["task"]["delay"]
    assert set(delays.tolist()) == {0, 1, 2, 3}
    for step in range(13):
        for row, delay in enumerate(delays.tolist()):
            assert_same_bits(shown[step][row], true[max(step - delay, 0)][row])
    noise = hashed_normal(np.arange(500, dtype=np.uint64), np.full(500, 7), 12)
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1.0) < 0.05


def test_a_config_that_would_start_solved_is_refused() -> None:
    with pytest.raises(ValidationError):
        PickPlaceConfig(min_distance=0.02)
    with pytest.raises(ValidationError):
        PickPlaceConfig(radius=0.05)
