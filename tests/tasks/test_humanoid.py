"""Our humanoid: its body, the motions it tracks, and the windows that a discriminator reads."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest

from batch_env_contract import KEY, assert_same_bits, check_contract
from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.motion import rotations as rot
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.playing import ErrorMeter
from etude.envs.mujoco.reference import ReferenceMotion, SelfContacts, load_robot
from etude.envs.mujoco.strain import StrainMeter
from etude.envs.mujoco.style import StyleWindow
from etude.envs.robots import humanoid
from etude.planning import recipes
from etude.tasks.humanoid import CLOSELY
from etude.tasks.tracking import TrackConfig

pytest.importorskip("pybullet_data", reason="it holds the clips (the extra 'mocap')")
MANY = ("walk", "kick", "backflip")
NUM_ACTIONS = 28


def config(**changes: Any) -> TrackConfig:
    return CLOSELY.replace(**{"motion": MANY, **changes})


def make(num_envs: int = 6, **changes: Any) -> MujocoEnv:
    return config(**changes).build(num_envs)


def part(env: MujocoEnv, kind: type[Any]) -> Any:
    found = env.ability(kind)
    assert found is not None
    return found


def of(recipe: str) -> TrackConfig:
    env = recipes.find(recipe).env
    assert isinstance(env, TrackConfig)
    return env


def keep_on_reference(env: MujocoEnv) -> ReferenceMotion:
    """Let physics do nothing but put every robot where its motion is, as each step is measured."""
    update, motion = env._update, part(env, ReferenceMotion)

    def placed() -> None:
        frames = motion.library.frame(motion.motion, motion.start + env.elapsed)
        motion.pose[:], motion.speed[:] = frames.pose, frames.speed
        env.simulation.forward()
        update()

    env._update = placed  # type: ignore[method-assign]
    return motion  # type: ignore[no-any-return]


def still(env: MujocoEnv) -> Array:
    return np.zeros((env.num_envs, NUM_ACTIONS), np.float32)


def test_the_body_has_limits() -> None:
    model = load_robot(humanoid.MODEL).compile()
    assert model.body_mass.sum() == pytest.approx(50.0)
    assert model.jnt_limited[1:].all()
    assert model.actuator_forcelimited.all()
    # Damping is the joints', so that a servo at its torque limit is still damped.
    assert (model.dof_damping[6:] > 0).all()
    assert (model.actuator_biasprm[:, 2] == 0).all()
    names = [model.body(int(b)).name for b in model.geom_bodyid]
    data = mujoco.MjData(model)
    data.qpos[2] = 2.0
    turned = rot.exp(np.array([0.7, 0.0, 0.0]))
    for side, turn in (("left", rot.conjugate(turned)), ("right", turned)):
        at = int(model.joint(f"{side}_hip").qposadr[0])
        data.qpos[at : at + 4] = turn
    mujoco.mj_forward(model, data)
    touching = [{names[g] for g in contact.geom} for contact in data.contact[: data.ncon]]
    assert {"left_hip", "right_hip"} in touching


def test_ball_joints_stay_within_their_ranges() -> None:
    model = load_robot(humanoid.MODEL).compile()
    model.opt.gravity[:] = 0
    data = mujoco.MjData(model)
    address = int(model.joint("chest").qposadr[0])
    control = int(model.actuator_ctrladr[model.actuator("chest").id])
    for name in ("chest", "neck", "left_hip", "right_hip"):
        at = int(model.actuator_ctrladr[model.actuator(name).id])
        data.ctrl[at : at + 4] = [1.0, 0.0, 0.0, 0.0]
    data.ctrl[control : control + 4] = rot.exp(np.array([0.0, 2.5, 0.0]))
    for _ in range(300):
        mujoco.mj_step(model, data)
    angle = float(np.linalg.norm(rot.log(data.qpos[address : address + 4])))
    assert angle == pytest.approx(float(model.joint("chest").range[1]), abs=0.1)


@pytest.mark.parametrize("clip", ["walk", "backflip"])
def test_torques_saturate_without_reversing(clip: str) -> None:
    """A servo whose torque limit includes its damping reverses the full torque in most of the
    substeps in which it is saturated."""
    env = make(32, motion=(clip,))
    env.reset(KEY)
    model = env.simulation.model
    limits = model.actuator_forcerange[:, 1]
    widths = np.where(
        model.jnt_type[model.actuator_trnid[:, 0]] == mujoco.mjtJoint.mjJNT_BALL, 3, 1
    )
    first = np.cumsum(widths) - widths
    force = env.simulation.bind("actuator_force")
    before: list[Array] = []
    pairs = reversals = 0

    def watch() -> None:
        nonlocal pairs, reversals
        now = force.copy()
        if before:
            scale = np.repeat(limits, widths)
            one, two = before.pop() / scale, now / scale
            sizes = [np.sqrt(np.add.reduceat(x * x, first, axis=1)) for x in (one, two)]
            both = (sizes[0] > 0.99) & (sizes[1] > 0.99)
            pairs += int(both.sum())
            reversals += int((both & (np.add.reduceat(one * two, first, axis=1) < -0.9)).sum())
        before.append(now)

    env.simulation.watchers.append(watch)
    stream = np.random.default_rng(0)
    for _ in range(40):
        env.step(stream.uniform(-0.5, 0.5, (32, NUM_ACTIONS)).astype(np.float32))
    assert pairs > 500
    assert reversals < 0.05 * pairs


def test_contract_with_style() -> None:
    made = config(style_window=3, measure=True, future=(1, 5), max_episode_steps=40)
    check_contract(lambda num, threads: made.build(num, threads), steps=60, exact_steps=60)


def test_contract_without_a_reference() -> None:
    made = of("amp-walk")
    check_contract(lambda num, threads: made.build(num, threads), steps=60, exact_steps=60)


def test_zero_actions_track_a_clip_for_a_while() -> None:
    env = make(64, motion=("walk",))
    env.reset(KEY)
    rewards = [env.step(still(env)).reward.mean() for _ in range(5)]
    most = 4.0 * env.dt  # the sum of the weights of what is tracked, of velocities less
    assert min(rewards) > 0.6 * most
    alone = make(64, motion=("walk",), control="absolute")
    alone.reset(KEY)
    assert alone.step(still(alone)).reward.mean() < rewards[0]


def test_the_mean_distance_and_the_height_end_episodes() -> None:
    env = make(4, mean_distance=0.5)
    for moved, ends in ((0.31, False), (0.55, True)):
        env.reset(KEY)
        part(env, ReferenceMotion).pose[:, 0] += moved
        result = env.step(still(env))
        assert (result.terminated == ends).all()
        assert not result.truncated.any()
    env = make(2, motion=("walk",), mean_distance=None, lowest=1.2)
    env.reset(KEY)
    part(env, ReferenceMotion).pose[0, 2] += 1.0
    np.testing.assert_array_equal(env.step(still(env)).terminated, [False, True])


def test_errors_are_those_of_the_episode() -> None:
    env = make(3, order="in turn", start="first", mean_distance=None, measure=True,
               max_episode_steps=5)  # fmt: skip
    motion = keep_on_reference(env)
    update = env._update

    def aside() -> None:
        """Whole figures 0.3 m aside from the third step on."""
        motion.library.frames.pose[:, 1] += 0.3 * (env.elapsed[0] == 3)
        update()

    reference = motion.library.frames.position.copy()
    env._update = aside  # type: ignore[method-assign]
    env.reset(KEY)
    for _ in range(5):
        result = env.step(still(env))
    assert_same_bits(motion.library.frames.position, reference)
    played = result.episodes
    np.testing.assert_allclose(played["mpjpe_g"], 3 * 300 / 5, rtol=1e-6)
    np.testing.assert_allclose(played["mpjpe_l"], 0, atol=1e-6)
    np.testing.assert_allclose(played["mpjpe_pa"], 0, atol=1e-3)
    np.testing.assert_allclose(played["vel_dist"], 300 / 5, rtol=1e-6)
    np.testing.assert_allclose(played["accel_dist"], 600 / 4, rtol=1e-6)
    np.testing.assert_array_equal(played["success_25"], 0)
    np.testing.assert_array_equal(played["is_success"], 1)


def test_evaluation_plays_each_motion_once_from_its_first_frame() -> None:
    env = config(style_window=3).for_evaluation().build(6)
    motion = keep_on_reference(env)
    env.reset(KEY)
    first = motion.library.frame(np.arange(6) % 3, np.zeros(6, np.int64))
    np.testing.assert_array_equal(motion.pose, first.pose)
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
    kick = int(motion.library.cycles[1]) - 1
    np.testing.assert_array_equal(lengths, [300, kick, 300] * 2)


@pytest.mark.parametrize(
    ("late", "far", "once", "once_25"),
    [(1, 0.6, 1, 1), (0, 0.6, 0, 0), (-5, 0.3, 1, 0), (1, 0.3, 1, 1)],
)
def test_once_through_is_told_however_long_a_clip_loops(
    late: int, far: float, once: int, once_25: int
) -> None:
    env = config(motion=("walk",), max_episode_steps=60).for_evaluation().build(1)
    motion = keep_on_reference(env)
    update, strays = env._update, int(motion.library.cycles[0]) + late

    def aside() -> None:
        motion.library.frames.pose[:, 1] += far * (env.elapsed[0] == strays)
        update()

    env._update = aside  # type: ignore[method-assign]
    env.reset(KEY)
    result = env.step(still(env))
    while not result.final_envs.size:
        result = env.step(still(env))
    assert result.episodes["is_success"] == (far < 0.5)
    assert (result.episodes["once"], result.episodes["once_25"]) == (once, once_25)


def test_a_loop_that_is_judged_for_less_than_its_length_never_came_to_its_end() -> None:
    env = config(max_episode_steps=20).for_evaluation().build(3)
    motion = keep_on_reference(env)
    assert int(motion.library.cycles[0]) > 20
    env.reset(KEY)
    once: dict[int, float] = {}
    while len(once) < 3:
        result = env.step(still(env))
        for row, told in zip(result.final_envs, result.episodes.get("once", ()), strict=True):
            once.setdefault(int(row), told)
    assert once == {0: 0, 1: 1, 2: 0}  # the kick does not loop


def test_motions_are_drawn_by_weight() -> None:
    env = make(600, max_episode_steps=1, mean_distance=None)
    motion = part(env, ReferenceMotion)
    for weights, chances in (
        (None, np.ones(3) / 3),
        (np.array([1.0, 2.0, 5.0]), np.array([1, 2, 5]) / 8),
        (np.array([0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0])),
    ):
        motion.follow({} if weights is None else {"weights": weights})
        env.reset(KEY)
        counts = np.bincount(motion.motion, minlength=3)
        for _ in range(3):
            env.step(still(env))
            counts += np.bincount(motion.motion, minlength=3)
        possible = chances > 0
        assert counts[~possible].sum() == 0
        expected = chances[possible] * counts.sum()
        # 13.8 is passed once in 1,000 times with two degrees of freedom.
        assert ((counts[possible] - expected) ** 2 / expected).sum() < 13.8


def test_weights_change_new_episodes_only_and_need_to_fit() -> None:
    env = make(8)
    motion = part(env, ReferenceMotion)
    env.reset(KEY)
    before = motion.motion.copy()
    motion.follow({"weights": np.array([0.0, 0.0, 1.0])})
    result = env.step(still(env))
    kept = np.setdiff1d(np.arange(8), result.final_envs)
    np.testing.assert_array_equal(motion.motion[kept], before[kept])
    for wrong in ([1.0, 1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [np.nan, 1.0, 1.0]):
        with pytest.raises(UsageError, match="weights"):
            motion.follow({"weights": np.array(wrong)})


def test_starts_depend_on_the_key_alone_and_reach_all_frames() -> None:
    one, two, other = make(400), make(400), make(400)
    assert_same_bits(one.reset(Key(1))["state"], two.reset(Key(1))["state"])
    other.reset(Key(2))
    motion = part(one, ReferenceMotion)
    assert (motion.start != part(other, ReferenceMotion).start).any()
    for number in range(3):
        starts = motion.start[motion.motion == number]
        last = motion.library.cycles[number] - 1
        assert starts.min() < 5
        assert last - 20 < starts.max() <= last


@pytest.mark.parametrize("window", [1, 4])
def test_style_on_the_reference_is_the_references_style(window: int) -> None:
    env = make(12, style_window=window, max_episode_steps=60)
    reference = part(env, StyleWindow).style_windows()
    assert reference.shape[1:] == env.spec.observations["style"].shape
    assert reference.dtype == np.float32
    motion = keep_on_reference(env)
    seen = env.reset(KEY)["style"]
    first = np.concatenate([[0], np.cumsum(motion.library.cycles)[:-1]])
    for _ in range(120):
        time = (motion.start + env.elapsed) % motion.library.cycles[motion.motion]
        np.testing.assert_allclose(seen, reference[first[motion.motion] + time], atol=1e-5)
        seen = env.step(still(env)).obs["style"]


def test_style_between_frames_is_between_their_styles() -> None:
    windows = part(make(1, motion=("walk",), style_window=3), StyleWindow).style_windows()
    count = len(windows) // 5
    on_frames, finer = windows[:count], windows[count:]
    assert len(finer) == 4 * count
    # Velocities are not among them: they come of finer differences.
    placed = [*range(7), *range(13, 25)]
    np.testing.assert_allclose(finer[::4][..., placed], on_frames[..., placed], atol=0.004)
    halfway = (on_frames + np.roll(on_frames, -1, axis=0)) / 2
    np.testing.assert_allclose(finer[2::4][..., placed], halfway[..., placed], atol=0.01)
    assert np.abs(finer[2::4][..., placed] - on_frames[..., placed]).max() > 0.05


def test_style_and_state_know_neither_place_nor_heading() -> None:
    made = config(motion=("walk",), style_window=1, mean_distance=None, future=())
    one, two = made.build(4), made.build(4)
    one.reset(KEY)
    two.reset(KEY)
    motion, quarter = part(two, ReferenceMotion), rot.about_z(np.array(np.pi / 2))
    x, y = motion.pose[:, 0].copy(), motion.pose[:, 1].copy()
    motion.pose[:, 0], motion.pose[:, 1] = 5.0 - y, x
    motion.pose[:, 3:7] = rot.multiply(quarter, motion.pose[:, 3:7])
    vx, vy = motion.speed[:, 0].copy(), motion.speed[:, 1].copy()
    motion.speed[:, 0], motion.speed[:, 1] = -vy, vx
    for env in (one, two):
        env.simulation.forward()
        env._update()
    for name in ("style", "state"):
        np.testing.assert_allclose(one._observe()[name], two._observe()[name], atol=1e-5)


def test_windows_of_style_never_span_a_reset() -> None:
    env, stream = of("amp-walk").build(8), np.random.default_rng(0)
    reference = {window.tobytes() for window in part(env, StyleWindow).style_windows()}
    before = env.reset(Key(1))["style"]
    assert all(window.tobytes() in reference for window in before)
    ended = 0
    for _ in range(80):
        result = env.step(stream.uniform(-0.3, 0.3, (8, NUM_ACTIONS)).astype(np.float32))
        led_to = result.obs["style"].copy()
        led_to[result.final_envs] = result.final_obs["style"]
        np.testing.assert_array_equal(led_to[:, :-1], before[:, 1:])
        assert all(window.tobytes() not in reference for window in led_to)
        begun = result.obs["style"][result.final_envs]
        assert all(window.tobytes() in reference for window in begun)
        ended += len(begun)
        before = result.obs["style"]
    assert ended >= 8


def test_motion_that_is_not_tracked_ends_in_a_fall_alone() -> None:
    tested = of("amp-walk").for_evaluation()
    assert (tested.mean_distance, tested.lowest) == (None, 0.6)
    assert (tested.start, tested.measure) == ("random", True)
    tracking = of("imitate-walk").for_evaluation()
    assert (tracking.mean_distance, tracking.start) == (0.5, "first")


def test_the_distance_travelled_is_reported() -> None:
    env = of("amp-walk").for_evaluation().build(3)
    env.reset(Key(2))
    meter, motion = part(env, ErrorMeter), part(env, ReferenceMotion)
    origin = motion.pose[:, :2].copy()
    told: dict[int, float] = {}
    for _ in range(80):
        result = env.step(still(env))
        going = np.setdiff1d(np.arange(3), result.final_envs)
        away = np.linalg.norm(motion.pose[:, :2] - origin, axis=1)
        np.testing.assert_allclose(meter.travelled[going], away[going], atol=1e-12)
        for row, distance in zip(
            result.final_envs.tolist(), result.episodes.get("travelled", []), strict=True
        ):
            told[row] = float(distance)
            origin[row] = motion.pose[row, :2]
    assert len(told) == 3
    assert all(0.05 < distance < 3.0 for distance in told.values())


def test_pairs_of_bodies_pass_through_each_other_where_a_clip_needs_it() -> None:
    def excluded(recipe: str) -> int:
        return int(of(recipe).build(1).simulation.model.nexclude)

    assert excluded("imitate-walk") == 0
    assert excluded("imitate-backflip") == 2
    with pytest.raises(UsageError, match=r"env.crossing 'chest tail' must name two bodies"):
        make(1, crossing=("chest tail",))


def test_strain_is_counted_in_every_physics_step() -> None:
    env = make(4, motion=("walk",), measure=True, mean_distance=None, max_episode_steps=20)
    env.reset(KEY)
    force, model = env.simulation.bind("actuator_force"), env.simulation.model
    knee = int(model.actuator("left_knee").id)
    widths = np.where(model.actuator_trntype == model.actuator_trntype[knee], 1, 3)
    column, limit = int(widths[:knee].sum()), float(model.actuator_forcerange[knee, 1])
    torques: list[Array] = []
    env.simulation.watchers.append(lambda: torques.append(force[:, column] / limit))
    stream = np.random.default_rng(0)
    deepest, farthest = np.zeros(4), np.zeros(4)
    angles, (low, high) = part(env, ReferenceMotion).pose, model.joint("left_knee").range
    address = int(model.joint("left_knee").qposadr[0])
    meter = part(env, StrainMeter)
    for _ in range(19):
        env.step(stream.choice([-1.0, 1.0], (4, NUM_ACTIONS)).astype(np.float32))
        angle = angles[:, address]
        farthest = np.maximum(farthest, np.maximum(low - angle, angle - high))
        deepest = np.maximum(deepest, part(env, SelfContacts).depth)
    shares = np.array(torques)
    full = np.abs(shares) > 0.99
    np.testing.assert_array_equal(meter._full[:, knee], full.sum(axis=0))
    turned = full[1:] & (shares[1:] * shares[:-1] < -0.9)
    np.testing.assert_array_equal(meter._turned[:, knee], turned.sum(axis=0))
    assert full.any()
    assert (meter.beyond >= farthest - 1e-12).all()
    np.testing.assert_array_equal(meter.depth, deepest)
    played = env.step(np.zeros((4, NUM_ACTIONS), np.float32)).episodes
    assert set(played) >= {"saturated", "reversals", "beyond_range", "penetration"}
    assert ((played["saturated"] > 0) & (played["saturated"] < 1)).all()
