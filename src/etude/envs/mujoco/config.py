"""The base config of tasks on MuJoCo."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from etude.core.contracts import BatchEnv, Exactness
from etude.envs.config import EnvConfig
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.task import Demonstration, Task


class TaskConfig(EnvConfig):
    """The base config of a task on MuJoCo: fields are options, `define` builds the task."""

    demonstration: ClassVar[type[Demonstration] | None] = None
    """Progress measure and scripted expert; None for tasks without them."""

    @abstractmethod
    def define(self) -> Task:
        """Build the task with these options. Called once per group of environments."""

    def build(self, num_envs: int, threads: int = 1) -> MujocoEnv:
        return MujocoEnv(self.define(), num_envs, threads)

    def demonstrated(
        self, num_envs: int, threads: int = 1, needed_by: str = "A demonstration"
    ) -> tuple[MujocoEnv, Demonstration]:
        """Environments with the observations that pictures and demonstrations need, and the part
        that adds them.

        needed_by: subject of the error message if the task has no demonstration.
        """
        if self.demonstration is None:
            return super().demonstrated(num_envs, threads, needed_by)
        task = self.define()
        demonstration = self.demonstration(self, task.view)
        parts = (*task.all_parts, demonstration)
        observations = {**task.observations, **demonstration.observations()}
        task = replace(task, parts=parts, observations=observations)
        return MujocoEnv(task, num_envs, threads), demonstration

    def build_with_pictures(self, num_envs: int, threads: int = 1) -> BatchEnv:
        from etude.envs.mujoco.rendering import Pictured

        env, _ = self.demonstrated(num_envs, threads, f"env.pictures {self.pictures}")
        return Pictured(env, self.pictures)

    def exactness(self) -> Exactness:
        """Exact: the state is declared, and `etude check` finds state that is not."""
        return Exactness(True, "the snapshot holds every number the simulation continues from")
