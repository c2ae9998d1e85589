"""Pictures of a simulation for people: smooth edges, a sun, and soft shadows."""

from __future__ import annotations

import mujoco
import numpy as np
from PIL import Image, ImageChops, ImageFilter

from etude.core.contracts import Array
from etude.envs.mujoco.offscreen import Renderer
from etude.envs.mujoco.simulation import Camera

_DIRECTIONAL = int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
_FINE = 1.5
"""Pictures are drawn so many times as large and shrunk, for smooth edges."""
_COARSE = 0.375
"""Shadows are drawn so many times as large: their edges are soft anyway."""
_SHADOW_MAP = 512
_REACH = 1.5
"""How far shadows reach from the middle, in distances of the camera."""
_SUN_AZIMUTH, _SUN_ELEVATION = -65.0, 55.0
"""deg: to the right of where the camera looks, and above the horizon."""
_SUN_RADIUS = 0.035
"""How far apart the suns of a penumbra stand, as a part of their distance."""
_SUNS = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) * _SUN_RADIUS
_AMBIENT, _HEAD, _SUN = 0.40, 0.22, 0.54


class Studio(Renderer):
    """Draws states of one model in the light that all tasks are shown in.

    MuJoCo's shadows have hard edges. Four suns close together give each a quarter of the light;
    their shadows are drawn once, coarsely, and laid over the picture.
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
        """The suns and a lamp at the camera, in place of the model's own lights."""
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
