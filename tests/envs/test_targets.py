"""Targets: where they are drawn, that they are seen, and that a snapshot has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude import mj
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.envs.check import check_env
from etude.mj import observations as obs

ARM = """<mujoco><option gravity="0 0 0"/><worldbody>
  <body name="upper"><joint name="a" axis="0 1 0" range="-90 90"/>
    <geom type="capsule" fromto="0 0 0 .3 0 0" size=".02"/>
    <body name="lower" pos=".3 0 0"><joint name="b" axis="0 1 0" range="-90 90"/>
      <geom type="capsule" fromto="0 0 0 .3 0 0" size=".02"/><site name="tip" pos=".3 0 0"/>
</body></body></worldbody></mujoco>"""
CAR = """<mujoco><worldbody><geom type="plane" size="0 0 1"/>
  <body name="car" pos="0 0 .1"><freejoint/><geom type="box" size=".2 .1 .1"/>
    <body pos="0 0 .1"><joint name="mast"/><geom size=".02" mass=".01"/></body>
</body></worldbody></mujoco>"""


def reaching(hand: str = "tip", **how: Any) -> mj.Task:
    robot = mj.Robot("upper")
    target = mj.ReachTarget(robot, hand, **how)
    return mj.Task(
        model=ARM,
        parts=[robot, target],
        action=mj.JointTargets(robot, 0.5, stiffness=5.0, joint_damping=0.5),
        observations={
            "state": {"joints": obs.joint_positions(robot), "to": lambda _: target.offset}
        },
        rewards={"near": (lambda _: -target.distance, 1.0)},
        success=lambda _: target.distance < 0.01,
        max_episode_steps=20,
    )


def target_of(env: mj.MujocoEnv, kind: type[Any]) -> Any:
    found = env.ability(kind)
    assert found is not None
    return found


def walking() -> mj.Task:
    robot = mj.Robot("car")
    target = mj.WalkTarget(robot, near=1.0, far=2.0, radius=0.05)
    return mj.Task(
        model=CAR,
        parts=[robot, target],
        action=mj.JointTargets(robot, 0.5, stiffness=1.0),
        observations={"state": {"to": lambda _: target.offset}},
        rewards={"approach": (lambda _: target.approach, 1.0)},
        success=None,
        max_episode_steps=20,
    )


@pytest.mark.parametrize("make", [reaching, walking])
def test_tasks_with_a_target_keep_the_contract(make: Any) -> None:
    findings = check_env(lambda n, threads=1: mj.MujocoEnv(make(), n, threads), 60)
    assert [f for f in findings if f.verdict != "passed"] == []


def test_a_reach_target_is_where_the_hand_can_be() -> None:
    env = mj.MujocoEnv(reaching(floor=0.0), 200)
    target = target_of(env, mj.ReachTarget)
    env.reset(Key(0))
    assert len(np.unique(target.position, axis=0)) > 50
    # Two links of 30 cm in the plane y = 0, both within half of their ranges.
    distance = np.linalg.norm(target.position, axis=1)
    assert np.abs(target.position[:, 1]).max() < 1e-9
    assert 0.6 * np.cos(np.pi / 8) - 1e-9 <= distance.min()
    assert distance.max() <= 0.6 + 1e-9
    assert target.position[:, 2].min() > 0.03
    np.testing.assert_allclose(target.offset, target.position - [0.6, 0.0, 0.0], atol=1e-12)
    (drawn,) = env.markers(7)
    assert isinstance(drawn, mj.Target)
    assert drawn.radius == 0.03
    np.testing.assert_array_equal(drawn.position, target.position[7])


def test_a_walk_target_is_on_the_floor_around_the_robot() -> None:
    env = mj.MujocoEnv(walking(), 200)
    target, qpos = target_of(env, mj.WalkTarget), env.simulation.bind("qpos")
    env.reset(Key(0))
    assert 1.0 <= target.distance.min() < 1.1
    assert 1.9 < target.distance.max() <= 2.0
    np.testing.assert_allclose(target.position[:, 2], 0.05)
    qpos[:, 3:7] = [np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)]  # turned to the left
    env.simulation.bind("qvel")[:, :2] = target.position[:, :2]
    env.simulation.forward()
    env.tick += 1
    away = target.position[:, :2]
    np.testing.assert_allclose(
        target.offset, np.stack([away[:, 1], -away[:, 0]], axis=1), atol=1e-9
    )
    np.testing.assert_allclose(target.approach, target.distance, rtol=1e-9)


def test_a_hand_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="neither a site nor a body 'fist'"):
        mj.MujocoEnv(reaching("fist"), 1)


@pytest.mark.parametrize(
    ("field", "index", "place"),
    [("qpos", 1, "joint b"), ("qvel", 0, "joint a"), ("ctrl", 1, "actuator b")],
)
def test_errors_of_the_simulation_name_the_joint(field: str, index: int, place: str) -> None:
    env = mj.MujocoEnv(reaching(), 3)
    env.reset(Key(0))
    env.simulation.bind(field)[2, index] = np.nan
    with pytest.raises(NonFinite, match=rf"environment 2: .* at {place}"):
        env.simulation.step(1)


def test_a_joint_that_runs_away_is_named() -> None:
    env = mj.MujocoEnv(reaching(), 3)
    env.reset(Key(0))
    env.simulation.bind("qvel")[1, 1] = 1e11  # not infinite, but too much for MuJoCo
    told = "huge at joint b; the simulation is unstable: a smaller timestep"
    with pytest.raises(NonFinite, match=f"environment 1: a .* {told}"):
        env.simulation.step(1)


def servos(**how: Any) -> Any:
    """The compiled model of an arm with joint targets."""
    robot = mj.Robot("upper")
    task = mj.Task(
        model=ARM,
        parts=[robot],
        action=mj.JointTargets(robot, **how),
        observations={"state": {"joints": obs.joint_positions(robot)}},
        rewards={},
        max_episode_steps=20,
    )
    return mj.MujocoEnv(task, 2)


def test_servos_are_set_per_joint() -> None:
    env = servos(
        scale={"a": 0.1, "b": 0.3},
        stiffness={"a": 7.0, ".*": 5.0},
        damping={"b": 0.5},
        joint_damping={"a": 0.25},
        torque={"b": 2.0},
    )
    model = env.simulation.model
    np.testing.assert_array_equal(model.actuator_gainprm[:, 0], [7.0, 5.0])
    np.testing.assert_array_equal(model.actuator_biasprm[:, 2], [0.0, -0.5])
    np.testing.assert_array_equal(model.dof_damping, [0.25, 0.0])
    np.testing.assert_array_equal(model.actuator_forcelimited, [0, 1])
    np.testing.assert_array_equal(model.actuator_forcerange[1], [-2.0, 2.0])
    env.reset(Key(0))
    env.step(np.ones((2, 2)))
    np.testing.assert_allclose(env.simulation.bind("ctrl"), [[0.1, 0.3]] * 2)
    assert env.describe()["action"]["scale"] == [0.1, 0.3]


def test_a_torque_limit_does_not_limit_damping_of_the_joint() -> None:
    """At 2 rad/s a damping of 10 brakes with 20 N m; inside a limit of 1 N m with 1."""
    brakes = {}
    for name in ("damping", "joint_damping"):
        env = servos(stiffness=0.01, torque=1.0, **{name: 10.0})
        env.reset(Key(0))
        env.simulation.bind("qvel")[:] = [[2.0, 0.0]] * 2
        before = env.simulation.bind("qvel").copy()
        env.simulation.step(1)
        brakes[name] = float(np.abs(env.simulation.bind("qvel") - before)[0, 0])
    assert brakes["joint_damping"] > 5 * brakes["damping"]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"stiffness": {"a": 1.0}}, "JointTargets has no stiffness for the joint b: add it"),
        ({"stiffness": 1.0, "torque": {"c": 1.0}}, "No joint of the model matches 'c'"),
    ],
)
def test_a_mapping_that_misses_a_joint_is_refused(how: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        servos(**how)
