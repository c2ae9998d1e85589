"""Walking: the Go1's model, its commands and gait, rough ground."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest

from etude import mj
from etude.core.contracts import FollowsCurriculum, ability
from etude.core.keys import Key
from etude.envs.check import check_env
from etude.envs.mujoco.randomize import Randomization
from etude.envs.robots.go1 import FEET, MODEL
from etude.tasks.velocity import Trot, WalkConfig, WalkNoise

LIMITS = {"hip": 23.7, "thigh": 23.7, "calf": 35.55}


def part(env: mj.MujocoEnv, kind: type) -> Any:
    return next(p for p in env.parts if isinstance(p, kind))


def test_the_model_has_the_published_numbers() -> None:
    model = mujoco.MjModel.from_xml_path(str(MODEL))
    assert model.nu == 12
    assert float(model.body_mass.sum()) == pytest.approx(5.204 + 4 * (0.68 + 1.009 + 0.195862))
    names = [model.actuator(i).name for i in range(12)]
    assert names == [f"{leg}_{joint}" for leg in FEET for joint in LIMITS]
    for i, name in enumerate(names):
        limit = LIMITS[name.partition("_")[2]]
        np.testing.assert_array_equal(model.actuator_forcerange[i], [-limit, limit])
    gears = {"hip": 6, "thigh": 6, "calf": 9}
    for joint, gear in gears.items():
        dof = model.joint(f"RL_{joint}_joint").dofadr[0]
        assert model.dof_armature[dof] == pytest.approx(0.000111842 * gear**2, rel=1e-4)


def test_feet_and_trunk_collide_with_the_ground_and_nothing_else() -> None:
    model = WalkConfig().build(1).simulation.model
    colliding = {model.geom(i).name for i in range(model.ngeom) if model.geom_contype[i]}
    assert colliding == {*(f"{leg}_foot" for leg in FEET), "trunk", "trunk_left", "trunk_right"}
    assert model.geom("floor").conaffinity[0] == 1
    assert not model.geom_conaffinity[model.geom_contype > 0].any()


def test_it_stands_and_torques_stay_within_their_limits() -> None:
    env = WalkConfig(stand=1.0).build(8)
    force = env.simulation.bind("actuator_force")
    env.reset(Key(0))
    robot = part(env, mj.Robot)
    for _ in range(100):
        result = env.step(np.zeros((8, 12), np.float32))
    assert not result.terminated.any()
    assert (np.abs(robot.height - 0.265) < 0.03).all()
    assert part(env, mj.Feet).contact.mean() > 0.9
    rng, most = np.random.default_rng(0), np.zeros(12)
    for _ in range(60):
        env.step(rng.choice([-1.0, 1.0], (8, 12)).astype(np.float32))
        most = np.maximum(most, np.abs(force).max(axis=0))
    limits = np.array([*LIMITS.values()] * 4)
    assert (most <= limits + 1e-9).all()
    assert (most > 0.5 * limits).any()


@pytest.mark.parametrize(
    "config",
    [
        WalkConfig(max_episode_steps=40),
        WalkConfig(
            max_episode_steps=40,
            observation_delay=(0, 2),
            noise=WalkNoise(gyro=0.2, joint_velocity=1.0),
            random=Randomization(mass=0.3, friction=0.3, gains=0.2, latency=(0, 2), push=0.5),
        ),
        WalkConfig(max_episode_steps=40, ground="rough", levels=2),
    ],
    ids=["flat", "randomised", "rough"],
)
def test_walking_keeps_the_contract(config: WalkConfig) -> None:
    findings = check_env(config.build_unchecked, 60)
    assert [f for f in findings if f.verdict != "passed"] == []


def test_a_success_neither_falls_nor_lags_behind() -> None:
    config = WalkConfig(speed_x=(1.0, 1.0), zero=0.0, stand=0.0, max_episode_steps=30)
    env = config.build(4)
    env.reset(Key(0))
    for _ in range(30):
        result = env.step(np.zeros((4, 12), np.float32))
    assert result.truncated.all()
    assert not result.episodes["fell"].any()
    assert not result.episodes["is_success"].any()  # it stands where it should walk
    assert (result.episodes["velocity_error"] > 0.7).all()


def test_rough_ground_is_level_where_episodes_begin_and_as_high_as_mujoco_has_it() -> None:
    env = WalkConfig(ground="rough", in_turn=True).build(40)
    env.reset(Key(0))
    terrain, robot = part(env, mj.Terrain), part(env, mj.Robot)
    assert sorted(terrain.tile.tolist()) == list(range(40))
    np.testing.assert_allclose(robot.height, 0.278, atol=1e-6)
    model = env.simulation.model
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    rng, away = np.random.default_rng(0), []
    for point in rng.uniform(-18.0, 18.0, (300, 2)):
        geom = np.zeros(1, np.int32)
        start, down = np.array([*point, 10.0]), np.array([0.0, 0.0, -1.0])
        distance = mujoco.mj_ray(model, data, start, down, None, 1, -1, geom, None)
        away.append(abs(10.0 - distance - terrain.height_at(point)))
    # Between its points MuJoCo's ground is triangles, and here bilinear.
    assert np.quantile(away, 0.8) < 1e-4
    assert max(away) < 0.05


def test_harder_levels_come_with_the_curriculum() -> None:
    env = WalkConfig(ground="rough").build(64)
    terrain = part(env, mj.Terrain)
    follower = ability(env, FollowsCurriculum)  # type: ignore[type-abstract]
    assert follower is terrain
    terrain.follow({"level": 0.25})
    env.reset(Key(0))
    assert set(terrain.level) == {0, 1}
    terrain.follow({})
    env.restart()
    assert set(terrain.level) == set(range(8))
    heights = [terrain.heights[20 + 80 * i : 100 + 80 * i].max() for i in range(8)]
    assert heights == sorted(heights)


def test_the_trot_pays_swinging_feet_that_are_up_and_standing_feet_that_are_down() -> None:
    env = WalkConfig(acceleration=None).build(2)
    env.reset(Key(0))
    gait = next(p for p in env.parts if type(p).__name__ == "Trot")
    feet = part(env, mj.Feet)
    env.elapsed[:] = 6  # a quarter of a stride of 25 steps: front right and rear left swing
    swing = np.sin(2 * np.pi * 2.0 * 0.12)
    feet.__dict__["_derived_height"] = (
        env.tick,
        np.array([[0.06 * swing, 0.0, 0.0, 0.06 * swing], [0.0, 0.06, 0.06, 0.0]]),
    )
    feet.velocity[:] = 0.0
    good, bad = gait.reward(env)
    assert good == pytest.approx(1.0, abs=1e-6)
    assert bad < 0.4


def trot(command: list[float], steps: int) -> tuple[Any, np.ndarray]:
    """A trot under a held command, and its reference joints [steps, 4, 3]."""
    env = WalkConfig(gait_frequency=2.5, acceleration=None).build(
        1
    )  # A stride has 20 control steps.
    env.reset(Key(0))
    part(env, mj.VelocityCommand).hold(command)
    gait, joints = part(env, Trot), []
    for step in range(steps):
        env.elapsed[:] = step
        joints.append(gait.reference().reshape(4, 3))
    return gait, np.array(joints)


def test_the_trot_is_still_under_a_command_to_stand() -> None:
    gait, joints = trot([0.0, 0.0, 0.0], 50)
    assert not joints.any()
    assert not gait.phase(gait.env).any()


def test_the_trot_has_a_mirror_image() -> None:
    """Left and right change places half a stride later, and rolls their sign."""
    _, one = trot([0.9, 0.4, -0.7], 20)
    _, two = trot([0.9, -0.4, 0.7], 20)
    mirrored = np.roll(two[:, [1, 0, 3, 2]], 10, axis=0) * [-1.0, 1.0, 1.0]
    np.testing.assert_allclose(one, mirrored, atol=1e-9)


def test_feet_that_stand_go_against_the_command_and_swing_back() -> None:
    _, joints = trot([1.0, 0.0, 0.0], 20)
    stands = joints[:, 0, 2] == 0.0  # Half of the stride, both ends included.
    assert stands.sum() == 11
    ahead = -np.tan(joints[stands, 0, 1]) * 2 * 0.213 * np.cos(0.9)  # m from under the hip
    np.testing.assert_allclose(np.diff(ahead) / 0.02, -1.0)
    assert (joints[~stands, 0, 2] < 0).all()
    np.testing.assert_array_equal(joints[:, 0], joints[:, 3])


def test_the_trot_alone_goes_where_it_is_told_to() -> None:
    still = {"stand": 0.0, "zero": 0.0, "acceleration": None}
    env = WalkConfig(command_every=(20.0, 20.0), **still).build(64)
    env.reset(Key(3))
    robot, command = part(env, mj.Robot), part(env, mj.VelocityCommand)
    speeds, told = [], []
    for step in range(75):
        result = env.step(np.zeros((64, 12), np.float32))
        if step > 25:
            going = ~result.terminated & (env.elapsed > 25)
            speeds.append(robot.heading_velocity[going, :2])
            told.append(command.command[going, :2].copy())
    for axis in (0, 1):
        slope = np.polyfit(np.concatenate(told)[:, axis], np.concatenate(speeds)[:, axis], 1)[0]
        assert slope > 0.25
