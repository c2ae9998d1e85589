"""Markers of films and windows: what a task commands, drawn beside its model.

Parts return them from `Part.markers`; training never asks for them. What is wanted is green, what
is measured is blue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from mujoco import MjData, MjModel, MjvScene

from etude.core.contracts import Array
from etude.envs.mujoco.simulation import Camera, Line, Marker

WANTED, MEASURED = (0.1, 0.75, 0.2), (0.1, 0.4, 0.95)
_GHOST_ALPHA, _GHOST_SIZE = 0.4, 0.96
_DISC_HALF = 0.001
_SECONDS = 0.75
"""An arrow of a velocity is as long as the way in this time."""
_LEAST_SPEED = 0.02
"""m/s: a lower one has no arrow."""


def draw(
    scene: MjvScene,
    model: MjModel,
    data: MjData,
    markers: Iterable[Marker],
) -> list[Line]:
    """Add the geoms of all markers to a scene; returns the legend."""
    return [line for marker in markers for line in marker.draw(scene, model, data)]


def add_geom(
    scene: MjvScene,
    kind: Any,
    color: Sequence[float],
    size: Array | None = None,
    place: Array | None = None,
) -> mujoco.MjvGeom:
    """Add a geom of a color, with alpha or without, to a scene; the last one if it is full."""
    full = scene.ngeom >= scene.maxgeom
    geom = scene.geoms[scene.ngeom - full]
    scene.ngeom += not full
    zero, rgba = np.zeros(3), np.array([*color, 1.0][:4], np.float32)
    axes = np.eye(3).ravel()
    mujoco.mjv_initGeom(
        geom, kind, zero if size is None else size, zero if place is None else place, axes, rgba
    )
    geom.specular, geom.emission = 0.0, 0.4
    return geom


@dataclass(frozen=True)
class Target:
    """A place to reach."""

    position: Array
    """[3] m."""
    radius: float = 0.02
    is_disc: bool = False
    """Whether it is a disc on a surface, not a sphere."""
    label: str = "target"

    @classmethod
    def of(cls, shot: Camera, target: Array) -> Target:
        """The marker of a target [3], as a task's camera asks for."""
        place = np.array(target) - np.array([0.0, 0.0, shot.target_sink])
        return cls(place, shot.target_radius, shot.target == "disc")

    def draw(self, scene: MjvScene, model: MjModel, data: MjData) -> list[Line]:
        # An ellipsoid, because the web viewer omits spheres that are not in the model.
        kind = mujoco.mjtGeom.mjGEOM_CYLINDER if self.is_disc else mujoco.mjtGeom.mjGEOM_ELLIPSOID
        disc = np.array([self.radius, _DISC_HALF, 0.0])
        size = disc if self.is_disc else np.full(3, self.radius)
        add_geom(scene, kind, WANTED, size, self.position)
        return [Line(self.label, WANTED)]


@dataclass(frozen=True)
class Arrow:
    """A vector in the world, for example a force."""

    start: Array
    """[3] m."""
    vector: Array
    """[3] m."""
    label: str = ""
    color: tuple[float, float, float] = WANTED
    width: float = 0.015

    def draw(self, scene: MjvScene, model: MjModel, data: MjData) -> list[Line]:
        _connect(scene, self.start, np.add(self.start, self.vector), self.color, self.width)
        return [Line(self.label, self.color)] if self.label else []


@dataclass(frozen=True)
class Twist:
    """The commanded velocity of a body and its own, as arrows above it."""

    body: int
    command: Array
    """[3] m/s, m/s, rad/s: ahead, to the left, turning, in the frame of the body's heading."""

    def draw(self, scene: MjvScene, model: MjModel, data: MjData) -> list[Line]:
        ahead = data.xmat[self.body].reshape(3, 3)[:2, 0]
        x, y = ahead / max(float(np.linalg.norm(ahead)), 1e-9)
        wanted = np.array([[x, -y], [y, x]]) @ self.command[:2]
        own, kind = np.zeros(6), int(mujoco.mjtObj.mjOBJ_XBODY)
        mujoco.mj_objectVelocity(model, data, kind, self.body, own, 0)  # turning comes first
        shown = {
            "commanded": (wanted, self.command[2], WANTED),
            "actual": (own[3:5], own[2], MEASURED),
        }
        size = _radius(model, self.body)
        start, lines = data.xpos[self.body] + np.array([0.0, 0.0, 0.75 * size]), list[Line]()
        for name, (velocity, turning, color) in shown.items():
            speed = float(np.linalg.norm(velocity))
            if speed > _LEAST_SPEED:
                way = _SECONDS * np.array([*velocity, 0.0])
                _connect(scene, start, start + way, color, 0.06 * size)
            lines.append(Line(f"{name}: {speed:.2f} m/s, turning {turning:+.2f} rad/s", color))
            start = start + np.array([0.0, 0.0, 0.18 * size])
        return lines


def _radius(model: MjModel, body: int) -> float:
    """Radius of a body around its origin, m."""
    geoms = model.geom_bodyid == body
    found = np.linalg.norm(model.geom_pos[geoms], axis=1) + model.geom_rbound[geoms]
    return max(0.05, float(found.max(initial=0.0)))


@dataclass(frozen=True)
class Ghost:
    """The model in another pose, translucent: a reference motion."""

    pose: Array
    """[nq]"""
    label: str = "reference motion"

    def draw(self, scene: MjvScene, model: MjModel, data: MjData) -> list[Line]:
        posed, first = MjData(model), scene.ngeom
        posed.qpos[:] = self.pose
        mujoco.mj_kinematics(model, posed)
        moving = int(mujoco.mjtCatBit.mjCAT_DYNAMIC)
        mujoco.mjv_addGeoms(model, posed, mujoco.MjvOption(), mujoco.MjvPerturb(), moving, scene)
        for geom in scene.geoms[first : scene.ngeom]:
            if geom.type == int(mujoco.mjtGeom.mjGEOM_SPHERE):  # the web viewer omits these
                geom.type = int(mujoco.mjtGeom.mjGEOM_ELLIPSOID)
            geom.size[:] *= _GHOST_SIZE  # hidden where the model is in the same pose
            geom.rgba[:] = (*WANTED, _GHOST_ALPHA)
            geom.matid, geom.transparent, geom.castshadow = -1, 1, 0
            # Not one of the model's own, of which a viewer would draw the other pose.
            geom.objtype, geom.objid = int(mujoco.mjtObj.mjOBJ_UNKNOWN), -1
        return [Line(self.label, WANTED)]


def _connect(
    scene: MjvScene,
    start: Array,
    end: Array,
    color: Sequence[float],
    width: float,
    kind: Any = mujoco.mjtGeom.mjGEOM_ARROW,
) -> None:
    """Add an arrow, or a geom of another kind, between two points [3]."""
    geom = add_geom(scene, kind, color)
    mujoco.mjv_connector(geom, kind, width, start, end)
    geom.castshadow = 0
