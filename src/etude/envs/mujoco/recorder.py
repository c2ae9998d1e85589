"""Recordings of single episodes of a simulated task, made while a group plays them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from etude.core.contracts import Array, BatchEnv
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.recorder import Recorder


@dataclass
class Recording:
    """One episode, its start and the end of every control step: `steps + 1` moments."""

    states: list[Array] = field(default_factory=list)
    """[n] float64 each: everything MuJoCo integrates."""
    path: list[Array] = field(default_factory=list)
    """The same at the end of every physics step: `steps * substeps + 1` moments."""
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


class MujocoRecorder(Recorder[Recording]):
    """Recordings of simulated environments."""

    def __init__(
        self, env: BatchEnv, simulated: MujocoEnv, wanted: Iterable[tuple[int, int]]
    ) -> None:
        """env: what is stepped; simulated: the simulation inside of it, or itself."""
        super().__init__(env, {pair: Recording() for pair in wanted})
        self._env = simulated
        self._reference = simulated.ability(Imitates)
        self._substeps = 0
        """Since the last control step."""
        simulated.simulation.watch = self._watch

    def _watch(self) -> None:
        self._substeps = (self._substeps + 1) % self._env.task.substeps
        for (env_id, episode), recording in self.recordings.items():
            if self._episode[env_id] == episode:
                if self._substeps:
                    recording.path.append(self._env.simulation.state[env_id].copy())
                else:
                    self._keep(env_id, recording)

    def _keep(self, env_id: int, recording: Recording) -> None:
        target: Array | None = getattr(self._env.view, "target", None)
        if self._reference is not None:
            step = len(recording.states)  # The environment itself has not counted this one yet.
            recording.references.append(self._reference.reference_pose(env_id, step).copy())
        recording.states.append(self._env.simulation.state[env_id].copy())
        recording.path.append(recording.states[-1])
        recording.targets.append(None if target is None else target[env_id].copy())

    def close(self) -> None:
        self._env.simulation.watch = None
        super().close()
