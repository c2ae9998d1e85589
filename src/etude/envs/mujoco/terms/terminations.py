"""When episodes end, [num_envs] bool each."""

from __future__ import annotations

import math

from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Term


def tilted(robot: Robot, degrees: float = 60.0) -> Term:
    """The base leans further than this."""
    bound = -math.cos(math.radians(degrees))
    return lambda _: robot.gravity[:, 2] > bound


def lower_than(robot: Robot, height: float) -> Term:
    """The base is lower than this above the ground, m."""
    return lambda _: robot.height < height


def higher_than(robot: Robot, height: float) -> Term:
    """The base is higher than this above the ground, m."""
    return lambda _: robot.height > height
