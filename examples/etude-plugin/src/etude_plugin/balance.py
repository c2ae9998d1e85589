"""A MuJoCo task: push a cart so that the pole on it stays upright."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np
from etude.envs.mujoco.batch import MujocoConfig, MujocoTask, Simulation, Terms
from pydantic import Field

from etude.core.contracts import ActionSpec, Array

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


class BalanceConfig(MujocoConfig):
    """Keep a pole upright on a cart that is pushed to and fro."""

    kind: Literal["balance"] = "balance"
    start_angle: float = Field(0.1, ge=0, description="Largest angle at the start, rad.")
    max_angle: float = Field(0.3, gt=0, description="The pole has fallen beyond it, rad.")
    max_offset: float = Field(1.0, gt=0, description="The cart has left beyond it, m.")
    max_episode_steps: int = Field(100, ge=1, description="Control steps of 40 ms.")

    def build(self, num_envs: int, threads: int = 1) -> "Balance":
        return Balance(self, num_envs, threads)


@dataclass(frozen=True)
class View:
    """What the terms read: live arrays, [rows, 2] each, of cart (m, m/s) and pole (rad, rad/s)."""

    position: Array
    velocity: Array
    config: BalanceConfig


def position(view: View) -> Array:
    return view.position


def velocity(view: View) -> Array:
    return view.velocity


def upright(view: View) -> Array:
    return np.cos(view.position[:, 1])


def centred(view: View) -> Array:
    return -np.square(view.position[:, 0])


def fallen(view: View) -> Array:
    return np.abs(view.position[:, 1]) > view.config.max_angle


def left(view: View) -> Array:
    return np.abs(view.position[:, 0]) > view.config.max_offset


def success(view: View) -> Array:
    return ~(fallen(view) | left(view))


TERMS = Terms(
    observations={"state": {"position": position, "velocity": velocity}},
    rewards={"upright": upright, "centred": centred},
    terminations={"fallen": fallen, "left": left},
    success=success,
)


class Balance(MujocoTask[View]):
    """Many carts at once; actions [rows, 1] in [-1, 1] are forces."""

    def __init__(self, config: BalanceConfig, num_envs: int, threads: int) -> None:
        simulation = Simulation(mujoco.MjModel.from_xml_string(SCENE), num_envs, threads)
        self.config = config
        self.control = simulation.bind("ctrl")
        super().__init__(
            simulation,
            View(simulation.bind("qpos"), simulation.bind("qvel"), config),
            TERMS,
            weights={"upright": 0.1, "centred": 0.1},
            action=ActionSpec("box", low=(-1.0,), high=(1.0,)),
            substeps=4,
            max_episode_steps=config.max_episode_steps,
        )

    def _act(self, actions: Array) -> None:
        self.control[:] = actions

    def _place(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        angle = self.config.start_angle
        self.view.position[rows, 1] = [g.uniform(-angle, angle) for g in generators]
