"""Footage: recorded episodes as pictures, drawn on request."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import mujoco
import numpy as np
from PIL import Image

from etude.core.abilities import Pictured, ability
from etude.core.contracts import Array, BatchEnv
from etude.core.errors import UsageError
from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.offscreen import Studio
from etude.envs.mujoco.simulation import Camera
from etude.envs.recorder import MujocoRecorder, PictureRecorder, Pictures, Recorder, Recording

Size = tuple[int, int]
"""Width and height in pixels."""
FRAME_RATE = 30.0
"""Target frame rate of films."""
STRIP_FRAMES = 8
STRIP_SIZE = (300, 400)
"""Width and height of a picture in a strip."""


class Footage(ABC):
    """One episode as moments, evenly spaced in time; `substeps` of them are a control step."""

    moments: int
    """Number of moments, with the start."""
    moment_rate: float
    """Moments per second."""
    substeps: int = 1
    """Moments per control step."""
    figures: int = 1
    """Number of pictures side by side: the reference motion, if any, and the policy."""

    @property
    def stride(self) -> int:
        """Moments per picture of a film in real time."""
        return max(1, round(self.moment_rate / FRAME_RATE))

    @property
    def steps(self) -> int:
        """Control steps of the episode."""
        return (self.moments - 1) // self.substeps

    @property
    def seconds(self) -> float:
        return (self.moments - 1) / self.moment_rate

    @abstractmethod
    def draw(self, moments: Iterable[int], size: Size) -> Iterator[list[Array]]:
        """Draw the figures of each moment, pictures [height, width, 3] uint8."""

    def strip(self) -> tuple[list[int], list[list[Array]]]:
        """Steps to show side by side, and the figures of each."""
        steps = [int(step) for step in np.linspace(0, self.steps, STRIP_FRAMES).round()]
        return steps, list(self.draw([step * self.substeps for step in steps], STRIP_SIZE))


class Simulated(Footage):
    """States of a MuJoCo model."""

    def __init__(
        self, model: mujoco.MjModel, shot: Camera, recording: Recording, substeps: int, dt: float
    ) -> None:
        """dt: seconds of a control step."""
        self._model, self._shot, self._recording = model, shot, recording
        self.moments, self.substeps = len(recording.path), substeps
        self.moment_rate = substeps / dt
        self.figures = 2 if recording.references else 1

    def draw(self, moments: Iterable[int], size: Size) -> Iterator[list[Array]]:
        recording, positions = self._recording, self._model.nq
        with Studio(self._model, self._shot, *size) as camera:
            for moment in moments:
                step, state = moment // self.substeps, recording.path[moment]
                states = [state]
                if recording.references:
                    states.insert(0, state.copy())
                    states[0][1 : 1 + positions] = recording.references[step]
                yield [camera.picture(each, recording.targets[step]) for each in states]

    def strip(self) -> tuple[list[int], list[list[Array]]]:
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
        self._jpegs = recording.jpegs
        self.moments, self.moment_rate = len(self._jpegs), recording.rate

    def draw(self, moments: Iterable[int], size: Size) -> Iterator[list[Array]]:
        for moment in moments:
            picture = Image.open(io.BytesIO(self._jpegs[moment])).convert("RGB")
            scale = min(size[0] / picture.width, size[1] / picture.height)
            fit = (round(picture.width * scale), round(picture.height * scale))
            sheet = Image.new("RGB", size, picture.getpixel((0, 0)))
            place = ((size[0] - fit[0]) // 2, (size[1] - fit[1]) // 2)
            sheet.paste(picture.resize(fit, Image.Resampling.LANCZOS), place)
            yield [np.asarray(sheet)]

    def strip(self) -> tuple[list[int], list[list[Array]]]:
        first = Image.open(io.BytesIO(self._jpegs[0]))
        size = (STRIP_SIZE[0], max(1, round(STRIP_SIZE[0] * first.height / first.width)))
        steps = [int(step) for step in np.linspace(0, self.steps, STRIP_FRAMES).round()]
        return steps, list(self.draw(steps, size))


def can_film(env: BatchEnv) -> bool:
    """Whether an environment is simulated here, or draws itself."""
    return any(ability(env, kind) is not None for kind in (MujocoEnv, Pictured))


def recorder(env: BatchEnv, wanted: Iterable[tuple[int, int]]) -> Recorder[Any]:
    """A recorder of (env_id, episode) pairs, to be stepped in place of the environment."""
    simulated = ability(env, MujocoEnv)
    if simulated is not None:
        return MujocoRecorder(env, simulated, wanted)
    drawing = ability(env, Pictured)
    if drawing is not None:
        return PictureRecorder(env, drawing, wanted)
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
