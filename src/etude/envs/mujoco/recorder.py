"""Recordings of single episodes of a simulated task, made while a group plays them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from etude.core.contracts import Array, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.envs.mujoco.env import MujocoEnv


@dataclass
class Recording:
    """One episode, its start and the end of every control step: `steps + 1` moments."""

    states: list[Array] = field(default_factory=list)
    """[n] float64 each: everything MuJoCo integrates."""
    targets: list[Array | None] = field(default_factory=list)
    """[3] m each; None where the task's view has no `target`."""
    references: list[Array] = field(default_factory=list)
    """[nq] each: the pose that is imitated; none where nothing is."""


@runtime_checkable
class Imitates(Protocol):
    """Imitates a motion."""

    def reference_pose(self, env_id: int, step: int) -> Array:
        """[nq] of that motion, so many steps after the start of an environment's episode."""
        ...


class Recorder:
    """Environments as they are, which keep the wanted (env_id, episode) pairs."""

    def __init__(self, env: MujocoEnv, wanted: Iterable[tuple[int, int]]) -> None:
        self.num_envs = env.num_envs
        self.spec = env.spec
        self.recordings = {pair: Recording() for pair in wanted}
        self._env = env
        self._reference = env.ability(Imitates)
        self._episode = np.zeros(env.num_envs, np.int64)
        env.simulation.watch = self._keep_all

    def _keep_all(self) -> None:
        for (env_id, episode), recording in self.recordings.items():
            if self._episode[env_id] == episode:
                self._keep(env_id, recording)

    def _keep(self, env_id: int, recording: Recording) -> None:
        target: Array | None = getattr(self._env.view, "target", None)
        if self._reference is not None:
            step = len(recording.states)  # The environment itself has not counted this one yet.
            recording.references.append(self._reference.reference_pose(env_id, step).copy())
        recording.states.append(self._env.simulation.state[env_id].copy())
        recording.targets.append(None if target is None else target[env_id].copy())

    def reset(self, key: Key) -> Observations:
        obs = self._env.reset(key)
        self._episode[:] = 0
        self._keep_all()
        return obs

    def step(self, actions: Array) -> StepResult:
        result = self._env.step(actions)
        for env_id in result.final_envs.tolist():
            self._episode[env_id] += 1
            begun = self.recordings.get((env_id, int(self._episode[env_id])))
            if begun is not None:
                self._keep(env_id, begun)
        return result

    def snapshot(self) -> Tree:
        return self._env.snapshot()

    def restore(self, snapshot: Tree, key: Key) -> None:
        self._env.restore(snapshot, key)

    def close(self) -> None:
        self._env.simulation.watch = None
        self._env.close()
