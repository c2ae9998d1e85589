"""Seek: a minimal complete task in numpy, as a template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import ActionSpec, Array, ArraySpec, Observations
from etude.envs.array_task import ArrayTask, Outcome, State


class Seek(ArrayTask):
    """Move a point in a square to a target."""

    observations = {"state": 4}  # noqa: RUF012  declared once, read only
    action = ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0))
    max_episode_steps = 50
    statistics = ("is_success",)
    place = State(2)
    target = State(2)

    def __init__(self, num_envs: int, threads: int = 1, speed: float = 0.1) -> None:
        super().__init__(num_envs, threads)
        self.speed = speed

    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        self.place[rows] = [stream.uniform(-1, 0, 2) for stream in streams]
        self.target[rows] = [stream.uniform(0.1, 1, 2) for stream in streams]

    def advance(self, actions: Array) -> Outcome:
        before = np.linalg.norm(self.target - self.place, axis=1)
        self.place += self.speed * actions
        distance = np.linalg.norm(self.target - self.place, axis=1)
        there = distance < 0.1
        return Outcome(before - distance + there, there, {"is_success": there})

    def observe(self) -> Observations:
        return {"state": np.hstack([self.place, self.target - self.place])}


class SeekPictures(Seek):
    """Seek from pictures of 64 x 64 pixels, with a green point and a red target."""

    observations = {"image": ArraySpec((64, 64, 3), "uint8")}  # noqa: RUF012  declared once

    def observe(self) -> Observations:
        image = np.zeros((self.num_envs, 64, 64, 3), np.uint8)
        centres = (np.arange(64) + 0.5) / 32 - 1
        for channel, points in enumerate((self.target, self.place)):
            across, down = (np.abs(centres - points[:, i : i + 1]) < 0.12 for i in (0, 1))
            image[..., channel] = 255 * (down[:, :, None] & across[:, None, :])
        return {"image": image}
