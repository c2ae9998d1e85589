"""A motion task in numpy, one part of which needs more practice than the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import ActionSpec, Array, Observations
from etude.core.trees import Tree
from etude.envs.array_task import ArrayTask, Outcome, State

FRAMES, PARTS, HARD = 60, 10, (6, 9)
"""Frames and parts of each motion, and the parts of the first one that need skill."""


class Balancing(ArrayTask):
    """Keep an error small along one of eight motions.

    Without an action the error falls, but in the hard parts of the first motion it grows by half
    with every frame, and is pushed to one side or the other. Few episodes come there.
    """

    observations = {"state": 2 + 8 + PARTS}  # noqa: RUF012  declared once, read only
    action = ActionSpec("box", low=(-1.0,), high=(1.0,))
    max_episode_steps = FRAMES
    statistics = ("is_success", "motion", "start", "played")
    motions = tuple(f"motion-{i}" for i in range(8))
    frame, start, motion = State(dtype="int64"), State(dtype="int64"), State(dtype="int64")
    error = State()

    def __init__(self, num_envs: int, threads: int = 1, in_turn: bool = False) -> None:
        super().__init__(num_envs, threads)
        self._in_turn = in_turn
        self.follow({})

    def follow(self, curriculum: Tree) -> None:
        even = np.ones((8, 1))
        starts = np.asarray(curriculum.get("starts", even))
        self._bins, self._cumulative = starts.shape[1], np.cumsum(starts) / starts.sum()

    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        for row, stream in zip(rows.tolist(), streams, strict=True):
            place = np.searchsorted(self._cumulative, stream.random(), side="right")
            motion, part = divmod(int(place), self._bins)
            begin = int((part + stream.random()) * FRAMES / self._bins)
            self.motion[row] = row % 8 if self._in_turn else motion
            self.frame[row] = self.start[row] = 0 if self._in_turn else begin
            self.error[row] = stream.uniform(-0.1, 0.1)

    @property
    def part(self) -> Array:
        """[rows]: the part of the motion in which each row is."""
        return np.minimum(self.frame * PARTS // FRAMES, PARTS - 1)

    def advance(self, actions: Array) -> Outcome:
        hard = (self.motion == 0) & (self.part >= HARD[0]) & (self.part < HARD[1])
        wanted = np.where(hard, np.where(self.part % 2, 0.8, -0.8), 0.0)
        self.error = np.where(hard, 1.5, 0.9) * self.error + 0.4 * (actions[:, 0] - wanted)
        self.frame += 1
        lost = np.abs(self.error) > 1.0
        played = (self.frame - self.start) / FRAMES
        statistics = {
            "is_success": ~lost,
            "motion": self.motion,
            "start": self.start / FRAMES,
            "played": np.minimum(played, 1 - 1e-9 - self.start / FRAMES),
        }
        # An episode ends with its motion.
        return Outcome(1 - self.error**2, lost | (self.frame >= FRAMES), statistics)

    def observe(self) -> Observations:
        rows = np.arange(self.num_envs)
        seen = np.zeros((self.num_envs, 2 + 8 + PARTS), np.float32)
        seen[:, 0], seen[:, 1] = self.error, self.frame / FRAMES
        seen[rows, 2 + self.motion] = 1.0
        seen[rows, 10 + self.part] = 1.0
        return {"state": seen}
