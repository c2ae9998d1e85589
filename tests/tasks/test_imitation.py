from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from etude.core.contracts import Array
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.data.motion.skeleton import NUM_BODIES
from etude.envs.mujoco.env import MujocoEnv
from etude.tasks.imitation.imitator import NUM_ACTIONS, NUM_STYLE, style_windows
from etude.tasks.imitation.task import ImitationConfig

pytest.importorskip("pybullet_data", reason="it holds the clips (the extra 'mocap')")
MANY = ("walk", "kick", "backflip")


def make(rows: int = 6, **changes: Any) -> MujocoEnv:
    return ImitationConfig(**{"clips": MANY, **changes}).build(rows)


def keep_on_reference(env: MujocoEnv) -> None:
    """Let physics do nothing but put every row where its clip is, as each step is measured."""
    update, figure = env._update, env.view

    def placed() -> None:
        frames = figure.library.frame(figure.motion, figure.start + env.elapsed)
        figure.pose[:], figure.speed[:] = frames.pose, frames.speed
        env.simulation.forward()
        update()

    env._update = placed  # type: ignore[method-assign]


def still(env: MujocoEnv) -> Array:
    return np.zeros((env.num_envs, NUM_ACTIONS), np.float32)


def test_contract() -> None:
    config = ImitationConfig(
        clips=MANY, style_window=3, measure=True, future=(1, 5), max_episode_steps=40
    )
    check_contract(lambda rows, threads: config.build(rows, threads), steps=100)


@pytest.mark.parametrize(
    "changes",
    [
        {"terminate_at": None, "terminate_mean": 0.5},
        {"control": "absolute", "future": (), "terminate_at": None, "terminate_below": 0.4},
    ],
)
def test_contract_of_variants(changes: dict[str, Any]) -> None:
    config = ImitationConfig(clips=MANY, **changes)
    check_contract(lambda rows, threads: config.build(rows, threads), steps=60, exact_steps=60)


def test_a_figure_on_its_reference_earns_everything() -> None:
    env = make(64, measure=True)
    keep_on_reference(env)
    env.reset(KEY)
    for _ in range(60):
        result = env.step(still(env))
        # Velocities of bodies are differences over two frames; those of joints follow exactly.
        assert result.reward.min() > 0.9
        assert not result.terminated.any()
        for name in ("mpjpe_g", "mpjpe_l", "mpjpe_pa", "vel_dist", "accel_dist"):
            assert (result.episodes.get(name, np.zeros(1)) < 1e-6).all()
        assert (result.episodes.get("success_25", np.ones(1)) == 1).all()
    # Single precision: a micrometre, and near no angle at all a thousandth of a radian.
    np.testing.assert_allclose(env.view.position_error, 0, atol=1e-11)
    np.testing.assert_allclose(env.view.turn_error, 0, atol=1e-6)
    np.testing.assert_allclose(env.view.spin_error, 0, atol=4.0)


def test_the_zero_action_follows_the_clip_for_a_while() -> None:
    env = make(64, clips=("walk",))
    env.reset(KEY)
    rewards = [env.step(still(env)).reward.mean() for _ in range(5)]
    assert min(rewards) > 0.85
    alone = make(64, clips=("walk",), control="absolute")
    alone.reset(KEY)
    assert alone.step(still(alone)).reward.mean() < rewards[0]


def test_one_body_far_off_ends_an_episode_and_the_mean_another() -> None:
    strict, lax = make(4, terminate_at=0.3), make(4, terminate_at=None, terminate_mean=0.5)
    for env, moved, ends in ((strict, 0.2, False), (strict, 0.31, True), (lax, 0.31, False),
                             (lax, 0.55, True)):  # fmt: skip
        env.reset(KEY)
        env.view.pose[:, 0] += moved
        result = env.step(still(env))
        assert (result.terminated == ends).all()
        assert not result.truncated.any()
        if ends:
            assert (result.episodes["is_success"] == 0).all()


def test_a_figure_that_lies_down_can_end_an_episode() -> None:
    env = make(2, clips=("walk",), terminate_at=None, terminate_below=1.2)
    env.reset(KEY)
    env.view.pose[0, 2] += 1.0
    np.testing.assert_array_equal(env.step(still(env)).terminated, [False, True])


def test_evaluation_plays_each_motion_once_from_its_first_frame() -> None:
    config = ImitationConfig(clips=MANY, style_window=3).for_evaluation()
    assert (config.start, config.order, config.measure) == ("first", "in turn", True)
    assert (config.terminate_at, config.terminate_mean) == (None, 0.5)
    env = config.build(6)
    keep_on_reference(env)
    env.reset(KEY)
    first = env.view.library.frame(np.arange(6) % 3, np.zeros(6, np.int64))
    np.testing.assert_array_equal(env.view.pose, first.pose)
    lengths = np.zeros(6)
    for step in range(1, env.spec.max_episode_steps + 1):
        result = env.step(still(env))
        fresh = [row for row in result.final_envs if not lengths[row]]
        lengths[fresh] = step
        if result.final_envs.size:
            np.testing.assert_array_equal(result.episodes["motion"], result.final_envs % 3)
            assert (result.episodes["is_success"] == 1).all()
            assert (result.episodes["progress"] == 1).all()
    # Loops go on for 10 s, the kick is played to its end.
    kick = int(env.view.library.cycles[1]) - 1
    np.testing.assert_array_equal(lengths, [300, kick, 300] * 2)


def test_errors_are_those_of_the_episode() -> None:
    env = make(3, order="in turn", start="first", terminate_at=None, measure=True,
               max_episode_steps=5)  # fmt: skip
    keep_on_reference(env)
    update = env._update

    def aside() -> None:
        """Whole figures 0.3 m aside from the third step on."""
        env.view.library.frames.pose[:, 1] += 0.3 * (env.elapsed[0] == 3)
        update()

    reference = env.view.library.frames.position.copy()
    env._update = aside  # type: ignore[method-assign]
    env.reset(KEY)
    for _ in range(5):
        result = env.step(still(env))
    assert_same_bits(env.view.library.frames.position, reference)
    played = result.episodes
    np.testing.assert_allclose(played["mpjpe_g"], 3 * 300 / 5, rtol=1e-6)
    np.testing.assert_allclose(played["mpjpe_l"], 0, atol=1e-6)
    np.testing.assert_allclose(played["mpjpe_pa"], 0, atol=1e-3)
    np.testing.assert_allclose(played["vel_dist"], 300 / 5, rtol=1e-6)
    np.testing.assert_allclose(played["accel_dist"], 600 / 4, rtol=1e-6)
    np.testing.assert_array_equal(played["success_25"], 0)
    np.testing.assert_array_equal(played["is_success"], 1)


@pytest.mark.parametrize(
    ("late", "far", "once", "once_25"),
    [(1, 0.6, 1, 1), (0, 0.6, 0, 0), (-5, 0.3, 1, 0), (1, 0.3, 1, 1)],
)
def test_once_through_is_told_however_long_a_clip_loops(
    late: int, far: float, once: int, once_25: int
) -> None:
    config = ImitationConfig(clips=("walk",), evaluation_steps=60).for_evaluation()
    env = config.build(1)
    keep_on_reference(env)
    update, strays = env._update, int(env.view.library.cycles[0]) + late

    def aside() -> None:
        env.view.library.frames.pose[:, 1] += far * (env.elapsed[0] == strays)
        update()

    env._update = aside  # type: ignore[method-assign]
    env.reset(KEY)
    result = env.step(still(env))
    while not result.final_envs.size:
        result = env.step(still(env))
    assert result.episodes["is_success"] == (far < 0.5)
    assert (result.episodes["once"], result.episodes["once_25"]) == (once, once_25)


def test_a_loop_that_is_judged_for_less_than_its_length_never_came_to_its_end() -> None:
    env = ImitationConfig(clips=MANY, evaluation_steps=20).for_evaluation().build(3)
    assert int(env.view.library.cycles[0]) > 20
    keep_on_reference(env)
    env.reset(KEY)
    once: dict[int, float] = {}
    while len(once) < 3:
        result = env.step(still(env))
        for row, told in zip(result.final_envs, result.episodes.get("once", ()), strict=True):
            once.setdefault(int(row), told)
    assert once == {0: 0, 1: 1, 2: 0}  # the kick does not loop


def test_motions_are_drawn_by_weight() -> None:
    env = make(600, max_episode_steps=1, terminate_at=None)
    for weights, chances in (
        (None, np.ones(3) / 3),
        (np.array([1.0, 2.0, 5.0]), np.array([1, 2, 5]) / 8),
        (np.array([0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0])),
    ):
        env.view.follow({} if weights is None else {"weights": weights})
        env.reset(KEY)
        counts = np.bincount(env.view.motion, minlength=3)
        for _ in range(3):
            env.step(still(env))
            counts += np.bincount(env.view.motion, minlength=3)
        possible = chances > 0
        assert counts[~possible].sum() == 0
        expected = chances[possible] * counts.sum()
        # 13.8 is passed once in 1,000 times with two degrees of freedom.
        assert ((counts[possible] - expected) ** 2 / expected).sum() < 13.8


def test_weights_change_new_episodes_only_and_need_to_fit() -> None:
    env = make(8)
    env.reset(KEY)
    before = env.view.motion.copy()
    env.view.follow({"weights": np.array([0.0, 0.0, 1.0])})
    result = env.step(still(env))
    kept = np.setdiff1d(np.arange(8), result.final_envs)
    np.testing.assert_array_equal(env.view.motion[kept], before[kept])
    for wrong in ([1.0, 1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [np.nan, 1.0, 1.0]):
        with pytest.raises(UsageError, match="weights"):
            env.view.follow({"weights": np.array(wrong)})


def test_starts_depend_on_the_key_alone_and_reach_all_frames() -> None:
    one, two, other = make(400), make(400), make(400)
    assert_same_bits(one.reset(Key(1))["state"], two.reset(Key(1))["state"])
    other.reset(Key(2))
    assert (one.view.start != other.view.start).any()
    for motion in range(3):
        starts = one.view.start[one.view.motion == motion]
        last = one.view.library.cycles[motion] - 1
        assert starts.min() < 5
        assert last - 20 < starts.max() <= last


@pytest.mark.parametrize("window", [1, 4])
def test_style_on_the_reference_is_the_references_style(window: int) -> None:
    config = ImitationConfig(clips=MANY, style_window=window, max_episode_steps=60)
    reference = style_windows(config)
    env = config.build(12)
    assert reference.shape[1:] == (window, NUM_STYLE)
    assert reference.dtype == np.float32
    keep_on_reference(env)
    seen = env.reset(KEY)["style"]
    first = np.concatenate([[0], np.cumsum(env.view.library.cycles)[:-1]])
    for _ in range(120):
        time = (env.view.start + env.elapsed) % env.view.library.cycles[env.view.motion]
        np.testing.assert_allclose(seen, reference[first[env.view.motion] + time], atol=1e-5)
        seen = env.step(still(env)).obs["style"]


def test_style_between_frames_is_between_their_styles() -> None:
    config = ImitationConfig(clips=("walk",), style_window=3, max_episode_steps=60)
    windows = style_windows(config)
    count = len(windows) // 5
    on_frames, finer = windows[:count], windows[count:]
    assert len(finer) == 4 * count
    # Velocities are not among them: they come of finer differences.
    placed = [*range(7), *range(13, 25)]
    np.testing.assert_allclose(finer[::4][..., placed], on_frames[..., placed], atol=0.004)
    halfway = (on_frames + np.roll(on_frames, -1, axis=0)) / 2
    np.testing.assert_allclose(finer[2::4][..., placed], halfway[..., placed], atol=0.01)
    assert np.abs(finer[2::4][..., placed] - on_frames[..., placed]).max() > 0.05


def test_style_knows_neither_place_nor_heading() -> None:
    config = ImitationConfig(clips=("walk",), style_window=1, terminate_at=None, future=())
    one, two = config.build(4), config.build(4)
    one.reset(KEY)
    two.reset(KEY)
    quarter = np.sqrt(0.5)
    x, y = two.view.pose[:, 0].copy(), two.view.pose[:, 1].copy()
    two.view.pose[:, 0], two.view.pose[:, 1] = 5.0 - y, x
    w, i, j, k = two.view.pose[:, 3:7].T.copy()
    two.view.pose[:, 3:7] = quarter * np.stack([w - k, i - j, j + i, k + w], axis=1)
    vx, vy = two.view.speed[:, 0].copy(), two.view.speed[:, 1].copy()
    two.view.speed[:, 0], two.view.speed[:, 1] = -vy, vx
    for env in (one, two):
        env.simulation.forward()
        env._update()
    for name, shown in one._observe().items():
        np.testing.assert_allclose(shown, two._observe()[name], atol=1e-5)


def test_checked_physics_is_the_same_figure_with_limited_torques() -> None:
    fast, checked = make(2, physics="fast"), make(2, physics="checked")
    one, two = fast.simulation.model, checked.simulation.model
    np.testing.assert_array_equal(one.body_mass, two.body_mass)
    assert one.body_mass.sum() == pytest.approx(50.0)
    assert not one.actuator_forcelimited.any()
    assert two.actuator_forcelimited.all()
    assert two.opt.timestep * checked.spec.substeps == pytest.approx(1 / 30)
    assert one.opt.timestep * fast.spec.substeps == pytest.approx(1 / 30)
    assert fast.spec.observations == checked.spec.observations
    checked.reset(KEY)
    for action in random_actions(checked, 20):
        checked.step(action)
    assert one.nbody - 1 == NUM_BODIES


def test_a_bad_action_is_found() -> None:
    env = make(2)
    env.reset(KEY)
    with pytest.raises(NonFinite):
        env.step(np.full((2, NUM_ACTIONS), np.nan, np.float32))


@pytest.mark.parametrize(
    "wrong", [{"clips": ()}, {"clips": ("walk", "walk")}, {"future": (-1,)}, {"reach": 0}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ImitationConfig(**wrong)
