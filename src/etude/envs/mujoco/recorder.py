"""Recordings of single episodes of a simulated task, made while a group plays them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from etude.core.contracts import Array, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.envs.mujoco.batch import MujocoTask


@dataclass
class Recording:
    """One episode, its start and the end of every control step: `steps + 1` moments."""

    states: list[Array] = field(default_factory=list)
    """[n] float64 each: everything MuJoCo integrates."""
    targets: list[Array | None] = field(default_factory=list)
    """[3] m each; None where the task's view has no `target`."""
    references: list[Array] = field(default_factory=list)
    """[nq] each: the pose that is imitated; none where nothing is."""


class Recorder:
    """A task as it is, which keeps the wanted (row, episode) pairs.

    A task that imitates has `reference_pose(row, step)`, [nq], so many steps after the start of the
    row's episode.
    """

    def __init__(self, task: MujocoTask[object], wanted: Iterable[tuple[int, int]]) -> None:
        self.num_envs = task.num_envs
        self.spec = task.spec
        self.recordings = {pair: Recording() for pair in wanted}
        self._task = task
        self._episode = np.zeros(task.num_envs, np.int64)
        task.simulation.watch = self._keep_all

    def _keep_all(self) -> None:
        for (row, episode), recording in self.recordings.items():
            if self._episode[row] == episode:
                self._keep(row, recording)

    def _keep(self, row: int, recording: Recording) -> None:
        target: Array | None = getattr(self._task.view, "target", None)
        if hasattr(self._task, "reference_pose"):
            step = len(recording.states)  # The task itself has not counted this one yet.
            recording.references.append(self._task.reference_pose(row, step).copy())
        recording.states.append(self._task.simulation.state[row].copy())
        recording.targets.append(None if target is None else target[row].copy())

    def reset(self, key: Key) -> Observations:
        obs = self._task.reset(key)
        self._episode[:] = 0
        self._keep_all()
        return obs

    def step(self, actions: Array) -> StepResult:
        result = self._task.step(actions)
        for row in result.final_envs.tolist():
            self._episode[row] += 1
            begun = self.recordings.get((row, int(self._episode[row])))
            if begun is not None:
                self._keep(row, begun)
        return result

    def snapshot(self) -> Tree:
        return self._task.snapshot()

    def restore(self, snapshot: Tree, key: Key) -> None:
        self._task.restore(snapshot, key)

    def close(self) -> None:
        self._task.simulation.watch = None
        self._task.close()
