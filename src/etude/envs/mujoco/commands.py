"""Commands that a policy is asked to follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Draws, Part, derived


class VelocityCommand(Part):
    """A velocity along the base's heading (x, y in m/s) and about the vertical (yaw in rad/s).

    It is drawn uniformly in the ranges at an episode's start and again `every` (least, most)
    seconds. Each number is zero with a chance of `zero`, and all three with a chance of `stand`.
    `acceleration`: the command moves to what was drawn by at most this much per second, in m/s^2
    and rad/s^2, and from 0 at an episode's start; None: it is there at once. The errors that are
    reported are those of what was drawn. `settle`: seconds after a change that the settled errors
    leave out.
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
        """[num_envs, 3] m/s, m/s, rad/s: what is to be followed now."""
        self.target = env.state("command/target", 3)
        """[num_envs, 3]: what it moves to."""
        self._left = env.state("command/left", dtype="int64")
        self._age = env.state("command/age", dtype="int64")
        self._sums = env.state("command/error_sums", 2, 2)
        self._counts = env.state("command/error_counts", 2)
        self.fixed = False
        """Commands are no longer drawn."""

    @property
    def ranges(self) -> Array:
        """[3, 2]: the least and the most of x, y and yaw that are drawn."""
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
        """Give all environments this command [3], and draw no other; a joystick does so."""
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
        # Errors are those of what was asked for in this step.
        self._age += 1
        turning = np.abs(self._robot.yaw_rate - self.target[:, 2])
        errors = np.stack([self._off(self.target), turning], axis=1)
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

    @derived
    def velocity_error(self) -> Array:
        """[num_envs] m/s: how far the planar velocity is from the command."""
        return self._off(self.command)

    @derived
    def turning_error(self) -> Array:
        """[num_envs] rad/s, with its sign."""
        found: Array = self._robot.yaw_rate - self.command[:, 2]
        return found

    def _off(self, asked: Array) -> Array:
        """[num_envs] m/s of the planar velocity from what is asked [num_envs, 3]."""
        away = self._robot.heading_velocity[:, :2] - asked[:, :2]
        found: Array = np.sqrt(np.einsum("ij,ij->i", away, away))
        return found

    def mean_error(self, which: int, settled: bool) -> Array:
        """[num_envs]: of the episode so far; which: 0 for velocity, 1 for turning."""
        sums, counts = self._sums[:, int(settled), which], self._counts[:, int(settled)]
        mean: Array = sums / np.maximum(counts, 1.0)
        return mean
