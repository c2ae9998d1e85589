"""Image observations: a rendered picture of every environment as the observation "image"."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np

from etude.core.abilities import EnvWrapper, Restarts, ability
from etude.core.contracts import Array, ArraySpec, Observations, StepResult
from etude.core.keys import Key
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.offscreen import Renderer
from etude.envs.mujoco.task import SIMULATION, TARGET

IMAGE = "image"
_SLICES, _STACKS, _QUADS = 14, 8, 2
"""Facets of round geoms: half of MuJoCo's. Rendering time grows with their number, and they are too
small to see at a few hundred pixels."""
_SKY = np.array([236, 241, 246], np.uint8)


class QuickCamera(Renderer):
    """A renderer of many small pictures."""

    @classmethod
    def of(cls, env: MujocoEnv, size: int) -> QuickCamera:
        """The task's picture camera with size x size pixels and coarser round geoms."""
        # One thread: Mesa would use all cores for every picture.
        os.environ["LP_NUM_THREADS"] = "0"
        quality = env.simulation.model.vis.quality
        quality.numslices, quality.numstacks, quality.numquads = _SLICES, _STACKS, _QUADS
        shot = env.task.picture_camera or env.task.camera
        return cls(env.simulation.model, shot, size, size)

    def _shoot(self) -> Array:
        rect = self._rect
        pixels = np.empty((rect.height, rect.width, 3), np.uint8)
        depth = np.empty((rect.height, rect.width), np.float32)
        mujoco.mjr_render(rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, depth, rect, self._context)
        # MuJoCo leaves the background black.
        empty = (depth <= 0.0) | (depth >= 1.0)
        np.copyto(pixels, _SKY, where=empty[:, :, None])
        return pixels[::-1]

    def pictures(self, states: Array, targets: Array) -> Array:
        """Render states [n, k] with their targets [n, 3]: [n, size, size, 3] uint8."""
        pairs = zip(states, targets, strict=True)
        shape = (len(states), self._rect.height, self._rect.width, 3)
        drawn: Array = np.empty(shape, np.uint8)
        for place, (state, target) in zip(drawn, pairs, strict=True):
            place[...] = self.picture(state, target)
        return drawn


class Pictured(EnvWrapper):
    """Renders every environment after each step, in one thread, to which OpenGL is bound."""

    def __init__(self, inner: MujocoEnv, size: int) -> None:
        super().__init__(inner)
        specs = inner.spec.observations.items()
        observed = {name: spec for name, spec in specs if name not in (SIMULATION, TARGET)}
        image = ArraySpec((size, size, 3), "uint8")
        self.spec = replace(inner.spec, observations={**observed, IMAGE: image})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._camera = self._thread.submit(QuickCamera.of, inner, size).result()

    def _seen(self, obs: Observations) -> Observations:
        states, targets = obs[SIMULATION], obs[TARGET]
        image = self._thread.submit(self._camera.pictures, states, targets).result()
        kept = {name: array for name, array in obs.items() if name not in (SIMULATION, TARGET)}
        return {**kept, IMAGE: image}

    def ability(self, kind: type[Any]) -> Any:
        if kind is Restarts and super().ability(kind) is not None:
            return self
        return super().ability(kind)

    def restart(self) -> Observations:
        """Reset every environment to its next episode."""
        restarting = ability(self.inner, Restarts)
        assert restarting is not None
        return self._seen(restarting.restart())

    def reset(self, key: Key) -> Observations:
        return self._seen(super().reset(key))

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        return replace(result, obs=self._seen(result.obs), final_obs=self._seen(result.final_obs))

    def close(self) -> None:
        self._thread.submit(self._camera.close).result()
        self._thread.shutdown()
        super().close()
