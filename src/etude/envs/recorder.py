"""Recordings of single episodes, made while a group of environments plays them."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from etude.core.abilities import EnvWrapper, Pictured
from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.keys import Key

R = TypeVar("R")


class Recorder(EnvWrapper, ABC, Generic[R]):
    """Environments as they are, which keep the wanted (env_id, episode) pairs."""

    def __init__(self, env: BatchEnv, recordings: dict[tuple[int, int], R]) -> None:
        """recordings: {(env_id, episode): an empty one}."""
        super().__init__(env)
        self.recordings = recordings
        self._episode = np.zeros(env.num_envs, np.int64)

    @abstractmethod
    def _keep(self, env_id: int, recording: R) -> None:
        """Add the moment in which an environment is to the recording of its episode."""

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
    """One episode, its start and the end of every step: `steps + 1` pictures."""

    rate: float
    """Steps of a second."""
    jpegs: list[bytes] = field(default_factory=list)
    """Compressed, because a long episode in large pictures would fill the memory."""


class PictureRecorder(Recorder[Pictures]):
    """Recordings of environments that draw themselves."""

    def __init__(self, env: BatchEnv, drawing: Pictured, wanted: Iterable[tuple[int, int]]) -> None:
        """drawing: what draws the environments, mostly they themselves."""
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
