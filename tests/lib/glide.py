"""A point with drag whose motion is judged by a reference: the smallest task with a style."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import ActionSpec, Array, ArraySpec, Observations
from etude.envs.array_task import ArrayTask, Outcome, State

FRAMES, SPEED = 4, 0.5
WAVE = SPEED + 0.05 * np.sin(0.4 * np.arange(200))
"""The reference: its speed at every frame."""


class Glide(ArrayTask):
    """The action pushes and drag slows; there is no reward. Too fast is the end."""

    observations = {"state": 1, "style": ArraySpec((FRAMES, 1))}  # noqa: RUF012
    action = ActionSpec("box", low=(-1.0,), high=(1.0,))
    max_episode_steps = 16
    statistics = ("speed",)
    history = State(FRAMES)

    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        starts = np.array([stream.integers(FRAMES, len(WAVE)) for stream in streams])
        self.history[rows] = WAVE[starts[:, None] + np.arange(1 - FRAMES, 1)]

    def advance(self, actions: Array) -> Outcome:
        speed = 0.7 * self.history[:, -1] + 0.3 * actions[:, 0]
        self.history = np.hstack([self.history[:, 1:], speed[:, None]])
        return Outcome(np.zeros(self.num_envs), np.abs(speed) > 0.95, {"speed": speed})

    def observe(self) -> Observations:
        return {"state": self.history[:, -1:], "style": self.history[..., None]}

    def style_windows(self) -> Array:
        return np.lib.stride_tricks.sliding_window_view(WAVE, FRAMES)[..., None].astype(np.float32)
