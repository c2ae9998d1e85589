"""Termination terms, [num_envs] bool each."""

from __future__ import annotations

import math

from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Term


def tilted(robot: Robot, degrees: float = 60.0) -> Term:
    """Whether the base is tilted by more than `degrees`."""
    bound = -math.cos(math.radians(degrees))
    return lambda _: robot.gravity[:, 2] > bound


def lower_than(robot: Robot, height: float) -> Term:
    """Whether the base is lower than `height` (m) above the ground."""
    return lambda _: robot.height < height


def higher_than(robot: Robot, height: float) -> Term:
    """Whether the base is higher than `height` (m) above the ground."""
    return lambda _: robot.height > height
