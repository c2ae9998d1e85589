"""Demonstrations of reach: its progress, and a scripted expert."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array, Observations
from etude.envs.mujoco.demonstration import Demonstration
from etude.envs.mujoco.env import Draws
from etude.envs.robots.kuka.scene import HAND_SITE, arm_table
from etude.tasks.reach.task import TIMESTEP, ReachConfig, ReachingArm, success

_DAMPING = 0.05


class ReachDemonstration(Demonstration):
    """Progress is the share of the way to the target."""

    def bind(self) -> None:
        self._first_distance = self.env.keep("first_distance", np.ones(self.env.num_envs))

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self._first_distance[env_ids] = self.view.distance[env_ids]

    def progress(self) -> Array:
        covered = 1.0 - self.view.distance / self._first_distance
        return np.where(success(self.view), 1.0, covered)

    def proprioception(self) -> tuple[Array, ...]:
        return self.view.joint_position, self.view.joint_velocity, self.view.hand

    def expert(self) -> ReachExpert:
        return ReachExpert(self.view, self.config)


class ReachExpert:
    """Moves the hand straight at the target, by damped least squares on the joints."""

    def __init__(self, arm: ReachingArm, config: ReachConfig) -> None:
        self._arm, self._simulation = arm, arm.env.simulation
        self._body = int(self._simulation.model.site(HAND_SITE).bodyid[0])
        self._scale = arm_table().speed * (config.speed * (TIMESTEP * config.substeps))

    def reset(self, env_ids: Array) -> None:
        """Nothing is remembered."""

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, 7] float32 for where the arms are now."""
        move, _ = self._simulation.jacobians(self._body, self._arm.hand)
        move = move[:, :, : len(self._scale)]
        square = move @ move.transpose(0, 2, 1) + _DAMPING**2 * np.eye(3)
        joints = move.transpose(0, 2, 1) @ np.linalg.solve(square, self._arm.offset[:, :, None])
        actions = joints[:, :, 0] / self._scale
        # Shortened as a whole, so that the hand keeps its direction.
        actions /= np.maximum(np.abs(actions).max(axis=1, keepdims=True), 1.0)
        return np.asarray(actions, np.float32)
