"""Demonstrations of tasks: an expert, and the true progress, beside a task as it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from etude.core.contracts import Array, Observations
from etude.envs.mujoco.task import Group, Part, Term

SIMULATION, TARGET = "_simulation", "_target"
"""What pictures are drawn from: observations that are not stored."""
PROGRESS = "progress"
"""True progress, [1] from 0 at the start to 1 at success: to evaluate by, not to learn from."""
PROPRIO = "proprio"
"""What the robot measures of itself."""


class Actor(Protocol):
    """Who demonstrates: a scripted expert, or a trained policy."""

    def reset(self, env_ids: Array) -> None:
        """Environments [k] begin a new episode."""
        ...

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, n] in [-1, 1]."""
        ...


class Demonstration(Part):
    """A part that stands behind those of a task; `TaskConfig.demonstration` is its class.

    It is made of the task's config and its view, which has a "target" [num_envs, 3].
    """

    has_gripper = False
    """Whether the last action is a gripper's, open where positive."""

    def __init__(self, config: Any, view: Any) -> None:
        self.config, self.view = config, view

    @abstractmethod
    def progress(self) -> Array:
        """[num_envs]: how far each episode has come; it is clipped to 0 to 1."""

    @abstractmethod
    def proprioception(self) -> tuple[Array, ...]:
        """What the robot measures of itself, [num_envs, n] each."""

    @abstractmethod
    def expert(self) -> Actor:
        """A scripted policy that solves the task."""

    def observations(self) -> dict[str, Mapping[str, Term] | Group]:
        """What is seen beside the task's own observations."""
        state: dict[str, Term] = {"state": lambda view: self.env.simulation.state}
        return {
            PROPRIO: {"own": lambda view: np.concatenate(self.proprioception(), axis=1)},
            PROGRESS: {"progress": lambda view: np.clip(self.progress(), 0.0, 1.0)[:, None]},
            SIMULATION: Group(state, dtype="float64"),
            TARGET: Group({"target": lambda view: view.target}, dtype="float64"),
        }
