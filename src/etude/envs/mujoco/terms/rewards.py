"""Reward terms of robots, [num_envs] each; a task gives the weights, negative for costs."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.robot import Feet, Robot
from etude.envs.mujoco.task import Term


def square_sum(values: Array) -> Array:
    """Sum of squares [num_envs] of values [num_envs, n]."""
    found: Array = np.einsum("ij,ij->i", values, values)
    return found


def alive(env: MujocoEnv) -> Array:
    """1 in every step that does not terminate the episode."""
    return ~env.terminated


def track_velocity(command: VelocityCommand, *sigmas: float) -> Term:
    """exp(-error^2 / sigma) of the horizontal velocity error, sigma in (m/s)^2, default 0.25.

    With several sigmas their mean: a wide one has a gradient far from the command, a narrow one
    near it.
    """
    return lambda _: _near(command.velocity_error, sigmas)


def track_turning(command: VelocityCommand, *sigmas: float) -> Term:
    """exp(-error^2 / sigma) of the yaw rate error, sigma in (rad/s)^2; see `track_velocity`."""
    return lambda _: _near(command.turning_error, sigmas)


def _near(error: Array, sigmas: tuple[float, ...]) -> Array:
    """Mean of exp(-error^2 / sigma) over the sigmas, [num_envs] from 0 to 1."""
    square = error * error
    near: Array = np.mean([np.exp(-square / sigma) for sigma in sigmas or (0.25,)], axis=0)
    return near


def vertical_velocity(robot: Robot) -> Term:
    """Squared vertical velocity of the base, (m/s)^2."""
    return lambda _: robot.velocity[:, 2] ** 2


def roll_pitch_rate(robot: Robot) -> Term:
    """Squared roll and pitch rate of the base, (rad/s)^2."""
    return lambda _: square_sum(robot.angular_velocity[:, :2])


def tilt(robot: Robot) -> Term:
    """Squared sine of the angle between the base and upright."""
    return lambda _: square_sum(robot.gravity[:, :2])


def pose(robot: Robot) -> Term:
    """Squared distance of the joints from the home pose, rad^2 or m^2."""
    return lambda _: square_sum(robot.joint_positions)


def joint_speed(robot: Robot) -> Term:
    """Sum of squared joint velocities."""
    return lambda _: square_sum(robot.joint_velocities)


def effort(env: MujocoEnv) -> Array:
    """Sum of squared actions."""
    return square_sum(env.action)


def action_rate(env: MujocoEnv) -> Array:
    """Sum of squared changes of the action."""
    return square_sum(env.action - env.last_action)


def air_time(feet: Feet, least: float = 0.1) -> Term:
    """Air time beyond `least` (s) of the feet that landed in this step, summed."""
    return lambda _: ((feet.air_time - least) * feet.landed).sum(axis=1)


def foot_slip(feet: Feet) -> Term:
    """Squared horizontal speed of the feet on the ground, (m/s)^2, summed."""

    def term(_: object) -> Array:
        planar = feet.velocity[:, :, :2]
        found: Array = (np.einsum("nfi,nfi->nf", planar, planar) * feet.contact).sum(axis=1)
        return found

    return term


def upright(robot: Robot) -> Term:
    """Cosine of the angle between the base and upright."""
    return lambda _: -robot.gravity[:, 2]
