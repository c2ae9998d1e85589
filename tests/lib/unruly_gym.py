"""A Gymnasium environment that misbehaves once, or whenever it comes to that step."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


def _hang() -> None:
    while True:
        time.sleep(1)


def _spin() -> None:
    while True:
        pass


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fork() -> None:
    os.fork()  # and both go on


def _eat() -> None:
    """Allocate until the limit, which is set a little above what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        eaten = []
        while True:
            eaten.append(np.ones(1 << 21))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


ACTS: dict[str, Callable[[], Any]] = {
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "interrupt": _interrupt,
    "hang": _hang,
    "spin": _spin,
    "hang in C": lambda: ctypes.PyDLL(None).sleep(1000),  # keeps Python's lock
    "crash": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), 9),
    "C exit": lambda: ctypes.CDLL(None)._exit(0),
    "memory": _eat,
    "fork": _fork,
}
VALUES: dict[str, Callable[[Any, float], Any]] = {
    "scalar": lambda obs, reward: (1.0, reward, False),
    "short": lambda obs, reward: (obs[:1], reward, False),
    "text": lambda obs, reward: (["1.5", "2", "3"], reward, False),
    "none": lambda obs, reward: (None, reward, False),
    "objects": lambda obs, reward: (np.array([1, None, 2]), reward, False),
    "far": lambda obs, reward: (obs + np.float32(1e9), reward, False),
    "reward text": lambda obs, reward: (obs, "1.5", False),
    "reward none": lambda obs, reward: (obs, None, False),
    "reward array": lambda obs, reward: (obs, np.ones(2), False),
    "ended none": lambda obs, reward: (obs, reward, None),
    "ended text": lambda obs, reward: (obs, reward, "False"),
    "nan": lambda obs, reward: (obs * np.float32(np.nan), reward, False),
}


class Unruly(gymnasium.Env[Any, Any]):
    """A walk towards zero. `mark`: a file that is made at the strike, after which there is none
    more; "" for no strike at all. `forever`: every environment strikes, again and again."""

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(
        self, act: str = "", mark: str = "", call: str = "step", at: int = 0, forever: bool = False
    ) -> None:
        self.act, self.mark, self.call, self.at, self.forever = act, mark, call, at, forever
        self.steps = 0
        self.place = np.zeros(3)

    def _due(self, call: str) -> bool:
        """Whether it is time; never in the looks at an environment before a run has its folder."""
        if call != self.call or not self.mark or self.steps < self.at:
            return False
        mark = Path(self.mark)
        if (mark.exists() and not self.forever) or not (mark.parent / "run" / "plan.txt").exists():
            return False
        mark.touch()
        return True

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=3)
        if self._due("reset") and self.act in ACTS:
            ACTS[self.act]()
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        noise = self.np_random.normal(size=3)
        self.place = 0.9 * self.place + 0.1 * noise + 0.1 * float(action[0])
        obs, reward, ended = self.place.astype(np.float32), -float(abs(self.place[0])), False
        if self._due("step"):
            if self.act in ACTS:
                ACTS[self.act]()
            else:
                obs, reward, ended = VALUES[self.act](obs, reward)
        return obs, reward, ended, False, {}


gymnasium.register("Unruly-v0", Unruly, max_episode_steps=20)
