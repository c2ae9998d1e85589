"""Environments that tell their task: the vector of a sentence as the observation "task"."""

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
    """An environment whose rewards are held back until an episode ends."""

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
        """Of an environment that can."""
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
        """{"inner": the environment's, "earned": [rows]}; {} where the environment has none."""
        inner = super().snapshot()
        return {"inner": inner, "earned": self._earned.copy()} if inner else {}

    def restore(self, snapshot: Tree, key: Key) -> None:
        super().restore(snapshot["inner"], key)
        self._earned[:] = snapshot["earned"]


class Telling(EnvWrapper):
    """An environment whose every observation also has the vector of its task."""

    def __init__(self, inner: BatchEnv, sentence: str, vector: tuple[float, ...]) -> None:
        """sentence: "" where the vector is that of none."""
        super().__init__(inner)
        if not vector:
            raise UsageError(
                f"Nothing here knows the vector of the sentence '{sentence}': learn from a dataset "
                "that has it, start from a policy that was told it (--from), or give "
                "--env.task-vector."
            )
        if TASK in inner.spec.observations:
            raise UsageError(
                "This environment has an observation 'task' of its own: leave env.sentence and "
                "env.task_vector out."
            )
        self._vector: Array = np.array(vector, np.float32)
        observations = {**inner.spec.observations, TASK: ArraySpec((len(vector),))}
        known = {sentence: vector} if sentence else {}
        self.spec = replace(inner.spec, observations=observations, sentences=known)

    def _told(self, obs: Observations, num: int) -> Observations:
        return {**obs, TASK: np.tile(self._vector, (num, 1))}

    def ability(self, kind: type[A]) -> A | None:
        found = super().ability(kind)
        return self if found is not None and isinstance(self, kind) else found

    def reset(self, key: Key) -> Observations:
        return self._told(super().reset(key), self.num_envs)

    def restart(self) -> Observations:
        """Of an environment that can."""
        inner = ability(self.inner, Restarts)
        assert inner is not None
        return self._told(inner.restart(), self.num_envs)

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        final = self._told(result.final_obs, len(result.final_envs))
        return replace(result, obs=self._told(result.obs, self.num_envs), final_obs=final)
