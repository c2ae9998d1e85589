"""Tasks that demonstrations can be recorded of: with an expert, and with their true progress."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import numpy as np

from etude.core.contracts import Array, Observations
from etude.envs.mujoco.batch import MujocoTask

SIMULATION, TARGET = "_simulation", "_target"
"""What pictures are drawn from: observations that are not stored."""
PROGRESS = "progress"
"""True progress, [1] from 0 at the start to 1 at success: to evaluate by, not to learn from."""
PROPRIO = "proprio"
"""What the robot measures of itself."""


class Actor(Protocol):
    """Who demonstrates: a scripted expert, or a trained policy."""

    def reset(self, rows: Array) -> None:
        """Rows [k] begin a new episode."""
        ...

    def act(self, obs: Observations) -> Array:
        """Actions [rows, n] in [-1, 1]."""
        ...


class DemonstratedTask(MujocoTask[Any]):
    """Stands before a task among the bases of a class, `EnvConfig.demonstration` names that class.

    It is made of (config, num_envs), and its view has a "target" [rows, 3].
    """

    has_gripper = False
    """Whether the last action is a gripper's, open where positive."""

    @abstractmethod
    def progress(self) -> Array:
        """[rows]: how far each episode has come; it is clipped to 0 to 1."""

    @abstractmethod
    def proprioception(self) -> tuple[Array, ...]:
        """What the robot measures of itself, [rows, n] each."""

    @abstractmethod
    def expert(self) -> Actor:
        """A scripted policy that solves the task."""

    def _observe(self) -> Observations:
        return super()._observe() | {
            PROPRIO: np.concatenate(self.proprioception(), axis=1, dtype=np.float32),
            PROGRESS: np.clip(self.progress(), 0.0, 1.0).astype(np.float32)[:, None],
            SIMULATION: self.simulation.state.copy(),
            TARGET: self.view.target.copy(),
        }

    def truncate(self, rows: Array) -> None:
        """Let the step to come be the last of the episodes in rows [k]."""
        self._elapsed[rows] = self._limit - 1
