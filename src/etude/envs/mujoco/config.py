"""The config of a task on MuJoCo."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from etude.core.contracts import BatchEnv, Exactness
from etude.envs.config import EnvConfig
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.task import Demonstration, Task


class TaskConfig(EnvConfig):
    """The config of a task on MuJoCo: its fields are options, `define` is the task."""

    demonstration: ClassVar[type[Demonstration] | None] = None
    """Its progress and its scripted expert; None where it cannot be demonstrated."""

    @abstractmethod
    def define(self) -> Task:
        """The task with these options. Called once for every group of environments."""

    def build(self, num_envs: int, threads: int = 1) -> MujocoEnv:
        return MujocoEnv(self.define(), num_envs, threads)

    def demonstrated(
        self, num_envs: int, threads: int = 1, needed_by: str = "A demonstration"
    ) -> tuple[MujocoEnv, Demonstration]:
        """Environments with the observations that pictures and demonstrations need, and the part
        that gives them.

        needed_by: the subject of the error message where the task has no demonstration.
        """
        if self.demonstration is None:
            return super().demonstrated(num_envs, threads, needed_by)
        task = self.define()
        shown = self.demonstration(self, task.view)
        parts = (*task.all_parts, shown)
        observations = {**task.observations, **shown.observations()}
        seen = replace(task, parts=parts, observations=observations)
        return MujocoEnv(seen, num_envs, threads), shown

    def build_with_pictures(self, num_envs: int, threads: int = 1) -> BatchEnv:
        from etude.envs.mujoco.pictures import Pictured

        env, _ = self.demonstrated(num_envs, threads, f"env.pictures {self.pictures}")
        return Pictured(env, self.pictures)

    def exactness(self) -> Exactness:
        """Such tasks are exact: state is declared, and `etude check` finds what is not."""
        return Exactness(True, "the snapshot holds every number the simulation continues from")
