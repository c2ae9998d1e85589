"""Pictures of recorded episodes, drawn by worker processes in the order they were asked for."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.core.errors import EtudeError, UsageError
from etude.envs.config import ENVS
from etude.envs.mujoco import offscreen
from etude.envs.mujoco.demonstration import Demonstration, demonstrated
from etude.envs.mujoco.env import MujocoEnv, TaskConfig
from etude.planning.recipe import Recipe

_SLICES, _STACKS, _QUADS = 14, 8, 2
"""Facets of round things: half of MuJoCo's. Drawing takes as long as there are facets, and in a
picture of a few hundred pixels they cannot be seen."""
_SKY = np.array([236, 241, 246], np.uint8)
_camera: QuickCamera | None = None

T = TypeVar("T")


def make_demonstrated(recipe: Recipe, num_envs: int) -> tuple[MujocoEnv, Demonstration]:
    """The environments of a recipe, for recording, and their part that demonstrates."""
    config = recipe.task
    if not (isinstance(config, TaskConfig) and config.demonstration):
        kinds = [name for name in ENVS.names() if ENVS.load(name).demonstration]
        raise UsageError(
            f"Demonstrations are recorded of {' and '.join(kinds)}, whose progress is known; "
            f"'{recipe.name}' has an environment of the kind '{config.kind}'."
        )
    return demonstrated(config, num_envs)


class QuickCamera(offscreen.Renderer):
    """A camera for many small pictures."""

    def _shoot(self) -> Array:
        rect = self._rect
        pixels = np.empty((rect.height, rect.width, 3), np.uint8)
        depth = np.empty((rect.height, rect.width), np.float32)
        mujoco.mjr_render(rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, depth, rect, self._context)
        # Where nothing was drawn MuJoCo leaves it black.
        empty = (depth <= 0.0) | (depth >= 1.0)
        np.copyto(pixels, _SKY, where=empty[:, :, None])
        return pixels[::-1]


def _start(recipe: Recipe, size: int) -> None:
    global _camera
    # One core each: Mesa would take all of them for every picture.
    os.environ["LP_NUM_THREADS"] = "0"
    env, _ = make_demonstrated(recipe, 1)
    quality = env.simulation.model.vis.quality
    quality.numslices, quality.numstacks, quality.numquads = _SLICES, _STACKS, _QUADS
    _camera = QuickCamera(env.simulation.model, env.task.camera, size, size)


def _draw(states: Array, targets: Array) -> Array:
    """[T, size, size, 3] uint8 of states [T, n] with their targets [T, 3]."""
    assert _camera is not None
    first = _camera.picture(states[0], targets[0])
    pictures = np.empty((len(states), *first.shape), np.uint8)
    for i, (state, target) in enumerate(zip(states, targets, strict=True)):
        pictures[i] = _camera.picture(state, target)
    return pictures


class Studio:
    """Worker processes with a camera each."""

    def __init__(self, recipe: Recipe, size: int, workers: int) -> None:
        offscreen.backend()  # raises before a worker would
        self._workers = workers
        # Spawned: OpenGL and MuJoCo's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, _start, (recipe, size))

    def film(self, shots: Iterable[tuple[T, Array, Array]]) -> Iterator[tuple[T, Array]]:
        """(label, states [T, n], targets [T, 3]) to (label, pictures), in the same order."""
        waiting: deque[tuple[T, Future[Array]]] = deque()
        try:
            for label, states, targets in shots:
                waiting.append((label, self._pool.submit(_draw, states, targets)))
                while len(waiting) > 2 * self._workers:
                    first, drawn = waiting.popleft()
                    yield first, drawn.result()
            for first, drawn in waiting:
                yield first, drawn.result()
        except BrokenProcessPool as error:
            raise EtudeError(
                "A process that draws pictures died: try MUJOCO_GL=osmesa, or record without "
                "pictures (--image-size 0)."
            ) from error

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
