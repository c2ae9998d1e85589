"""Models as people see them: with a sky, and a floor on which motion can be seen."""

from __future__ import annotations

import copy

import mujoco

from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import load_spec

_SKY, _FLOOR = "etude/sky", "etude/floor"
_WHITE, _BLUE = (0.93, 0.95, 0.97), (0.62, 0.72, 0.82)
_LIGHT, _DARK = (0.80, 0.82, 0.84), (0.68, 0.70, 0.73)
_TILES = 2.0
"""Pairs of tiles per metre."""
_WRITTEN = (
    *("qpos0", "body_pos", "body_quat", "jnt_pos", "jnt_axis"),
    *("geom_pos", "geom_quat", "geom_size", "site_pos", "hfield_data"),
)
"""What parts may have written to the simulation's model after it was compiled."""


def decorated(env: MujocoEnv) -> mujoco.MjModel:
    """A copy of the environment's model to look at, which has the same states.

    A model without a sky gets one, and planes without a material become checkered.
    """
    model, simulated = env.task.model, env.simulation.model
    if isinstance(model, mujoco.MjModel):
        return copy.copy(simulated)
    spec = load_spec(model)
    for part in env.parts:
        part.edit(spec)
    _add_sky(spec)
    _add_floor(spec)
    made = spec.compile()
    for name in _WRITTEN:
        getattr(made, name)[:] = getattr(simulated, name)
    return made


def _add_sky(spec: mujoco.MjSpec) -> None:
    kind = mujoco.mjtTexture.mjTEXTURE_SKYBOX
    if all(texture.type != kind for texture in spec.textures):
        sky = spec.add_texture(name=_SKY, type=kind, width=128, height=768)
        sky.builtin, sky.rgb1, sky.rgb2 = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT, _BLUE, _WHITE


def _add_floor(spec: mujoco.MjSpec) -> None:
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    floors = [geom for geom in spec.geoms if geom.type == plane and not geom.material]
    if not floors:
        return
    kind = mujoco.mjtTexture.mjTEXTURE_2D
    tiles = spec.add_texture(name=_FLOOR, type=kind, width=256, height=256)
    tiles.builtin, tiles.rgb1, tiles.rgb2 = mujoco.mjtBuiltin.mjBUILTIN_CHECKER, _LIGHT, _DARK
    material = spec.add_material(name=_FLOOR, texuniform=True, texrepeat=(_TILES, _TILES))
    material.textures[int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = _FLOOR
    for floor in floors:
        floor.material, floor.rgba = _FLOOR, (1.0, 1.0, 1.0, floor.rgba[3])
