"""The tasks as Gymnasium vector environments, for peers that take these."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from benchmarks.progress import Progress, Steps
from benchmarks.tasks import Task


def make_vector(task: Task, num_envs: int, processes: bool = False) -> gymnasium.vector.VectorEnv:
    """[num_envs] environments that are reset in the step in which an episode ends.

    Tasks of Etude come from `etude.make_vec`, which steps all of them in one call of the engine;
    others from Gymnasium, in this process or one process each.
    """
    if not task.env_id:
        import etude

        return etude.make_vec(task.name, num_envs=num_envs, threads=2)
    makers = [partial(make_one, task) for _ in range(num_envs)]
    if processes:
        return AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def make_one(task: Task) -> gymnasium.Env[Any, Any]:
    """A single environment of the task."""
    if task.env_id:
        return gymnasium.make(task.env_id)
    import etude

    return etude.make(task.name)


def successes(infos: dict[str, Any]) -> Any:
    """[num_envs] numbers in a step in which an episode ended, where the task has success."""
    return infos.get("final_info", {}).get("is_success")


def final_obs(obs: Any, infos: dict[str, Any]) -> Any:
    """[num_envs, n]: where episodes ended what they ended on, elsewhere what was observed."""
    if "final_obs" not in infos:
        return obs
    last = np.array(obs, copy=True)
    for i in np.flatnonzero(infos["_final_obs"]):
        last[i] = infos["final_obs"][i]
    return last


class Recorded(gymnasium.vector.VectorWrapper):
    """Tells the run's progress about steps and episodes; clips actions to their box."""

    def __init__(self, env: gymnasium.vector.VectorEnv, progress: Progress) -> None:
        super().__init__(env)
        self._count = Steps(progress, env.num_envs)

    def step(self, actions: Any) -> Any:
        self._count.before()
        space = self.env.action_space
        result = self.env.step(np.clip(actions, space.low, space.high))
        _, rewards, terminated, truncated, infos = result
        self._count.after(rewards, terminated | truncated, successes(infos))
        return result


def make(progress: Progress, num_envs: int | None = None, processes: bool = False) -> Recorded:
    """The task of a run, recorded."""
    task = progress.task
    return Recorded(make_vector(task, num_envs or task.num_envs, processes), progress)
