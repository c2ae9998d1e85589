"""Demonstrations of reach: its progress, and a scripted expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array, Observations
from etude.envs.mujoco.demonstration import DemonstratedTask
from etude.robots.kuka.scene import HAND_SITE, arm_table
from etude.tasks.reach.task import TIMESTEP, Reach, ReachConfig, success

_DAMPING = 0.05


class DemonstratedReach(DemonstratedTask, Reach):
    """Reach; progress is the share of the way to the target."""

    def __init__(self, config: ReachConfig, num_envs: int) -> None:
        self._first_distance: Array = np.ones(num_envs)
        Reach.__init__(self, config, num_envs)

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        super()._aim(rows, generators)
        self._first_distance[rows] = self.view.distance[rows]

    def progress(self) -> Array:
        view = self.view
        return np.where(success(view), 1.0, 1.0 - view.distance / self._first_distance)

    def proprioception(self) -> tuple[Array, ...]:
        return self.view.joint_position, self.view.joint_velocity, self.view.hand

    def expert(self) -> ReachExpert:
        return ReachExpert(self, self._config)


class ReachExpert:
    """Moves the hand straight at the target, by damped least squares on the joints."""

    def __init__(self, task: Reach, config: ReachConfig) -> None:
        self._task = task
        self._body = int(task.simulation.model.site(HAND_SITE).bodyid[0])
        self._scale = arm_table().speed * (config.speed * (TIMESTEP * config.substeps))

    def reset(self, rows: Array) -> None:
        """Nothing is remembered."""

    def act(self, obs: Observations) -> Array:
        """Actions [rows, 7] float32 for where the rows are now."""
        view = self._task.view
        move, _ = self._task.simulation.jacobians(self._body, view.hand)
        move = move[:, :, : len(self._scale)]
        square = move @ move.transpose(0, 2, 1) + _DAMPING**2 * np.eye(3)
        joints = move.transpose(0, 2, 1) @ np.linalg.solve(square, view.offset[:, :, None])
        actions = joints[:, :, 0] / self._scale
        # Shortened as a whole, so that the hand keeps its direction.
        actions /= np.maximum(np.abs(actions).max(axis=1, keepdims=True), 1.0)
        return np.asarray(actions, np.float32)
