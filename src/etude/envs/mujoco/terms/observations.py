"""Observations of robots. Every one takes noise, clip, scale, delay and history by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.observing import Observation
from etude.envs.mujoco.robot import Feet, Robot
from etude.envs.mujoco.terrain import Terrain


def joint_positions(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, joints] rad or m, from the home pose."""
    return Observation(lambda _: robot.joint_positions, **pipeline)


def joint_velocities(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, joints] rad/s or m/s."""
    return Observation(lambda _: robot.joint_velocities, **pipeline)


def height(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 1] m: of the base above the ground."""
    return Observation(lambda _: robot.height[:, None], **pipeline)


def position(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3] m: of the base in the world."""
    return Observation(lambda _: robot.position, **pipeline)


def gravity(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3]: the direction of gravity along the base's axes."""
    return Observation(lambda _: robot.gravity, **pipeline)


def velocity(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3] m/s: of the base along its own axes."""
    return Observation(lambda _: robot.velocity, **pipeline)


def angular_velocity(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3] rad/s: a gyroscope in the base."""
    return Observation(lambda _: robot.angular_velocity, **pipeline)


def heading(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 2]: the direction of the base's x axis on the ground."""
    return Observation(lambda _: robot.heading, **pipeline)


def contact(feet: Feet, **pipeline: Any) -> Observation:
    """[num_envs, feet]: 1 where a foot touches something."""
    return Observation(lambda _: feet.contact.astype("float32"), **pipeline)


def air_time(feet: Feet, **pipeline: Any) -> Observation:
    """[num_envs, feet] s."""
    return Observation(lambda _: feet.air_time, **pipeline)


def command(source: VelocityCommand, **pipeline: Any) -> Observation:
    """[num_envs, 3]: the commanded velocity, m/s, m/s and rad/s."""
    return Observation(lambda _: source.command, **pipeline)


def height_scan(robot: Robot, terrain: Terrain, points: Array, **pipeline: Any) -> Observation:
    """[num_envs, points] m: the ground below the base, at points [points, 2] of its heading."""

    def term(_: object) -> Array:
        x, y = robot.heading[:, None, 0], robot.heading[:, None, 1]
        place = np.stack(
            [points[:, 0] * x - points[:, 1] * y, points[:, 0] * y + points[:, 1] * x], axis=2
        )
        ground = terrain.height_at(robot.position[:, None, :2] + place)
        below: Array = robot.position[:, 2:] - ground
        return below

    return Observation(term, **pipeline)


def last_action(**pipeline: Any) -> Observation:
    """[num_envs, n]: the policy's last action. For tasks whose terms are given the environment."""
    return Observation(_last_action, **pipeline)


def _last_action(env: MujocoEnv) -> Any:
    return env.action
