"""Footage: single episodes, recorded while a group plays them, as pictures drawn on request."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

import mujoco
import numpy as np
from PIL import Image

from etude.core.contracts import (
    Array,
    BatchEnv,
    EnvWrapper,
    Observations,
    Pictured,
    StepResult,
    ability,
)
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.rendering import Studio
from etude.envs.mujoco.simulation import Camera, Line, Marker

Size = tuple[int, int]
"""Width and height in pixels."""
FRAME_RATE = 30.0
"""Target frame rate of films."""
LONGEST = 15.0
"""Longest episode in a film, in seconds; of a longer one the end is shown."""
STRIP_FRAMES = 8
STRIP_SIZE = (300, 400)
"""Width and height of a picture in a strip."""


class Picture(NamedTuple):
    """A drawn moment."""

    pixels: Array
    """[height, width, 3] uint8."""
    legend: Sequence[Line] = ()


class Footage(ABC):
    """One episode as moments, evenly spaced in time; `substeps` of them are a control step."""

    moments: int
    """Number of moments, with the start."""
    moment_rate: float
    """Moments per second."""
    substeps: int = 1
    """Moments per control step."""

    @property
    def stride(self) -> int:
        """Moments per picture of a film in real time."""
        return max(1, round(self.moment_rate / FRAME_RATE))

    @property
    def steps(self) -> int:
        """Control steps of the episode."""
        return (self.moments - 1) // self.substeps

    @property
    def begin(self) -> int:
        """The first moment of a film."""
        return film_begin(self.moments - 1, self.moment_rate)

    @property
    def seconds(self) -> float:
        return (self.moments - 1) / self.moment_rate

    @abstractmethod
    def draw(self, moments: Iterable[int], size: Size) -> Iterator[Picture]:
        """Draw moments."""

    def strip(self) -> tuple[list[int], list[Picture]]:
        """Steps to show side by side, and their pictures."""
        steps = strip_steps(self.steps)
        return steps, list(self.draw([step * self.substeps for step in steps], STRIP_SIZE))


def strip_steps(steps: int) -> list[int]:
    """Steps of an episode for a strip, evenly spaced in time."""
    return [int(step) for step in np.linspace(0, steps, STRIP_FRAMES).round()]


def film_begin(last: int, rate: float) -> int:
    """The first moment of a film; last: the number of the last moment, rate: moments per second."""
    return max(0, last - round(LONGEST * rate))


class Simulated(Footage):
    """States of a MuJoCo model."""

    def __init__(
        self, model: mujoco.MjModel, shot: Camera, recording: Recording, substeps: int, dt: float
    ) -> None:
        """dt: seconds of a control step."""
        self._model, self._shot, self._recording = model, shot, recording
        self.moments, self.substeps = len(recording.path), substeps
        self.moment_rate = substeps / dt

    def draw(self, moments: Iterable[int], size: Size) -> Iterator[Picture]:
        path, markers = self._recording.path, self._recording.markers
        with Studio(self._model, self._shot, *size) as camera:
            for moment in moments:
                pixels = camera.picture(path[moment], markers[moment // self.substeps])
                yield Picture(pixels, camera.legend)

    def strip(self) -> tuple[list[int], list[Picture]]:
        """Steps evenly spaced in time and movement: a standstill must not fill the strip."""
        # The clock is the first number of a state, positions come after it.
        positions = np.array(self._recording.states)[:, 1 : 1 + self._model.nq]
        moved = np.linalg.norm(np.diff(positions, axis=0), axis=1)
        share = np.full(len(moved), 0.5 / max(len(moved), 1))
        if moved.sum() > 0:
            share += 0.5 * moved / moved.sum()
        passed = np.concatenate([[0.0], np.cumsum(share)])
        even = np.linspace(0.0, passed[-1], STRIP_FRAMES)
        steps = [int(step) for step in np.interp(even, passed, np.arange(len(passed))).round()]
        return steps, list(self.draw([step * self.substeps for step in steps], STRIP_SIZE))


class Drawn(Footage):
    """Pictures drawn by the environment, on a background of the colour of their corner."""

    def __init__(self, recording: Pictures) -> None:
        self._jpegs, self._drawn = recording.jpegs, sorted(recording.jpegs)
        self.moments, self.moment_rate = recording.moments, recording.rate

    def draw(self, moments: Iterable[int], size: Size) -> Iterator[Picture]:
        for moment in moments:
            drawn = self._drawn[bisect_right(self._drawn, moment) - 1]
            picture = Image.open(io.BytesIO(self._jpegs[drawn])).convert("RGB")
            scale = min(size[0] / picture.width, size[1] / picture.height)
            fit = (round(picture.width * scale), round(picture.height * scale))
            sheet = Image.new("RGB", size, picture.getpixel((0, 0)))
            place = ((size[0] - fit[0]) // 2, (size[1] - fit[1]) // 2)
            sheet.paste(picture.resize(fit, Image.Resampling.LANCZOS), place)
            yield Picture(np.asarray(sheet))

    def strip(self) -> tuple[list[int], list[Picture]]:
        first = Image.open(io.BytesIO(self._jpegs[0]))
        size = (STRIP_SIZE[0], max(1, round(STRIP_SIZE[0] * first.height / first.width)))
        steps = strip_steps(self.steps)
        return steps, list(self.draw(steps, size))


def can_film(env: BatchEnv) -> bool:
    """Whether an environment is simulated here, or draws itself."""
    return any(ability(env, kind) is not None for kind in (MujocoEnv, Pictured))


def step_seconds(env: BatchEnv) -> float:
    """The seconds that a control step takes in a film."""
    simulated = ability(env, MujocoEnv)
    if simulated is not None:
        return float(simulated.dt)
    drawing = ability(env, Pictured)
    return 1.0 / drawing.step_rate if drawing is not None else 0.0


def recorder(
    env: BatchEnv, wanted: Iterable[tuple[int, int]], lengths: Iterable[int | None] = repeat(None)
) -> Recorder[Any]:
    """A recorder of (env_id, episode) pairs, to be stepped in place of the environment.

    lengths: the steps of each, where they are known; then an environment that draws itself draws
    only what strips and films show.
    """
    simulated = ability(env, MujocoEnv)
    if simulated is not None:
        return MujocoRecorder(env, simulated, wanted)
    drawing = ability(env, Pictured)
    if drawing is not None:
        return PictureRecorder(env, drawing, dict(zip(wanted, lengths, strict=False)))
    raise UsageError(
        "This environment cannot be drawn: it needs a method picture(env_id) that gives a picture "
        "[height, width, 3] of bytes."
    )


def footage(env: BatchEnv, recording: Any) -> Footage:
    """A recording of an environment as pictures."""
    simulated = ability(env, MujocoEnv)
    if simulated is not None:
        model, task = decorated(simulated), simulated.task
        return Simulated(model, task.camera, recording, task.substeps, simulated.dt)
    return Drawn(recording)


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

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot; the episodes in progress are then number 0."""
        super().restore(snapshot, key)
        self._episode[:] = 0
        for env_id in range(self.num_envs):
            self._keep_wanted(env_id)

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        for env_id in result.final_envs.tolist():
            self._episode[env_id] += 1
            self._keep_wanted(env_id)
        return result


@dataclass
class Pictures:
    """Pictures of one episode: its start and the end of every step."""

    rate: float
    """Steps per second."""
    steps: int | None = None
    """Length of the episode, if known: then only the moments of a strip and of a film are drawn."""
    moments: int = 0
    """Moments so far, drawn or not; `steps + 1` in all."""
    jpegs: dict[int, bytes] = field(default_factory=dict)
    """{moment: picture}, compressed, because large pictures of a long episode would fill the
    memory."""

    def wants(self, moment: int) -> bool:
        """Whether a moment is drawn."""
        if self.steps is None:
            return True
        return moment >= film_begin(self.steps, self.rate) or moment in strip_steps(self.steps)


class PictureRecorder(Recorder[Pictures]):
    """Records environments that render themselves."""

    def __init__(
        self, env: BatchEnv, drawing: Pictured, wanted: Mapping[tuple[int, int], int | None]
    ) -> None:
        """drawing: what renders the environments, usually the environments themselves.

        wanted: {(env_id, episode): its steps, if known}.
        """
        rate = drawing.step_rate
        super().__init__(env, {pair: Pictures(rate, steps) for pair, steps in wanted.items()})
        self._drawing = drawing
        drawing.watch = self._keep_wanted

    def _keep(self, env_id: int, recording: Pictures) -> None:
        moment, recording.moments = recording.moments, recording.moments + 1
        if not recording.wants(moment):
            return
        stream = io.BytesIO()
        picture = Image.fromarray(self._drawing.picture(env_id))
        picture.save(stream, "JPEG", quality=95, subsampling=0)
        recording.jpegs[moment] = stream.getvalue()

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
    markers: list[Sequence[Marker]] = field(default_factory=list)
    """Markers of each of `states`."""


class MujocoRecorder(Recorder[Recording]):
    """Records the states of simulated environments."""

    def __init__(
        self, env: BatchEnv, simulated: MujocoEnv, wanted: Iterable[tuple[int, int]]
    ) -> None:
        """env: the environment to step; simulated: the simulation that it wraps, or itself."""
        super().__init__(env, {pair: Recording() for pair in wanted})
        self._env = simulated
        self._substeps = 0
        """Physics steps since the last control step."""
        simulated.simulation.watchers.append(self._watch)

    def _watch(self) -> None:
        self._substeps = (self._substeps + 1) % self._env.task.substeps
        for (env_id, episode), recording in self.recordings.items():
            if self._episode[env_id] == episode:
                if self._substeps:
                    recording.path.append(self._env.simulation.state[env_id].copy())
                else:
                    self._keep(env_id, recording)

    def _keep(self, env_id: int, recording: Recording) -> None:
        step = len(recording.states)  # The environment has not counted this step yet.
        recording.markers.append(self._env.markers(env_id, step))
        recording.states.append(self._env.simulation.state[env_id].copy())
        recording.path.append(recording.states[-1])

    def close(self) -> None:
        self._env.simulation.watchers.remove(self._watch)
        super().close()
