"""Episodic rewards: what an episode earned, told only when it is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree


class Episodic:
    """An environment whose rewards are held back until an episode ends."""

    def __init__(self, env: BatchEnv) -> None:
        self._env = env
        self.num_rows, self.spec = env.num_rows, env.spec
        self._earned: Array = np.zeros(env.num_rows)

    def __getattr__(self, name: str) -> Any:
        # What only some environments have: physics_seconds, present, follow.
        return getattr(self._env, name)

    def reset(self, key: Key) -> Observations:
        self._earned[:] = 0.0
        return self._env.reset(key)

    def restart(self) -> Observations:
        """Of an environment that can."""
        self._earned[:] = 0.0
        obs: Observations = self._env.restart()  # type: ignore[attr-defined]
        return obs

    def step(self, actions: Array) -> StepResult:
        result = self._env.step(actions)
        self._earned += result.reward
        over = result.terminated | result.truncated
        reward: Array = np.where(over, self._earned, 0.0).astype(np.float32)
        self._earned[over] = 0.0
        return replace(result, reward=reward)

    def snapshot(self) -> Tree:
        """{"inner": the environment's, "earned": [rows]}; {} where the environment has none."""
        inner = self._env.snapshot()
        return {"inner": inner, "earned": self._earned.copy()} if inner else {}

    def restore(self, snapshot: Tree, key: Key) -> None:
        self._env.restore(snapshot["inner"], key)
        self._earned[:] = snapshot["earned"]

    def close(self) -> None:
        self._env.close()
