"""Films and windows: sky, floor, coloured links, and where a camera stands."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import Camera, load_spec

GROUND = tuple(int(kind) for kind in (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD))
_FREE, _SLIDE = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_SLIDE)
_HINGE = int(mujoco.mjtJoint.mjJNT_HINGE)
_MARGIN = 1.15
"""Margin of a picture around what it shows, as a factor."""
_NUM_POSES = 64
"""Number of random poses of a robot on a fixed base that must fit the picture."""


@dataclass(frozen=True)
class Frame:
    """Resolved placement of a camera."""

    look_at: Array
    """[3] m: the point to look at."""
    distance: float
    """Distance from it, m."""
    body: int | None
    """Id of the body that the camera follows; None: the camera is fixed."""


def moving(model: mujoco.MjModel) -> Array:
    """[ngeom] bool: geoms of moving bodies; if no body moves, all except the ground."""
    solid = ~np.isin(model.geom_type, GROUND)
    found: Array = (model.body_weldid[model.geom_bodyid] > 0) & solid
    return found if found.any() else solid


def frame(shot: Camera, model: mujoco.MjModel) -> Frame:
    """Place the camera: follow a floating robot, and show all moving bodies."""
    body = None if shot.follow is None else model.body(shot.follow).id
    if shot.look_at is None and body is None:
        body = floating_root(model)
    if shot.look_at is not None and shot.distance is not None:
        return Frame(np.array(shot.look_at), shot.distance, body)
    low, high = _boxes(model, body)
    middle = (low.min(axis=0) + high.max(axis=0)) / 2
    middle = middle if shot.look_at is None else np.array(shot.look_at)
    furthest = np.maximum(high - middle, middle - low)
    radius = float(np.linalg.norm(furthest, axis=1).max())
    whole = _MARGIN * radius / np.sin(np.deg2rad(model.vis.global_.fovy) / 2)
    return Frame(middle, whole if shot.distance is None else shot.distance, body)


def floating_root(model: mujoco.MjModel) -> int | None:
    """Root body of the heaviest tree, if it has a free joint or slides along two axes."""
    roots = np.flatnonzero(model.body_parentid == 0)[1:]
    if not len(roots):
        return None
    root = int(roots[np.argmax(model.body_subtreemass[roots])])
    kinds = model.jnt_type[model.jnt_bodyid == root]
    return root if (kinds == _FREE).any() or (kinds == _SLIDE).sum() > 1 else None


def _boxes(model: mujoco.MjModel, body: int | None) -> tuple[Array, Array]:
    """Minimum and maximum corners [n, 3] of boxes around the moving bodies in random poses, or
    around the tree of a body in its initial pose."""
    shown = moving(model)
    if body is not None:
        shown &= model.body_rootid[model.geom_bodyid] == model.body_rootid[body]
    if not shown.any():
        middle, half = model.stat.center[None], model.stat.extent / 2
        return middle - half, middle + half
    low, high = [], []
    for data in poses(model, 1 if body is not None else _NUM_POSES):
        corners = bounds(model, data, shown)
        low.append(corners[0])
        high.append(corners[1])
    return np.concatenate(low), np.concatenate(high)


def bounds(model: mujoco.MjModel, data: mujoco.MjData, geoms: Array) -> tuple[Array, Array]:
    """Minimum and maximum corners [n, 3] of boxes around geoms (ids or a mask), m."""
    # Bounding boxes in the frames of the geoms.
    middle, half = model.geom_aabb[geoms, :3], model.geom_aabb[geoms, 3:]
    turn = data.geom_xmat[geoms].reshape(-1, 3, 3)
    center = data.geom_xpos[geoms] + np.einsum("nij,nj->ni", turn, middle)
    reach = np.einsum("nij,nj->ni", np.abs(turn), half)
    return center - reach, center + reach


def poses(
    model: mujoco.MjModel, num: int, start: Array | None = None, share: float = 1.0
) -> Iterator[mujoco.MjData]:
    """The model in the pose `start` [nq], default its initial one, and in at most num - 1 random
    poses without new collisions, within a share of the joints' ranges around it."""
    data, generator = mujoco.MjData(model), np.random.default_rng(0)
    if start is not None:
        data.qpos[:] = start
    elif model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    first = data.qpos.copy()
    mujoco.mj_forward(model, data)
    collisions = data.ncon
    yield data
    ranges = np.where(model.jnt_limited[:, None], model.jnt_range, (-np.pi, np.pi))
    turns = model.jnt_type == _HINGE
    drawn = turns | ((model.jnt_type == _SLIDE) & (model.jnt_limited > 0))
    places = model.jnt_qposadr[drawn]
    for _ in range(num - 1):
        data.qpos[:] = first
        drawn_pose = generator.uniform(*ranges[drawn].T)
        data.qpos[places] = (
            drawn_pose if share == 1.0 else (first[places] + share * (drawn_pose - first[places]))
        )
        mujoco.mj_forward(model, data)
        if data.ncon <= collisions:
            yield data


def camera(shot: Camera, model: mujoco.MjModel) -> mujoco.MjvCamera:
    """A fixed camera as a task asks for."""
    view, place = mujoco.MjvCamera(), frame(shot, model)
    view.azimuth, view.elevation = shot.azimuth, shot.elevation
    view.lookat[:], view.distance = place.look_at, place.distance
    return view


def aim(view: mujoco.MjvCamera, shot: Camera, model: mujoco.MjModel) -> None:
    """Place the camera of a window as a task asks for; it tracks the body to follow."""
    place = frame(shot, model)
    view.lookat[:], view.distance = place.look_at, place.distance
    view.azimuth, view.elevation = shot.azimuth, shot.elevation
    if place.body is not None:
        view.type = int(mujoco.mjtCamera.mjCAMERA_TRACKING)
        view.trackbodyid = place.body


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
    _extend_floors(made)
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


def _extend_floors(model: mujoco.MjModel) -> None:
    """Draw level planes without an end, as they collide: a robot runs on beyond their size."""
    level = np.abs(model.geom_quat[:, 1:3]).max(axis=1) < 1e-6
    floors = level & (model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE) & (model.geom_bodyid == 0)
    model.geom_size[floors, :2] = 0.0


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
