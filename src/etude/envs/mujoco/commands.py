"""Velocity commands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.simulation import Marker
from etude.envs.mujoco.task import Draws, Part, derived


class VelocityCommand(Part):
    """A velocity command in the frame of the base's heading: x, y in m/s and yaw rate in rad/s.

    The target is sampled uniformly from the ranges at the start of an episode and again `every`
    (minimum, maximum) seconds. `zero`: probability that a component is 0. `stand`: probability
    that all three are 0. `acceleration`: rate at which the command moves to the target, m/s^2 and
    rad/s^2, starting from 0; None sets the command to the target at once. Reported errors are
    measured from the target. `settle`: seconds after a new target that settled errors leave out.
    """

    def __init__(
        self,
        robot: Robot,
        x: tuple[float, float] = (-1.0, 1.0),
        y: tuple[float, float] = (-0.5, 0.5),
        yaw: tuple[float, float] = (-1.0, 1.0),
        every: tuple[float, float] = (3.0, 8.0),
        zero: float = 0.0,
        stand: float = 0.0,
        settle: float = 1.0,
        acceleration: float | None = None,
    ) -> None:
        self._robot, self._every, self._zero, self._stand = robot, every, zero, stand
        self._low, self._high = np.array([x, y, yaw], np.float64).T
        self._settle, self._acceleration = settle, acceleration

    def bind(self) -> None:
        env = self.env
        self.command = env.state("command", 3)
        """[num_envs, 3] m/s, m/s, rad/s: the current command."""
        self.target = env.state("command/target", 3)
        """[num_envs, 3]: the sampled target that the command moves to."""
        self._left = env.state("command/left", dtype="int64")
        self._age = env.state("command/age", dtype="int64")
        self._sums = env.state("command/error_sums", 2, 2)
        self._counts = env.state("command/error_counts", 2)
        self.fixed = False
        """Whether the command is held instead of sampled."""

    @property
    def ranges(self) -> Array:
        """[3, 2]: minimum and maximum of x, y and yaw rate."""
        found: Array = np.stack([self._low, self._high], axis=1)
        return found

    def describe(self) -> Tree:
        return {
            "command": {
                "about": "velocity along the heading, ahead and to the left, and turning rate",
                "unit": ["m/s", "m/s", "rad/s"],
                "range": self.ranges.tolist(),
                "every": list(self._every),
                "zero": self._zero,
                "stand": self._stand,
                "acceleration": self._acceleration,
            }
        }

    def hold(self, command: Sequence[float]) -> None:
        """Set the command [3] of all environments and stop sampling, as a joystick does."""
        self.fixed = True
        changed = (self.target != command).any(axis=1)
        self.target[changed] = command
        self._age[changed] = 0
        if self._acceleration is None:
            self.command[:] = self.target

    def reset(self, env_ids: Array, draws: Draws) -> None:
        self._sums[env_ids] = self._counts[env_ids] = 0.0
        self._age[env_ids] = 0
        self.command[env_ids] = 0.0
        self._draw(env_ids, draws)

    def _draw(self, env_ids: Array, draws: Draws) -> None:
        if not self.fixed:
            self._draw_target(env_ids, draws)
        if self._acceleration is None:
            self.command[env_ids] = self.target[env_ids]

    def _draw_target(self, env_ids: Array, draws: Draws) -> None:
        numbers = draws.uniform("command", 3, low=self._low, high=self._high)
        chance = draws.uniform("command/zero", 5)
        numbers *= (chance[:, :3] >= self._zero) & (chance[:, 3:4] >= self._stand)
        self.target[env_ids] = numbers
        low, high = self._every
        seconds = low + chance[:, 4] * (high - low)
        self._left[env_ids] = np.maximum(seconds / self.env.dt, 1.0)
        self._age[env_ids] = 0

    def update(self) -> None:
        # Errors from the target of this step, before a new one is sampled.
        self._age += 1
        turning = np.abs(self._robot.yaw_rate - self.target[:, 2])
        errors = np.stack([self._planar_error(self.target), turning], axis=1)
        settled = self._age * self.env.dt > self._settle
        self._sums[:, 0] += errors
        self._sums[:, 1] += errors * settled[:, None]
        self._counts[:, 0] += 1.0
        self._counts[:, 1] += settled
        self._left -= 1

    def change(self) -> None:
        due = (self._left <= 0).nonzero()[0]
        if due.size:
            self._draw(due, Draws(self.env, due))
        if self._acceleration is not None:
            most = self._acceleration * self.env.dt
            self.command += np.clip(self.target - self.command, -most, most)

    def markers(self, env_id: int, step: int) -> tuple[Marker, ...]:
        from etude.envs.mujoco.markers import Twist

        return (Twist(self._robot.body, self.command[env_id].copy()),)

    @derived
    def velocity_error(self) -> Array:
        """[num_envs] m/s: distance of the horizontal velocity from the command."""
        return self._planar_error(self.command)

    @derived
    def turning_error(self) -> Array:
        """[num_envs] rad/s: yaw rate minus commanded yaw rate."""
        found: Array = self._robot.yaw_rate - self.command[:, 2]
        return found

    def _planar_error(self, wanted: Array) -> Array:
        """[num_envs] m/s: distance of the horizontal velocity from a command [num_envs, 3]."""
        difference = self._robot.heading_velocity[:, :2] - wanted[:, :2]
        error: Array = np.sqrt(np.einsum("ij,ij->i", difference, difference))
        return error

    def mean_error(self, which: int, settled: bool) -> Array:
        """Mean error [num_envs] of the episode so far; `which`: 0 for velocity, 1 for yaw rate."""
        sums, counts = self._sums[:, int(settled), which], self._counts[:, int(settled)]
        mean: Array = sums / np.maximum(counts, 1.0)
        return mean
