"""Wrappers of environments: episodic rewards, and the observation "task"."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from etude.core.abilities import EnvWrapper, Restarts, ability
from etude.core.contracts import Array, ArraySpec, BatchEnv, Observations, StepResult
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.data.sentences import TASK

A = TypeVar("A")


class Episodic(EnvWrapper):
    """Gives the sum of an episode's rewards in its last step, and 0 before."""

    def __init__(self, inner: BatchEnv) -> None:
        super().__init__(inner)
        self._earned: Array = np.zeros(inner.num_envs)

    def ability(self, kind: type[A]) -> A | None:
        found = super().ability(kind)
        return self if found is not None and isinstance(self, kind) else found

    def reset(self, key: Key) -> Observations:
        self._earned[:] = 0.0
        return super().reset(key)

    def restart(self) -> Observations:
        """Restart an environment that implements `Restarts`."""
        inner = ability(self.inner, Restarts)
        assert inner is not None
        self._earned[:] = 0.0
        return inner.restart()

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        self._earned += result.reward
        over = result.terminated | result.truncated
        reward: Array = np.where(over, self._earned, 0.0).astype(np.float32)
        self._earned[over] = 0.0
        return replace(result, reward=reward)

    def snapshot(self) -> Tree:
        """{"inner": the environment's snapshot, "earned": [rows]}; {} if that is empty."""
        inner = super().snapshot()
        return {"inner": inner, "earned": self._earned.copy()} if inner else {}

    def restore(self, snapshot: Tree, key: Key) -> None:
        super().restore(snapshot["inner"], key)
        self._earned[:] = snapshot["earned"]


class WithTask(EnvWrapper):
    """Adds the vector of the task to every observation."""

    def __init__(self, inner: BatchEnv, sentence: str, vector: tuple[float, ...]) -> None:
        """sentence: "" if the vector belongs to no sentence."""
        super().__init__(inner)
        if not vector:
            raise UsageError(
                f"The vector of the sentence '{sentence}' is unknown: learn from a dataset with "
                "that sentence, start from a policy that was trained with it (--from), or give "
                "--env.task-vector."
            )
        if TASK in inner.spec.observations:
            raise UsageError(
                "This environment already has an observation 'task': leave out env.sentence and "
                "env.task_vector."
            )
        self._vector: Array = np.array(vector, np.float32)
        observations = {**inner.spec.observations, TASK: ArraySpec((len(vector),))}
        known = {sentence: vector} if sentence else {}
        self.spec = replace(inner.spec, observations=observations, sentences=known)

    def _with_task(self, obs: Observations, num: int) -> Observations:
        return {**obs, TASK: np.tile(self._vector, (num, 1))}

    def ability(self, kind: type[A]) -> A | None:
        found = super().ability(kind)
        return self if found is not None and isinstance(self, kind) else found

    def reset(self, key: Key) -> Observations:
        return self._with_task(super().reset(key), self.num_envs)

    def restart(self) -> Observations:
        """Restart an environment that implements `Restarts`."""
        inner = ability(self.inner, Restarts)
        assert inner is not None
        return self._with_task(inner.restart(), self.num_envs)

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        final = self._with_task(result.final_obs, len(result.final_envs))
        return replace(result, obs=self._with_task(result.obs, self.num_envs), final_obs=final)
