"""Placement of cameras: as a task asks, or so that the whole model is visible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.simulation import Camera

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
    # Bounding boxes in the frames of the geoms.
    middle, half = model.geom_aabb[shown, :3], model.geom_aabb[shown, 3:]
    for data in _poses(model, 1 if body is not None else _NUM_POSES):
        turn = data.geom_xmat[shown].reshape(-1, 3, 3)
        center = data.geom_xpos[shown] + np.einsum("nij,nj->ni", turn, middle)
        reach = np.einsum("nij,nj->ni", np.abs(turn), half)
        low.append(center - reach)
        high.append(center + reach)
    return np.concatenate(low), np.concatenate(high)


def _poses(model: mujoco.MjModel, num: int) -> Iterator[mujoco.MjData]:
    """The model in its initial pose and in random poses without new collisions."""
    data, generator = mujoco.MjData(model), np.random.default_rng(0)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    start = data.qpos.copy()
    mujoco.mj_forward(model, data)
    collisions = data.ncon
    yield data
    ranges = np.where(model.jnt_limited[:, None], model.jnt_range, (-np.pi, np.pi))
    turns = model.jnt_type == _HINGE
    drawn = turns | ((model.jnt_type == _SLIDE) & (model.jnt_limited > 0))
    places = model.jnt_qposadr[drawn]
    for _ in range(num - 1):
        data.qpos[:] = start
        data.qpos[places] = generator.uniform(*ranges[drawn].T)
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
