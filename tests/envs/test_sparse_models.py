"""MuJoCo 4.0.0 computes wrong with sparse Jacobians: large models are simulated with dense ones."""

from __future__ import annotations

from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest

from etude.envs.adapters.gym import GymConfig
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import avoid_sparse
from etude.envs.mujoco.task import Task
from etude.mj import Controls

STEPS = 200
on_4_0_0 = pytest.mark.skipif(mujoco.mj_versionString() != "4.0.0", reason="MuJoCo 4.0.0 alone")


def crawlers(number: int) -> str:
    """MJCF of bodies with two legs of six links each, which fall on each other; 18 DOFs each."""

    def leg(depth: int) -> str:
        if depth == 6:
            return ""
        axis = f"{depth % 2 ^ 1} {depth % 2} 0"
        return (
            f'<body pos=".2 0 0"><joint axis="{axis}" range="-60 60" limited="true" damping=".2"/>'
            f'<geom type="capsule" size=".04" fromto="0 0 0 .2 0 0"/>{leg(depth + 1)}</body>'
        )

    bodies = "".join(
        f'<body name="b{i}" pos="{0.05 * i} {0.07 * i} {0.3 + 0.25 * i}"><freejoint/>'
        f'<geom type="box" size=".1 .1 .1"/>{leg(0)}{leg(0)}</body>'
        for i in range(number)
    )
    floor = '<geom type="plane" size="9 9 .1"/>'
    return (
        f'<mujoco><option timestep=".005"/><worldbody>{floor}{bodies}</worldbody>'
        '<actuator><general name="none" body="b0" gaintype="fixed" gainprm="0"/></actuator>'
        "</mujoco>"
    )


def worst(model: mujoco.MjModel) -> float:
    """The largest relative error of accelerations against dense Jacobians, along a fall."""
    right = mujoco.MjModel.from_xml_string(crawlers(5))
    right.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
    fall, data, found = mujoco.MjData(right), mujoco.MjData(model), 0.0
    for _ in range(STEPS):
        mujoco.mj_step(right, fall)
        expected = mujoco.MjData(right)
        for each, of in ((expected, right), (data, model)):
            mujoco.mj_resetData(of, each)
            each.qpos[:], each.qvel[:] = fall.qpos, fall.qvel
            mujoco.mj_forward(of, each)
        error = np.linalg.norm(data.qacc - expected.qacc)
        found = max(found, float(error / np.linalg.norm(expected.qacc)))
    return found


@on_4_0_0
def test_a_large_model_is_simulated_right() -> None:
    model = mujoco.MjModel.from_xml_string(crawlers(5))
    assert worst(model) > 0.1, "as MuJoCo would: a half of the acceleration is wrong"
    (note,) = avoid_sparse(model)
    assert "90 degrees of freedom" in note
    assert worst(model) < 1e-9


def test_a_small_model_is_left_alone() -> None:
    model = mujoco.MjModel.from_xml_string(crawlers(2))
    before = model.opt.jacobian
    assert avoid_sparse(model) == ()
    assert model.opt.jacobian == before


@on_4_0_0
def test_tasks_and_plans_say_so() -> None:
    task = Task(
        model=crawlers(5),
        action=Controls(),
        observations={"state": {"positions": lambda env: env.simulation.bind("qpos")}},
        rewards={},
        max_episode_steps=5,
    )
    env = MujocoEnv(task, 2)
    assert not mujoco.mj_isSparse(env.simulation.model)
    assert "dense Jacobians" in env.spec.notes[0]


class Crowd(gymnasium.Env[Any, Any]):
    """A foreign environment around a large model."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, gear: float = 1.0) -> None:
        self.model = mujoco.MjModel.from_xml_string(crawlers(5))
        self.model.opt.timestep *= gear
        self.data = mujoco.MjData(self.model)


@on_4_0_0
def test_foreign_environments_too_and_their_models_have_a_hash() -> None:
    gymnasium.register("Crowd-v0", Crowd, max_episode_steps=5)
    try:
        made = [
            GymConfig(id="Crowd-v0", kwargs=kwargs).build_unchecked(1)
            for kwargs in ({}, {}, {"gear": 2.0})
        ]
    finally:
        del gymnasium.registry["Crowd-v0"]
    assert "dense Jacobians" in made[0].spec.notes[0]
    assert made[0].spec.model == made[1].spec.model != made[2].spec.model
