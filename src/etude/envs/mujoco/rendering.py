"""Rendering of simulations: offscreen, as the observation "image", and in a window."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, Self

import mujoco
import numpy as np
from PIL import Image, ImageChops, ImageFilter

from etude.core.contracts import (
    Array,
    ArraySpec,
    EnvWrapper,
    Observations,
    Restarts,
    StepResult,
    ability,
)
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.envs.mujoco import markers
from etude.envs.mujoco.decor import GROUND, aim, camera, decorated, frame
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import Camera, Line, Marker
from etude.envs.mujoco.task import SIMULATION, TARGET

_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM")
BACKENDS = ("egl", "osmesa")
"""OpenGL backends without a screen, the faster first."""
PACKAGES = "libegl1 libgl1-mesa-dri libgles2, or libosmesa6"
_TRY = """
import importlib, sys, mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(8, 8)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), 100).free()
context.free()
"""
_TRY_SECONDS = 30.0
_SKY = np.array([236, 241, 246], np.uint8)
_FLOOR = np.array([0.78, 0.79, 0.8, 1.0], np.float32)
_FLOOR_SIZE = np.array([20.0, 20.0, 0.005])
MAX_MARKS = 1000
"""Largest number of markers and decorations in a scene, beside the geoms of the model."""


class NoPictures(EtudeError):
    """Raised where offscreen rendering is not available."""


def backend() -> str:
    """ "egl" or "osmesa": the value of MUJOCO_GL, or the first backend that works."""
    wishes = [os.environ.get(name, "").lower().strip() for name in _VARIABLES]
    names = next(((wish,) for wish in wishes if wish in BACKENDS), BACKENDS)
    for name in names:
        if _works(name):
            return name
    raise NoPictures(
        f"Pictures cannot be rendered here: {' and '.join(names)} did not start. Install OpenGL "
        f"for machines without a screen (Debian and Ubuntu: apt-get install {PACKAGES})"
        + (f", or unset {' and '.join(_VARIABLES)}." if names != BACKENDS else ".")
    )


@cache
def _works(name: str) -> bool:
    # In a subprocess: a process cannot change the OpenGL platform that it has used, and a failing
    # driver can crash the process.
    environment = {**os.environ, "MUJOCO_GL": name, "PYOPENGL_PLATFORM": name}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY, name],
            env=environment,
            capture_output=True,
            timeout=_TRY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def shape_floor(geom: mujoco.MjvGeom, height: float) -> None:
    """Turn a geom into the floor of a model without one."""
    place = np.array([0.0, 0.0, height - _FLOOR_SIZE[2]])
    box = mujoco.mjtGeom.mjGEOM_BOX
    mujoco.mjv_initGeom(geom, box, _FLOOR_SIZE, place, np.eye(3).ravel(), _FLOOR)
    geom.specular, geom.emission = 0.0, 0.4


class Renderer:
    """Renders states of one model without shadows. Close it before the process ends."""

    def __init__(self, model: mujoco.MjModel, shot: Camera, width: int, height: int) -> None:
        name = backend()
        os.environ["PYOPENGL_PLATFORM"] = name  # read when OpenGL is first imported
        self._shot, self._frame = shot, frame(shot, model)
        self._model = _for_pictures(model, width, height)
        self._prepare(self._model)
        self._data = mujoco.MjData(self._model)
        context: Any = importlib.import_module(f"mujoco.{name}")
        self._window = context.GLContext(width, height)
        self._window.make_current()
        self._scene = mujoco.MjvScene(self._model, maxgeom=MAX_MARKS + self._model.ngeom)
        self._scene.flags[int(mujoco.mjtRndFlag.mjRND_SHADOW)] = 0
        self._scene.flags[int(mujoco.mjtRndFlag.mjRND_REFLECTION)] = 0
        self._context = mujoco.MjrContext(self._model, int(mujoco.mjtFontScale.mjFONTSCALE_100))
        mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), self._context)
        self._view, self._option = camera(shot, self._model), mujoco.MjvOption()
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._has_ground = bool(np.isin(self._model.geom_type, GROUND).any())
        self.legend: list[Line] = []
        """Legend of the last picture."""

    def _prepare(self, model: mujoco.MjModel) -> None:
        """Change the renderer's copy of the model before it is used."""

    def picture(self, state: Array, marked: Sequence[Marker] = ()) -> Array:
        """Render a state [n] with its markers: [height, width, 3] uint8. `legend` explains them."""
        model, data = self._model, self._data
        mujoco.mj_setState(model, data, state, int(mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_forward(model, data)
        if self._frame.body is not None:
            # Follow horizontally, so that vertical motion stays visible.
            self._view.lookat[:2] = data.xpos[self._frame.body, :2]
        every = int(mujoco.mjtCatBit.mjCAT_ALL)
        mujoco.mjv_updateScene(model, data, self._option, None, self._view, every, self._scene)
        if self._shot.floor is not None and not self._has_ground:
            shape_floor(self._scene.geoms[self._scene.ngeom], self._shot.floor)
            self._scene.ngeom += 1
        self.legend = markers.draw(self._scene, model, data, marked)
        return self._shoot()

    def _shoot(self) -> Array:
        rect = self._rect
        pixels = np.empty((rect.height, rect.width, 3), np.uint8)
        depth = np.empty((rect.height, rect.width), np.float32)
        self._window.make_current()
        mujoco.mjr_render(rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, depth, rect, self._context)
        # MuJoCo leaves the background black: it has no depth.
        pixels[(depth <= 0.0) | (depth >= 1.0)] = _SKY
        return pixels[::-1]

    def close(self) -> None:
        self._window.make_current()
        self._context.free()
        self._window.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _for_pictures(model: mujoco.MjModel, width: int, height: int) -> mujoco.MjModel:
    """A copy that is drawn ten times as fast: no shadows, no smooth edges."""
    own = copy.copy(model)
    own.vis.global_.offwidth, own.vis.global_.offheight = width, height
    own.vis.quality.shadowsize = 0
    own.vis.quality.offsamples = 0
    own.vis.headlight.ambient[:] = 0.35
    own.vis.headlight.diffuse[:] = 0.65
    own.vis.headlight.specular[:] = 0.1
    return own


_DIRECTIONAL = int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
_FINE = 1.5
"""Supersampling factor of pictures, for smooth edges."""
_COARSE = 0.375
"""Scale of the pictures that shadows are computed from: their edges are soft."""
_SHADOW_MAP = 512
_REACH = 1.5
"""Reach of shadows from the middle, in multiples of the camera's distance."""
_SUN_AZIMUTH, _SUN_ELEVATION = -65.0, 55.0
"""Direction of the sun, deg: from the camera's direction (negative is right), above the horizon."""
_SUN_RADIUS = 0.035
"""Offset of the four suns of a penumbra, as a fraction of their distance."""
_SUNS = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) * _SUN_RADIUS
_AMBIENT, _HEAD, _SUN = 0.40, 0.22, 0.54


class Studio(Renderer):
    """Renders states of one model for films, with smooth edges and soft shadows.

    MuJoCo's shadows have hard edges. Four suns close together each give a quarter of the light;
    their shadows are rendered at a low resolution and multiplied with the picture.
    """

    def __init__(self, model: mujoco.MjModel, shot: Camera, width: int, height: int) -> None:
        self._size = width, height
        super().__init__(model, shot, round(width * _FINE), round(height * _FINE))
        self._coarse = mujoco.MjrRect(0, 0, round(width * _COARSE), round(height * _COARSE))

    def _prepare(self, model: mujoco.MjModel) -> None:
        quality = model.vis.quality
        quality.shadowsize, quality.numslices, quality.numstacks = _SHADOW_MAP, 20, 12
        model.vis.map.shadowclip = _REACH * self._frame.distance / model.stat.extent

    def _shoot(self) -> Array:
        self._light()
        bright = self._drawn(self._rect).resize(self._size, Image.Resampling.BOX)
        plain = np.asarray(self._drawn(self._coarse).convert("L"), np.float32)
        self._cast(True)
        dark = np.asarray(self._drawn(self._coarse).convert("L"), np.float32)
        self._cast(False)
        share = np.minimum(255.0 * (dark + 1.0) / (plain + 1.0), 255.0).astype(np.uint8)
        shade = Image.fromarray(share).filter(ImageFilter.BoxBlur(1)).resize(self._size)
        return np.asarray(ImageChops.multiply(bright, Image.merge("RGB", [shade] * 3)))

    def _cast(self, shadows: bool) -> None:
        self._scene.flags[int(mujoco.mjtRndFlag.mjRND_SHADOW)] = shadows

    def _drawn(self, rect: mujoco.MjrRect) -> Image.Image:
        pixels = np.empty((rect.height, rect.width, 3), np.uint8)
        self._window.make_current()
        mujoco.mjr_render(rect, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, rect, self._context)
        return Image.fromarray(pixels[::-1])

    def _light(self) -> None:
        """Replace the model's lights by the suns and a lamp at the camera."""
        scene, view = self._scene, self._view
        scene.nlight = 1 + len(_SUNS)
        lamp = scene.lights[0]
        lamp.ambient[:], lamp.diffuse[:], lamp.specular[:] = _AMBIENT, _HEAD, 0.0
        azimuth, height = np.deg2rad(view.azimuth + _SUN_AZIMUTH), np.deg2rad(_SUN_ELEVATION)
        ahead = np.array([np.cos(azimuth), np.sin(azimuth), 0.0])
        down = np.cos(height) * ahead - np.sin(height) * np.array([0.0, 0.0, 1.0])
        aside = np.cross(ahead, [0.0, 0.0, 1.0])
        for light, (left, up) in zip(scene.lights[1 : 1 + len(_SUNS)], _SUNS, strict=True):
            ray = down + left * aside + up * np.cross(aside, down)
            light.type, light.headlight, light.castshadow = _DIRECTIONAL, 0, 1
            light.dir[:] = ray / np.linalg.norm(ray)
            light.pos[:] = np.array(view.lookat) - 2.0 * view.distance * light.dir
            light.ambient[:] = 0.0
            light.diffuse[:], light.specular[:] = _SUN / len(_SUNS), 0.3 / len(_SUNS)
            light.attenuation[:] = 1.0, 0.0, 0.0


IMAGE = "image"
_SLICES, _STACKS, _QUADS = 14, 8, 2
"""Facets of round geoms: half of MuJoCo's. Rendering time grows with their number, and they are too
small to see at a few hundred pixels."""


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
            place[...] = self.picture(state, [markers.Target.of(self._shot, target)])
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


INTEGRATED = int(mujoco.mjtState.mjSTATE_INTEGRATION)


def has_screen() -> bool:
    """Whether this machine has a screen."""
    if not sys.platform.startswith("linux"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


class ScreenWindow:
    """MuJoCo's passive viewer."""

    def __init__(self, env: MujocoEnv) -> None:
        viewer: Any = importlib.import_module("mujoco.viewer")
        self._model = decorated(env)
        self._data = mujoco.MjData(self._model)
        self._window = viewer.launch_passive(self._model, self._data)
        aim(self._window.cam, env.task.camera, self._model)

    def is_running(self) -> bool:
        return bool(self._window.is_running())

    def show(self, env: MujocoEnv, lines: Sequence[str]) -> None:
        """Show the state of the task's only environment; this viewer does not show the lines."""
        with self._window.lock():
            mujoco.mj_setState(self._model, self._data, env.simulation.state[0], INTEGRATED)
            mujoco.mj_forward(self._model, self._data)
            scene = self._window.user_scn
            scene.ngeom = 0
            markers.draw(scene, self._model, self._data, env.markers(0))
        self._window.sync()

    def __enter__(self) -> Self:
        self._window.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._window.__exit__(*details)
