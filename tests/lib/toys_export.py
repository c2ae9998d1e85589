"""A task whose observation has everything that a term can have."""

from __future__ import annotations

from etude import mj
from etude.envs.mujoco.env import MujocoEnv
from etude.share.export import _observation
from etude_runtime import Observation
from etude_runtime.contract import _observation as parsed

PENDULUM = """
<mujoco>
  <worldbody>
    <body name="rod">
      <joint name="hinge" type="hinge" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 0 0 -.3" size=".02"/>
    </body>
  </worldbody>
  <actuator><motor joint="hinge" gear="2"/></actuator>
</mujoco>
"""


def hanging() -> mj.Task:
    """A pendulum: late, clipped, scaled, with a past of its own and one of the whole."""
    robot = mj.Robot()
    terms = {
        "angle": mj.observations.joint_positions(robot, scale=3.0, history=3),
        "speed": mj.observations.joint_velocities(robot, clip=(-0.5, 0.5), delay=(2, 2)),
        "plain": lambda env: robot.joint_positions[:, 0],
    }
    return mj.Task(
        model=PENDULUM,
        parts=[robot, mj.resets.JointNoise(robot, 0.3, 1.0)],
        action=mj.Controls(),
        observations={"state": mj.Group(terms, delay=(1, 1), history=2)},
        rewards={},
        max_episode_steps=10,
        substeps=3,
    )


def contract_of(env: MujocoEnv) -> Observation:
    """The observation "state" as an export describes it and the runtime reads it."""
    said = env.describe()["observations"]["state"]
    for term in said["terms"]:
        term["key"] = term["name"]
    return parsed("state", _observation("state", env.spec.observations["state"], said))
