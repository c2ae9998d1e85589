"""Reset parts: random starts around the robot's home pose."""

from __future__ import annotations

import math

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Draws, Part
from etude.envs.mujoco.terrain import Terrain


class JointNoise(Part):
    """Start joints at up to `position` (rad or m) from home, with up to `velocity` (per s)."""

    def __init__(self, robot: Robot, position: float = 0.1, velocity: float = 0.0) -> None:
        self._robot, self._position, self._velocity = robot, position, velocity

    def bind(self) -> None:
        simulation = self.env.simulation
        self._qpos, self._qvel = simulation.bind("qpos"), simulation.bind("qvel")

    def reset(self, env_ids: Array, draws: Draws) -> None:
        robot, count = self._robot, len(self._robot.joint_names)
        where = np.ix_(env_ids, robot.qpos_ids)
        noise = draws.uniform("joint-noise", count, low=-self._position, high=self._position)
        low, high = robot.joint_range.T
        self._qpos[where] = np.clip(self._qpos[where] + noise, low, high)
        if self._velocity:
            speed = draws.uniform("joint-speed", count, low=-self._velocity, high=self._velocity)
            self._qvel[np.ix_(env_ids, robot.dof_ids)] = speed


class BasePose(Part):
    """Start a floating base at a random pose: turned by up to `yaw` (rad) either way, in an `area`
    (m along x and y), raised by up to `lift` (m), with velocities of up to `speed` (m/s and rad/s).

    `terrain`: start on the tile that it has chosen for the episode.
    """

    def __init__(
        self,
        robot: Robot,
        yaw: float = math.pi,
        area: tuple[float, float] = (0.0, 0.0),
        lift: float = 0.0,
        speed: float = 0.0,
        terrain: Terrain | None = None,
    ) -> None:
        self._robot, self._yaw, self._area, self._lift = robot, yaw, area, lift
        self._speed, self._terrain = speed, terrain

    def bind(self) -> None:
        if not self._robot.floats:
            raise UsageError("BasePose is for robots with a free joint: this one has a fixed base.")
        simulation = self.env.simulation
        self._qpos, self._qvel = simulation.bind("qpos"), simulation.bind("qvel")

    def reset(self, env_ids: Array, draws: Draws) -> None:
        first, dof = self._robot.root, self._robot.root_dof
        x, y, yaw, lift = draws.uniform("base-pose", 4, low=-1.0).T
        pose = self._qpos[env_ids, first : first + 7]
        pose[:, 0] += x * self._area[0] / 2
        pose[:, 1] += y * self._area[1] / 2
        pose[:, 2] += (lift + 1.0) / 2 * self._lift
        if self._terrain is not None:
            pose[:, :3] += self._terrain.start(env_ids)
        half = yaw * self._yaw / 2
        c, s = np.cos(half), np.sin(half)
        w, i, j, k = pose[:, 3:].T.copy()
        pose[:, 3:] = np.stack([c * w - s * k, c * i - s * j, c * j + s * i, c * k + s * w], axis=1)
        self._qpos[env_ids, first : first + 7] = pose
        if self._speed:
            speed = draws.uniform("base-speed", 6, low=-self._speed, high=self._speed)
            self._qvel[env_ids, dof : dof + 6] = speed
