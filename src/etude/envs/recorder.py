"""Recording of single episodes while a group of environments plays them."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from PIL import Image

from etude.core.abilities import EnvWrapper, Pictured
from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.keys import Key
from etude.envs.mujoco.env import MujocoEnv

R = TypeVar("R")


class Recorder(EnvWrapper, ABC, Generic[R]):
    """A wrapper of environments that records chosen (env_id, episode) pairs."""

    def __init__(self, env: BatchEnv, recordings: dict[tuple[int, int], R]) -> None:
        """recordings: {(env_id, episode): an empty recording to fill}."""
        super().__init__(env)
        self.recordings = recordings
        self._episode = np.zeros(env.num_envs, np.int64)

    @abstractmethod
    def _keep(self, env_id: int, recording: R) -> None:
        """Append the current state of an environment to the recording of its episode."""

    def _keep_wanted(self, env_id: int) -> None:
        recording = self.recordings.get((env_id, int(self._episode[env_id])))
        if recording is not None:
            self._keep(env_id, recording)

    def reset(self, key: Key) -> Observations:
        obs = super().reset(key)
        self._episode[:] = 0
        for env_id in range(self.num_envs):
            self._keep_wanted(env_id)
        return obs

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        for env_id in result.final_envs.tolist():
            self._episode[env_id] += 1
            self._keep_wanted(env_id)
        return result


@dataclass
class Pictures:
    """Pictures of one episode: its start and the end of every step, `steps + 1` in all."""

    rate: float
    """Steps per second."""
    jpegs: list[bytes] = field(default_factory=list)
    """Compressed, because large pictures of a long episode would fill the memory."""


class PictureRecorder(Recorder[Pictures]):
    """Records environments that render themselves."""

    def __init__(self, env: BatchEnv, drawing: Pictured, wanted: Iterable[tuple[int, int]]) -> None:
        """drawing: what renders the environments, usually the environments themselves."""
        super().__init__(env, {pair: Pictures(drawing.step_rate) for pair in wanted})
        self._drawing = drawing
        drawing.watch = self._keep_wanted

    def _keep(self, env_id: int, recording: Pictures) -> None:
        stream = io.BytesIO()
        picture = Image.fromarray(self._drawing.picture(env_id))
        picture.save(stream, "JPEG", quality=95, subsampling=0)
        recording.jpegs.append(stream.getvalue())

    def close(self) -> None:
        self._drawing.watch = None
        super().close()


@dataclass
class Recording:
    """States of one episode: its start and the end of every control step, `steps + 1` in all."""

    states: list[Array] = field(default_factory=list)
    """[n] float64 each: the integration state of MuJoCo."""
    path: list[Array] = field(default_factory=list)
    """[n] float64 each: the same at the end of every physics step, `steps * substeps + 1` in
    all."""
    targets: list[Array | None] = field(default_factory=list)
    """[3] m each; None if the task's view has no `target`."""
    references: list[Array] = field(default_factory=list)
    """[nq] each: the reference pose; empty without a reference motion."""


@runtime_checkable
class Imitates(Protocol):
    """A part that imitates a reference motion."""

    def reference_pose(self, env_id: int, step: int) -> Array:
        """Reference pose [nq], `step` steps after the start of an environment's episode."""
        ...


class MujocoRecorder(Recorder[Recording]):
    """Records the states of simulated environments."""

    def __init__(
        self, env: BatchEnv, simulated: MujocoEnv, wanted: Iterable[tuple[int, int]]
    ) -> None:
        """env: the environment to step; simulated: the simulation that it wraps, or itself."""
        super().__init__(env, {pair: Recording() for pair in wanted})
        self._env = simulated
        self._reference = simulated.ability(Imitates)
        self._substeps = 0
        """Physics steps since the last control step."""
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
            step = len(recording.states)  # The environment has not counted this step yet.
            recording.references.append(self._reference.reference_pose(env_id, step).copy())
        recording.states.append(self._env.simulation.state[env_id].copy())
        recording.path.append(recording.states[-1])
        recording.targets.append(None if target is None else target[env_id].copy())

    def close(self) -> None:
        self._env.simulation.watch = None
        super().close()
