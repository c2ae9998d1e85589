"""Tracking of a motion by any robot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from batch_env_contract import KEY, check_contract
from etude.api import resume, train
from etude.core.errors import UsageError
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.motion_check import check_motion
from etude.envs.mujoco.reference import ReferenceMotion
from etude.envs.robots import g1
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.tasks.tracking import TrackConfig
from made_motions import go1_config, walk
from run_hash import run_hash
from toys import changed

FIGURE = """
<mujoco><worldbody><body name="base" pos="0 0 1"><freejoint name="root"/>
<geom name="hull" type="box" size=".1 .2 .3" mass="5"/>
<body name="arm" pos="0 .3 0"><joint name="ball" type="ball"/>
<geom name="upper" type="capsule" size=".03 .1" pos="0 0 -.2" mass="1"/>
<body name="hand" pos="0 0 -.4"><joint name="hinge" axis="0 1 0" range="-1 1"/>
<geom name="palm" type="sphere" size=".05" mass=".3"/></body></body></body></worldbody>
<compiler angle="radian"/></mujoco>
"""


def figure_motion(frames: int = 41, loops: bool = False) -> Motion:
    times = np.arange(frames) / 40.0
    poses = np.zeros((frames, 12))
    poses[:, 0], poses[:, 2] = 0.5 * times, 2.0
    poses[:, 3:7] = rot.exp(np.stack([0.2 * times, 0 * times, times], axis=1))
    poses[:, 7:11] = rot.exp(np.stack([times, 0.5 * times, 0 * times], axis=1))
    poses[:, 11] = 0.4 * np.sin(3 * times)
    return Motion("figure", times, poses, loops, {"ball": 4, "hinge": 1})


def figure_config(folder: Path, motion: Motion | None = None, **changes: Any) -> TrackConfig:
    from etude.data.motion import files

    (folder / "figure.xml").write_text(FIGURE)
    files.write(figure_motion() if motion is None else motion, folder / "figure.npz")
    fields = {
        "robot": str(folder / "figure.xml"),
        "motion": (str(folder / "figure.npz"),),
        "stiffness": {".*": 30.0},
        "damping": {".*": 1.0},
        "torque": {"ball": 20.0, "hinge": 5.0},
        "armature": {".*": 0.02},
    }
    return TrackConfig(**{**fields, **changes})


def motion_of(env: MujocoEnv) -> ReferenceMotion:
    found = env.ability(ReferenceMotion)
    assert found is not None
    return found


def reward_terms(env: MujocoEnv) -> dict[str, Any]:
    """The values of the reward terms that are computed."""
    return {name: term(env) for name, (term, weight) in env.task.rewards.items() if weight}


def on_reference(env: MujocoEnv, ahead: int = 0) -> None:
    """Put every robot where its reference is."""
    motion = motion_of(env)
    frames = motion.ahead(ahead)
    motion.pose[:], env.simulation.bind("qvel")[:] = frames.pose, frames.speed
    env.simulation.forward()
    env._update()


def test_contract_with_everything_on(tmp_path: Path) -> None:
    config = go1_config(
        tmp_path,
        start_noise={"position": 0.05, "tilt": 0.1, "joints": 0.1, "velocity": 0.5, "spin": 0.5},
        noise={"gyro": 0.2, "gravity": 0.05, "joint_position": 0.01, "anchor_position": 0.05},
        observation_delay=(0, 2),
        random={
            "friction": 0.3,
            "mass": 0.2,
            "gains": 0.1,
            "push": 0.5,
            "push_every": (0.2, 0.5),
            "latency": (0, 1),
            "joint_offset": 0.01,
        },
        reward={"self_contacts": -1.0},
        measure=True,
        mean_distance=0.4,
        max_episode_steps=40,
    )
    check_contract(lambda rows, threads: config.build(rows, threads), steps=60, exact_steps=60)


def test_contract_with_ball_joints(tmp_path: Path) -> None:
    config = figure_config(tmp_path, start_noise={"joints": 0.1, "yaw": 0.2})
    check_contract(lambda rows, threads: config.build(rows, threads), steps=50, exact_steps=50)


@pytest.mark.parametrize("name", ["go1", "figure"])
def test_a_robot_on_its_reference_earns_everything(tmp_path: Path, name: str) -> None:
    config = go1_config(tmp_path) if name == "go1" else figure_config(tmp_path)
    env = config.build(8)
    env.reset(KEY)
    motion = motion_of(env)
    assert len(np.unique(motion.start)) > 1
    env.elapsed[:] = 3
    on_reference(env)
    terms = reward_terms(env)
    for kind in ("anchor_position", "anchor_orientation", "positions", "orientations"):
        np.testing.assert_allclose(terms[kind], 1.0, atol=1e-9)
    # Velocities of the reference are differences over two frames.
    assert terms["velocities"].min() > 0.98
    assert terms["spins"].min() > 0.98
    for ends in env.task.terminations.values():
        assert not ends(env).any()
    np.testing.assert_allclose(motion.joint_errors(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(motion.mean_distance, 0.0, atol=1e-12)


def test_errors_are_those_of_a_shifted_and_turned_robot(tmp_path: Path) -> None:
    env = go1_config(tmp_path).build(4)
    env.reset(KEY)
    motion = motion_of(env)
    on_reference(env)
    shift, turn = np.array([0.2, -0.1, 0.05]), rot.about_z(np.array(0.5))
    motion.pose[:, :3] += shift
    motion.pose[:, 3:7] = rot.multiply(turn, motion.pose[:, 3:7])
    env.simulation.forward()
    env._update()
    rewards = reward_terms(env)
    near = np.exp(-(shift @ shift) / 0.3**2)
    np.testing.assert_allclose(rewards["anchor_position"], near, rtol=1e-6)
    np.testing.assert_allclose(rewards["anchor_orientation"], np.exp(-(0.5**2) / 0.4**2), rtol=1e-6)
    # Of the bodies only the height is left, as their anchor's heading and place are taken out.
    np.testing.assert_allclose(rewards["positions"], np.exp(-(0.05**2) / 0.3**2), rtol=1e-6)
    np.testing.assert_allclose(rewards["orientations"], 1.0, atol=1e-6)
    observed = env._observe()["state"]
    away = rot.rotate(
        rot.conjugate(motion.quaternion[:, 0]),
        motion.ahead(1).position[:, 0] - motion.position[:, 0],
    )
    assert any(np.allclose(observed[:, k : k + 3], away, atol=1e-6) for k in range(100))


@pytest.mark.parametrize(
    ("bound", "change", "ends"),
    [
        ("height", (2, 0.26), True),
        ("height", (2, 0.24), False),
        ("tilt", (None, 1.5), True),
        ("tilt", (None, 0.5), False),
        ("hands or feet", (2, 0.12), True),
        ("hands or feet", (2, 0.08), False),
    ],
)
def test_terminations(
    tmp_path: Path, bound: str, change: tuple[int | None, float], ends: bool
) -> None:
    env = go1_config(tmp_path, ends_height=0.1).build(2)
    env.reset(KEY)
    motion = motion_of(env)
    on_reference(env)
    column, size = change
    if column is not None:
        motion.pose[:, column] += size
    else:
        tipped = rot.exp(np.array([size, 0.0, 0.0]))
        motion.pose[:, 3:7] = rot.multiply(tipped, motion.pose[:, 3:7])
    env.simulation.forward()
    env._update()
    assert env.task.terminations[bound](env).all() == ends


def test_zero_action_is_the_reference_of_the_next_step(tmp_path: Path) -> None:
    env = figure_config(tmp_path).build(4)
    env.reset(KEY)
    motion, control = motion_of(env), env.simulation.bind("ctrl")
    pose = motion.ahead(1).pose
    env.task.action.apply(np.zeros((4, 4), np.float32))
    np.testing.assert_allclose(rot.angle_between(control[:, :4], pose[:, 7:11]), 0.0, atol=1e-6)
    np.testing.assert_allclose(control[:, 4], pose[:, 11], atol=1e-12)
    # The hinge comes first in an action, then the rotation vector of the ball joint.
    action = np.tile(np.array([0.5, 0.0, 0.0, 1.0], np.float32), (4, 1))
    env.task.action.apply(action)
    turned = rot.multiply(pose[:, 7:11], rot.exp(np.array([0.0, 0.0, 0.3])))
    np.testing.assert_allclose(rot.angle_between(control[:, :4], turned), 0.0, atol=1e-6)
    np.testing.assert_allclose(control[:, 4], np.clip(pose[:, 11] + 0.15, -1, 1), atol=1e-7)


def test_torques_are_limited_and_damping_and_armature_are_the_joints(tmp_path: Path) -> None:
    env = figure_config(tmp_path, torque={"ball": 2.0, "hinge": 1.0}).build(2)
    model = env.simulation.model
    np.testing.assert_array_equal(model.dof_damping[6:], 1.0)
    np.testing.assert_array_equal(model.dof_armature[6:], 0.02)
    env.reset(KEY)
    force = env.simulation.bind("actuator_force")
    for _ in range(20):
        env.step(np.ones((2, 4), np.float32) * [[1, 1, 1, 1], [-1, -1, -1, -1]])
        assert np.linalg.norm(force[:, :3], axis=1).max() <= 2.0 + 1e-9
        assert np.abs(force[:, 3]).max() <= 1.0 + 1e-9


def test_start_noise_stays_within_its_bounds(tmp_path: Path) -> None:
    noise = {"position": 0.1, "height": 0.02, "yaw": 0.3, "joints": 0.1, "velocity": 0.5}
    env = figure_config(tmp_path, start_noise=noise).build(200)
    env.reset(KEY)
    motion = motion_of(env)
    frames = motion.ahead(0)
    off = np.abs(motion.pose[:, :3] - frames.pose[:, :3]).max(axis=0)
    assert (off <= [0.1, 0.1, 0.02]).all()
    assert (off > [0.08, 0.08, 0.015]).all()
    turned = rot.angle_between(motion.pose[:, 3:7], frames.pose[:, 3:7])
    assert 0.25 < turned.max() <= 0.3 + 1e-9
    balls = rot.angle_between(motion.pose[:, 7:11], frames.pose[:, 7:11])
    assert 0.1 < balls.max() <= 0.1 * np.sqrt(3) + 1e-9


@pytest.mark.parametrize("loops", [False, True])
def test_starts_follow_the_curriculum_and_episodes_report_where_they_fail(
    tmp_path: Path, loops: bool
) -> None:
    env = figure_config(tmp_path, figure_motion(loops=loops), max_episode_steps=200).build(400)
    motion_of(env).follow({"starts": np.array([[0, 0.25, 0, 0.75]])})
    env.reset(KEY)
    motion = motion_of(env)
    span = 50 if loops else 41  # at 50 per second; 10 frames are left at a start without a loop
    second, fourth = np.arange(span // 4, span // 2 + 1), np.arange(3 * span // 4, span)
    assert np.isin(motion.start, [*second, *fourth]).all()  # the start is rounded down to a frame
    assert 0.65 < np.isin(motion.start, fourth).mean() < 0.85
    start = motion.start.copy()
    for steps in range(1, 200):
        result = env.step(np.ones((400, 4), np.float32))
        ends = result.final_envs[(env.episode == 1)[result.final_envs]]
        if len(ends):
            chosen = np.isin(result.final_envs, ends)
            played = result.episodes["played"][chosen]
            np.testing.assert_allclose(result.episodes["start"][chosen], start[ends] / span)
            left = np.inf if loops else 1 - start[ends] / span
            np.testing.assert_allclose(played, np.minimum(steps / span, left), atol=1e-8)
            assert loops or (result.episodes["start"][chosen] + played < 1).all()
        if (env.episode >= 1).all():
            break
    assert (env.episode >= 1).all()
    with pytest.raises(UsageError, match="weights"):
        motion.follow({"starts": np.ones((2, 4))})


def test_evaluation_plays_each_motion_from_its_first_frame_to_its_end(tmp_path: Path) -> None:
    config = figure_config(tmp_path, max_episode_steps=10).for_evaluation()
    env = config.replace(mean_distance=None).build(2)
    assert env.spec.max_episode_steps == 50  # 41 frames of 40 per second, at 50 per second
    env.reset(KEY)
    assert (motion_of(env).start == 0).all()
    for step in range(50):
        result = env.step(np.zeros((2, 4), np.float32))
        assert result.truncated.all() == (step == 49)
    assert set(result.episodes) >= {"mpjpe_g", "success_25", "once", "progress", "is_success"}
    np.testing.assert_array_equal(result.episodes["once"], 1.0)


def test_a_motion_of_another_robot_is_refused(tmp_path: Path) -> None:
    from etude.data.motion import files

    other = walk()
    files.write(other, tmp_path / "walk.npz")
    config = figure_config(tmp_path, motion=None).replace(motion=(str(tmp_path / "walk.npz"),))
    with pytest.raises(UsageError, match="has a joint FR_hip_joint, and the model has none"):
        config.build(2)
    with pytest.raises(UsageError, match="No body of the model matches 'nobody'"):
        figure_config(tmp_path, anchor="nobody").build(2)
    with pytest.raises(UsageError, match=r"Tracking needs the MJCF file .*--env.robot FILE"):
        TrackConfig().build(2)
    with pytest.raises(UsageError, match=r"Tracking needs files of motions.*--env.motion FILE"):
        TrackConfig(robot="figure.xml").build(2)


def test_a_check_finds_what_a_body_cannot_do() -> None:
    model = mujoco.MjModel.from_xml_string(FIGURE)
    poses = np.tile(model.qpos0, (20, 1))
    poses[:, 2] = 1.0
    joints = {"ball": 4, "hinge": 1}

    def found(**columns: Any) -> dict[str, Any]:
        changed = poses.copy()
        for name, values in columns.items():
            changed[:, int(name[1:])] = values
        motion = Motion("made", np.arange(20) / 20, changed, False, joints)
        return check_motion(model, motion, model.qpos0)

    worst = found()
    assert {kind: each.size for kind, each in worst.items()} == {
        "penetration": 0.0,
        "limit": 0.0,
        "speed": 0.0,
        "below": 0.0,
    }
    worst = found(c11=np.linspace(0.0, 1.9, 20))
    assert (worst["limit"].where, worst["speed"].where) == ("hinge", "hinge")
    assert worst["limit"].size == pytest.approx(0.9)
    assert worst["limit"].second == pytest.approx(0.95)
    assert worst["speed"].size == pytest.approx(2.0)
    worst = found(c2=np.r_[np.ones(10), np.full(10, 0.25)])
    # The palm's centre is .4 m below the arm, its radius .05 m.
    assert worst["below"].where == "palm"
    assert worst["below"].size == pytest.approx(0.2)
    assert worst["below"].second >= 0.5
    # The arm turned about x by 90 degrees points along y, through the hull if it points to -y.
    half = np.sqrt(0.5)
    worst = found(c7=half, c8=-half)
    assert worst["penetration"].where == "hull and palm"
    assert worst["penetration"].size > 0.05


def test_the_g1_tracks_its_motion_with_its_motors() -> None:
    folder = None
    try:
        config = TrackConfig(
            robot=g1.MODEL, motion=(g1.MOTION,), anchor="torso_link", bodies=g1.BODIES,
            ends=g1.ENDS, stiffness=g1.STIFFNESS, damping=g1.DAMPING, torque=g1.TORQUE,
            armature=g1.ARMATURE, folder=folder,
        )  # fmt: skip
        env = config.build(4)
    except UsageError as error:
        pytest.skip(str(error))
    assert len(env.spec.action.low) == 29
    assert env.spec.max_episode_steps == 324


def short_run(folder: Path, threads: int = 2) -> Recipe:
    """A few iterations of PPO on the made walk, with noise and pushes."""
    config = go1_config(
        folder,
        start_noise={"position": 0.05, "joints": 0.1, "velocity": 0.3},
        noise={"joint_position": 0.01},
        random={"push": 0.3, "push_every": (0.2, 0.4), "friction": 0.2},
        max_episode_steps=30,
    )
    recipe = recipes.find("track").replace(env=config)
    return changed(
        recipe,
        motions={"enabled": True},
        policy={"hidden": (16,)},
        collector={"num_envs": 16, "envs_per_group": 4, "threads": threads},
        algorithm={"rollout_steps": 8, "minibatch_size": 64},
        clock={"total_timesteps": 1536, "cycles": 2, "iterations": 2},
        evaluation={
            "every": "1 cycle",
            "episodes": 2,
            "num_envs": 2,
            "envs_per_group": 2,
            "final_episodes": 2,
        },
        checkpoint={"every": "1 cycle"},
    )


def test_threads_and_a_resume_change_no_bit(tmp_path: Path) -> None:
    whole = train(short_run(tmp_path), tmp_path / "whole").path
    expected = run_hash(whole)
    other = train(short_run(tmp_path, threads=1), tmp_path / "other").path
    assert run_hash(other) == expected
    back = resume(other, checkpoint=1024)
    assert run_hash(back.path) == expected


@pytest.mark.rotated
def test_a_made_motion_is_learned(tmp_path: Path) -> None:
    """With zero actions the Go1 stays behind its motion and is half a metre off after a second."""
    config = go1_config(tmp_path, std={"velocities": 0.4})
    recipe = changed(
        recipes.find("track").replace(env=config),
        policy={"hidden": (64, 64)},
        collector={"num_envs": 128, "envs_per_group": 64, "threads": 2},
        algorithm={"minibatch_size": 768, "learning_rate": 1e-3},
        clock={"total_timesteps": 150_000, "cycles": 7, "iterations": 7},
        evaluation={"episodes": 4, "num_envs": 4, "envs_per_group": 4, "final_episodes": 4},
    )
    rows = train(recipe, tmp_path / "run").rows()
    assert rows[-1]["rollout/success_rate"] > 0.9
    assert rows[-1]["eval/success_rate"] == 1.0
