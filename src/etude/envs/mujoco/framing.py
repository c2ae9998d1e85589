"""Where the camera stands that a task asks for, or that a model needs to be seen whole."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.simulation import Camera

GROUND = tuple(int(kind) for kind in (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD))
_FREE, _SLIDE = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_SLIDE)
_MARGIN = 1.15
"""How much larger than what it shows a picture is."""


@dataclass(frozen=True)
class Frame:
    """A camera with nothing left open."""

    look_at: Array
    """[3] m."""
    distance: float
    """m."""
    body: int | None
    """The body that stays above `look_at`."""


def moving(model: mujoco.MjModel) -> Array:
    """[ngeom] bool: shapes of bodies that move; of a model in which none does, all but ground."""
    solid = ~np.isin(model.geom_type, GROUND)
    found: Array = (model.body_weldid[model.geom_bodyid] > 0) & solid
    return found if found.any() else solid


def frame(shot: Camera, model: mujoco.MjModel) -> Frame:
    """The camera's place: a robot that floats is followed, and what moves is seen whole."""
    body = None if shot.follow is None else model.body(shot.follow).id
    if shot.look_at is None and body is None:
        body = floating_root(model)
    if shot.look_at is not None and shot.distance is not None:
        return Frame(np.array(shot.look_at), shot.distance, body)
    low, high = _bounds(model, body)
    middle = (low + high) / 2 if shot.look_at is None else np.array(shot.look_at)
    radius = float(np.linalg.norm(high - low)) / 2
    whole = _MARGIN * radius / np.sin(np.deg2rad(model.vis.global_.fovy) / 2)
    return Frame(middle, whole if shot.distance is None else shot.distance, body)


def floating_root(model: mujoco.MjModel) -> int | None:
    """The root body of the heaviest tree, if it can go anywhere: freely, or along two axes."""
    roots = np.flatnonzero(model.body_parentid == 0)[1:]
    if not len(roots):
        return None
    root = int(roots[np.argmax(model.body_subtreemass[roots])])
    kinds = model.jnt_type[model.jnt_bodyid == root]
    return root if (kinds == _FREE).any() or (kinds == _SLIDE).sum() > 1 else None


def _bounds(model: mujoco.MjModel, body: int | None) -> tuple[Array, Array]:
    """Least and greatest corner [3] of what moves, or of the tree of a body, at the start."""
    data = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_kinematics(model, data)
    shown = moving(model)
    if body is not None:
        shown &= model.body_rootid[model.geom_bodyid] == model.body_rootid[body]
    if not shown.any():
        return model.stat.center - model.stat.extent / 2, model.stat.center + model.stat.extent / 2
    # Boxes in the shapes' own frames, whose corners are turned.
    middle, half = model.geom_aabb[shown, :3], model.geom_aabb[shown, 3:]
    turn = data.geom_xmat[shown].reshape(-1, 3, 3)
    center = data.geom_xpos[shown] + np.einsum("nij,nj->ni", turn, middle)
    reach = np.einsum("nij,nj->ni", np.abs(turn), half)
    return (center - reach).min(axis=0), (center + reach).max(axis=0)


def camera(shot: Camera, model: mujoco.MjModel) -> mujoco.MjvCamera:
    """The camera of a shot, which stands still."""
    view, place = mujoco.MjvCamera(), frame(shot, model)
    view.azimuth, view.elevation = shot.azimuth, shot.elevation
    view.lookat[:], view.distance = place.look_at, place.distance
    return view


def aim(view: mujoco.MjvCamera, shot: Camera, model: mujoco.MjModel) -> None:
    """Turn the camera of a window as a shot says; it goes along with the body that is followed."""
    place = frame(shot, model)
    view.lookat[:], view.distance = place.look_at, place.distance
    view.azimuth, view.elevation = shot.azimuth, shot.elevation
    if place.body is not None:
        view.type = int(mujoco.mjtCamera.mjCAMERA_TRACKING)
        view.trackbodyid = place.body
