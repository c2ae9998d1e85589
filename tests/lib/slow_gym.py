"""A Gymnasium environment whose step computes in Python for a while."""

from __future__ import annotations

from time import process_time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Slow(gymnasium.Env[Any, Any]):
    """A random walk; a step takes `seconds` of processor time."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, seconds: float = 0.001, breaks: int = 0) -> None:
        self.seconds, self.breaks, self.place, self.steps = seconds, breaks, 0.0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.normal()), 0
        return np.array([self.place, 1.0], np.float32), {}

    def step(self, action: Any) -> Any:
        end = process_time() + self.seconds
        while process_time() < end:
            pass
        self.steps += 1
        if self.steps == self.breaks:
            raise ValueError("the wheel came off")
        self.place += float(action[0]) + float(self.np_random.normal())
        ended = abs(self.place) > 5
        return np.array([self.place, 1.0], np.float32), -abs(self.place), ended, False, {}


gymnasium.register("Slow-v0", Slow, max_episode_steps=30)
