"""Windows of motion: those that steps led to, and a ring of those of older policies."""

from __future__ import annotations

import numpy as np
import torch

from etude.core.contracts import Array, Fragment
from etude.core.trees import Tree


class StepWindows:
    """For every step of a fragment [num_envs, steps] the window it led to, gathered when asked for.

    That is the observation of the next step; where the episode ended, what it ended on (and not
    the window of the episode that began); after the last step, what comes after it.
    """

    def __init__(self, part: Fragment, name: str) -> None:
        self._obs, self._last = part.obs[name], part.last_obs[name]
        self._finals = part.finals.obs[name]
        self.shape: tuple[int, int] = part.rewards.shape
        """(rows, steps)."""
        self._final_of: Array = np.full(self.shape, -1, np.int64)
        self._final_of[part.finals.envs, part.finals.steps] = np.arange(len(part.finals.envs))

    def at(self, envs: Array, steps: Array) -> Array:
        """[n, frames, features], a copy: what the steps (envs [n], steps [n]) led to."""
        end = self.shape[1] - 1
        windows: Array = self._obs[envs, np.minimum(steps + 1, end)]
        after = steps == end
        windows[after] = self._last[envs[after]]
        final = self._final_of[envs, steps]
        over = final >= 0
        windows[over] = self._finals[final[over]]
        return windows

    def draw(self, generator: np.random.Generator, num: int) -> Array:
        """`num` of them, each step as likely as any other, with replacement."""
        chosen = generator.integers(0, self.shape[0] * self.shape[1], num)
        return self.at(*np.divmod(chosen, self.shape[1]))


class WindowRing:
    """The last `capacity` windows it was given.

    Its array has its full size from the start, so a checkpoint's size is known and does not
    drift.
    """

    def __init__(
        self, capacity: int, window: tuple[int, int], device: torch.device | None = None
    ) -> None:
        """On the meta device it is only planned."""
        self.windows = torch.zeros((capacity, *window), device=device)
        self.count = 0
        """Windows given so far."""

    def __len__(self) -> int:
        return min(self.count, len(self.windows))

    def add(self, windows: Array) -> None:
        """[n, frames, features], n at most the capacity: they replace the oldest."""
        places = (self.count + np.arange(len(windows))) % len(self.windows)
        self.windows.numpy()[places] = windows
        self.count += len(windows)

    def draw(self, generator: np.random.Generator, num: int) -> Array:
        """`num` of those held, each as likely as any other, with replacement."""
        drawn: Array = self.windows.numpy()[generator.integers(0, len(self), num)]
        return drawn

    def state_dict(self) -> Tree:
        return {"windows": self.windows, "count": self.count}

    def load_state_dict(self, state: Tree) -> None:
        self.windows.copy_(torch.as_tensor(state["windows"]))
        self.count = int(state["count"])
