"""Decoration of models for films and windows: sky, floor and coloured links."""

from __future__ import annotations

import copy
import warnings

import mujoco
import numpy as np

from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.framing import GROUND, moving
from etude.envs.mujoco.simulation import load_spec

_SKY, _FLOOR = "etude/sky", "etude/floor"
_ZENITH, _HORIZON = (0.56, 0.70, 0.86), (0.94, 0.96, 0.98)
_LIGHT, _DARK = (0.88, 0.885, 0.89), (0.78, 0.795, 0.81)
_TILES = 1.0
"""Pairs of floor tiles per metre."""
_UNPAINTED = (0.5, 0.5, 0.5, 1.0)
"""MuJoCo's default colour of geoms."""
_ROOT, _MIDDLE, _TIP = (0.13, 0.25, 0.42), (0.92, 0.93, 0.94), (0.95, 0.42, 0.10)
"""Colours of links without a colour, from the root to the tip of the longest chain."""
_HIDDEN_FROM = 3
"""Viewers hide geom groups from this one on."""
_WRITTEN = (
    *("qpos0", "body_pos", "body_quat", "jnt_pos", "jnt_axis"),
    *("geom_pos", "geom_quat", "geom_size", "site_pos", "hfield_data"),
)
"""Fields that parts may have written to the simulation's model after it was compiled."""


def decorated(env: MujocoEnv) -> mujoco.MjModel:
    """A decorated copy of the environment's model, with the same states."""
    model, simulated = env.task.model, env.simulation.model
    if isinstance(model, mujoco.MjModel):  # A compiled model cannot get textures.
        made = copy.copy(simulated)
    else:
        spec = load_spec(model)
        for part in env.parts:
            part.edit(spec)
        made = dressed(spec, env.task.camera.floor)
        own = np.array([made.geom(index).name != _FLOOR for index in range(made.ngeom)])
        for name in _WRITTEN:
            getattr(made, name)[own if name.startswith("geom") else slice(None)] = getattr(
                simulated, name
            )
    _show_hidden(made)
    _paint(made)
    return made


def dressed(spec: mujoco.MjSpec, floor: float | None = None) -> mujoco.MjModel:
    """Compile the model with a sky and a tiled ground; floor: height of the plane to add, m, if it
    has no ground."""
    _add_sky(spec)
    _add_floor(spec, floor)
    with warnings.catch_warnings():  # Already shown when the task's model was compiled.
        warnings.simplefilter("ignore")
        return spec.compile()


def _add_sky(spec: mujoco.MjSpec) -> None:
    kind = mujoco.mjtTexture.mjTEXTURE_SKYBOX
    for texture in [texture for texture in spec.textures if texture.type == kind]:
        spec.delete(texture)
    sky = spec.add_texture(name=_SKY, type=kind, width=256, height=1536)
    sky.builtin, sky.rgb1, sky.rgb2 = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT, _ZENITH, _HORIZON
    spec.visual.rgba.haze = (*_HORIZON, 1.0)


def _add_floor(spec: mujoco.MjSpec, height: float | None) -> None:
    """Tile the ground, or add a plane at a height if the model has no ground."""
    ground = [geom for geom in spec.geoms if int(geom.type) in GROUND]
    if not ground and height is not None:
        plane = spec.worldbody.add_geom(name=_FLOOR, type=mujoco.mjtGeom.mjGEOM_PLANE)
        plane.size, plane.pos, plane.contype, plane.conaffinity = (0, 0, 1), (0, 0, height), 0, 0
        ground = [plane]
    kind = mujoco.mjtTexture.mjTEXTURE_2D
    tiles = spec.add_texture(name=_FLOOR, type=kind, width=512, height=512)
    tiles.builtin, tiles.rgb1, tiles.rgb2 = mujoco.mjtBuiltin.mjBUILTIN_CHECKER, _LIGHT, _DARK
    material = spec.add_material(name=_FLOOR, texuniform=True, texrepeat=(_TILES, _TILES))
    material.textures[int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = _FLOOR
    material.specular = 0.0
    for geom in ground:
        geom.material, geom.rgba = _FLOOR, (1.0, 1.0, 1.0, 1.0)


def _show_hidden(model: mujoco.MjModel) -> None:
    """Show all geoms of each moving tree that has no visible geom."""
    trees = model.body_rootid[model.geom_bodyid]
    seen = (model.geom_group < _HIDDEN_FROM) & (model.geom_rgba[:, 3] > 0.0)
    for tree in np.unique(trees[moving(model)]):
        if not seen[trees == tree].any():
            model.geom_group[trees == tree] = 0
            faint = (trees == tree) & (model.geom_rgba[:, 3] == 0.0)
            model.geom_rgba[faint] = _UNPAINTED


def _paint(model: mujoco.MjModel) -> None:
    """Colour geoms without a colour by their link, from blue at the root to orange at the tip."""
    bare = (model.geom_rgba == np.array(_UNPAINTED, np.float32)).all(axis=1)
    shapes = np.flatnonzero(bare & (model.geom_matid < 0) & (model.geom_bodyid > 0))
    if not shapes.size:
        return
    links, depth = model.geom_bodyid[shapes], np.zeros(model.nbody)
    for body in range(1, model.nbody):
        depth[body] = depth[model.body_parentid[body]] + 1.0
    share = (depth - depth[links].min()) / max(np.ptp(depth[links]), 1.0)
    stops = np.array([_ROOT, _MIDDLE, _TIP])
    colors = np.stack([np.interp(share, (0.0, 0.5, 1.0), stop) for stop in stops.T], axis=1)
    model.geom_rgba[shapes, :3] = colors[links]
    # Ends of links overlap; of two equal ends both would be visible in patches.
    model.geom_size[shapes, 0] *= 1.0 - 0.01 * (depth[links] % 3)
