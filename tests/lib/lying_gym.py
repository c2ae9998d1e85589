"""Environments that break a promise."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv


class Lying(gymnasium.Env[Any, Any]):
    """One whose third step raises, or has another shape."""

    def __init__(self, lie: str) -> None:
        self.lie, self.steps = lie, 0
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        obs, reward = np.zeros(2, np.float32), 0.0
        if self.steps == 3:
            if self.lie == "raise":
                raise ValueError("the wheel came off")
            if self.lie == "shape":
                obs = np.zeros(3, np.float32)
            if self.lie == "reward":
                return obs, np.zeros(2), False, False, {}
        return obs, reward, False, False, {}


class Diverging(HopperEnv):
    """A hopper whose joints are as fast as floats go."""

    def step(self, action: Any) -> Any:
        self.data.qvel[:] = 1e30
        return super().step(action)


gymnasium.register("Diverging-v0", Diverging)
gymnasium.register("Lying-v0", Lying)
