"""A MuJoCo task: push a cart so that the pole on it stays upright."""

from typing import Literal

import numpy as np
from pydantic import Field

from etude.plugin import mj

SCENE = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body name="cart">
      <joint name="slide" type="slide" axis="1 0 0" damping="0.1"/>
      <geom type="box" size="0.1 0.05 0.05" mass="1"/>
      <body name="pole">
        <joint name="hinge" type="hinge" axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 0 0 0.6" size="0.02" mass="0.1"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="slide" gear="10"/>
  </actuator>
</mujoco>
"""


class BalanceConfig(mj.TaskConfig):
    """Keep a pole upright on a cart that is pushed to and fro."""

    kind: Literal["balance"] = "balance"
    start_angle: float = Field(0.1, ge=0, description="Largest angle at the start, rad.")
    max_angle: float = Field(0.3, gt=0, description="Angle at which the pole has fallen, rad.")
    max_offset: float = Field(1.0, gt=0, description="Offset that ends an episode, m.")
    max_episode_steps: int = Field(100, ge=1, description="Control steps of 40 ms.")

    def define(self) -> mj.Task:
        robot, cart, pole = mj.Robot(), mj.Robot(joints="slide"), mj.Robot(joints="hinge")
        return mj.Task(
            model=SCENE,
            parts=[robot, cart, pole, mj.resets.JointNoise(pole, self.start_angle)],
            action=mj.Controls(),
            observations={
                "state": {
                    "position": mj.observations.joint_positions(robot),
                    "velocity": mj.observations.joint_velocities(robot),
                }
            },
            rewards={
                "upright": (lambda env: np.cos(pole.joint_positions[:, 0]), 0.1),
                "centred": (lambda env: -np.square(cart.joint_positions[:, 0]), 0.1),
            },
            terminations={
                "fallen": lambda env: np.abs(pole.joint_positions[:, 0]) > self.max_angle,
                "left": lambda env: np.abs(cart.joint_positions[:, 0]) > self.max_offset,
            },
            substeps=4,
            max_episode_steps=self.max_episode_steps,
        )
