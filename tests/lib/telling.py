"""A toy whose two tasks need opposite actions in the same states, and demonstrations of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from etude.core.contracts import ActionSpec, Array, ArraySpec, Observations
from etude.data.importing import finish, new_store
from etude.data.store.geometry import OBS
from etude.data.store.labels import Labels
from etude.envs.array_task import ArrayTask, Outcome, State

LEFT, RIGHT = "go to the left", "go to the right"


class Sides(ArrayTask):
    """A point on a line that has to leave on one side; it observes its distance from the middle, so
    nothing but a sentence says which."""

    observations = {"state": 1}  # noqa: RUF012  declared once, read only
    action = ActionSpec("box", low=(-1.0,), high=(1.0,))
    max_episode_steps = 8
    statistics = ("is_success",)
    place = State(1)

    def __init__(self, num_envs: int, threads: int = 1, side: float = 1.0) -> None:
        super().__init__(num_envs, threads)
        self.side = side

    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        self.place[rows] = [stream.uniform(-0.2, 0.2, 1) for stream in streams]

    def advance(self, actions: Array) -> Outcome:
        self.place += 0.25 * actions
        there = self.place[:, 0] * self.side >= 1.0
        return Outcome(there.astype(np.float32), there, {"is_success": there})

    def observe(self) -> Observations:
        return {"state": np.abs(self.place)}


def demonstrations(path: Path, episodes: int = 40) -> Path:
    """Half of the episodes go each way; both see the same states."""
    fields = {OBS + "state": ArraySpec((1,)), "actions": ArraySpec((1,))}
    labels, generator = Labels(), np.random.default_rng(0)
    with new_store(path, fields, 20) as store:
        for number in range(episodes):
            side, place = (-1.0, 1.0)[number % 2], generator.uniform(-0.2, 0.2)
            steps = int(np.ceil((1.0 - side * place) / 0.25))
            states = place + side * 0.25 * np.arange(steps + 1)
            rewards = np.eye(steps, dtype=np.float32)[-1]
            obs: dict[str, Array] = {"state": np.abs(states)[:, None].astype(np.float32)}
            store.append_episode(obs, np.full((steps, 1), side, np.float32), rewards, True)
            task = LEFT if side < 0 else RIGHT
            labels.add(f"take {number}", "straight", success=True, task=task)
        finish(store, {"source": "a test", "format": "made"}, labels)
    return path
