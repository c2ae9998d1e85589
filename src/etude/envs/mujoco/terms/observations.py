"""Observation terms of robots. Each accepts the keywords noise, clip, scale, delay and history."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import Array, Reflection
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.mirror import (
    PLANAR_VELOCITY,
    ROTATION,
    VECTOR,
    Mirror,
    swapped,
    unchanged,
)
from etude.envs.mujoco.robot import Feet, Robot
from etude.envs.mujoco.task import Function, Observation
from etude.envs.mujoco.terrain import Terrain

HEADING = Reflection((0, 1), (1.0, -1.0))


class SensorNoise(Config):
    """Half-widths of the uniform noise of a robot's sensors."""

    gyro: float = Field(0.0, ge=0, description="Angular velocity, rad/s.")
    gravity: float = Field(0.0, ge=0, description="Direction of gravity.")
    joint_position: float = Field(0.0, ge=0, description="Joint positions, rad.")
    joint_velocity: float = Field(0.0, ge=0, description="Joint velocities, rad/s.")
    velocity: float = Field(0.0, ge=0, description="Velocity of the base, m/s.")


def joint_positions(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, joints] rad or m, from the home pose."""
    return as_term(
        lambda _: robot.joint_positions,
        "rad or m",
        "from the home pose, in the order of the joints",
        lambda _: robot.mirror(),
        pipeline,
    )


def joint_velocities(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, joints] rad/s or m/s."""
    return as_term(
        lambda _: robot.joint_velocities,
        "rad/s or m/s",
        "in the order of the joints",
        lambda _: robot.mirror(),
        pipeline,
    )


def sensors(
    robot: Robot, noise: SensorNoise, delay: tuple[int, int], with_velocity: bool = True
) -> dict[str, Function | Observation]:
    """Observations of a legged robot's sensors: gyro, gravity, joints and their speeds, and the
    velocity of the base as from an estimator."""
    found: dict[str, Function | Observation] = {
        "gyro": angular_velocity(robot, noise=noise.gyro, scale=0.25, delay=delay),
        "gravity": gravity(robot, noise=noise.gravity, delay=delay),
        "joints": joint_positions(robot, noise=noise.joint_position, delay=delay),
        "speeds": joint_velocities(robot, noise=noise.joint_velocity, scale=0.05, delay=delay),
    }
    if with_velocity:
        found["velocity"] = velocity(robot, noise=noise.velocity, delay=delay)
    return found


def ball_joints(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 6 balls]: the x and z axes of the bodies of ball joints, in their parents."""
    from etude.data.motion import rotations as rot

    return as_term(
        lambda _: rot.two_axes(robot.ball_quaternions).reshape(len(robot.position), -1),
        "1",
        "x and z axes of the bodies of ball joints, in their parents",
        None,
        pipeline,
    )


def ball_velocities(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3 balls] rad/s: angular velocities of ball joints."""
    return as_term(
        lambda _: robot.ball_velocities.reshape(len(robot.position), -1),
        "rad/s",
        "angular velocities of ball joints, in the frames of their bodies",
        None,
        pipeline,
    )


def height(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 1] m: of the base above the ground."""
    return as_term(
        lambda _: robot.height[:, None], "m", "of the base above the ground", unchanged(1), pipeline
    )


def position(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3] m: of the base in the world."""
    return as_term(lambda _: robot.position, "m", "of the base in the world", VECTOR, pipeline)


def gravity(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3]: the direction of gravity along the base's axes."""
    return as_term(
        lambda _: robot.gravity,
        "1",
        "the direction of gravity along the base's axes; (0, 0, -1) is upright",
        VECTOR,
        pipeline,
    )


def velocity(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3] m/s: of the base along its own axes."""
    return as_term(
        lambda _: robot.velocity, "m/s", "of the base along its own axes", VECTOR, pipeline
    )


def angular_velocity(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 3] rad/s: angular velocity, as a gyroscope in the base measures it."""
    return as_term(
        lambda _: robot.angular_velocity, "rad/s", "a gyroscope in the base", ROTATION, pipeline
    )


def heading(robot: Robot, **pipeline: Any) -> Observation:
    """[num_envs, 2]: the direction of the base's x axis on the ground."""
    return as_term(
        lambda _: robot.heading,
        "1",
        "the direction of the base's x axis on the ground",
        HEADING,
        pipeline,
    )


def contact(feet: Feet, **pipeline: Any) -> Observation:
    """[num_envs, feet]: 1 where a foot touches something."""
    return as_term(
        lambda _: feet.contact.astype("float32"),
        "1",
        "1 where a foot touches something",
        lambda _: feet.mirror(),
        pipeline,
    )


def air_time(feet: Feet, **pipeline: Any) -> Observation:
    """[num_envs, feet] s: time since each foot was last on the ground."""
    return as_term(
        lambda _: feet.air_time,
        "s",
        "since each foot was last on the ground",
        lambda _: feet.mirror(),
        pipeline,
    )


def command(source: VelocityCommand, **pipeline: Any) -> Observation:
    """[num_envs, 3]: the commanded velocity, m/s, m/s and rad/s."""
    return as_term(
        lambda _: source.command,
        "m/s, m/s and rad/s",
        "commanded velocity: ahead, to the left, turning left",
        PLANAR_VELOCITY,
        pipeline,
    )


def height_scan(robot: Robot, terrain: Terrain, points: Array, **pipeline: Any) -> Observation:
    """[num_envs, points] m: height of the base above the ground, at points [points, 2] in the frame
    of its heading."""

    def term(_: object) -> Array:
        x, y = robot.heading[:, None, 0], robot.heading[:, None, 1]
        place = np.stack(
            [points[:, 0] * x - points[:, 1] * y, points[:, 0] * y + points[:, 1] * x], axis=2
        )
        ground = terrain.height_at(robot.position[:, None, :2] + place)
        below: Array = robot.position[:, 2:] - ground
        return below

    names = [f"the point {point.tolist()} of the height scan" for point in points]
    about = "the base above the ground, at points around it"
    return as_term(term, "m", about, lambda _: swapped(points, names), pipeline)


def last_action(**pipeline: Any) -> Observation:
    """[num_envs, n]: the policy's last action. For tasks without a view of their own."""
    about = "the policy's last action; 0 at first"
    return as_term(_last_action, "1", about, lambda env: env.task.action.mirror(), pipeline)


def _last_action(env: MujocoEnv) -> Any:
    return env.action


def as_term(
    function: Function, unit: str, about: str, mirror: Mirror | None, pipeline: dict[str, Any]
) -> Observation:
    """A term with the keywords of its pipeline; mirror: None for one without a mirror image."""
    return Observation(function, **{"unit": unit, "about": about, "mirror": mirror, **pipeline})
