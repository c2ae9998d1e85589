"""Episodic rewards: what an episode earned, told only when it is over."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from etude.core.abilities import EnvWrapper, Restarts, ability
from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree

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
