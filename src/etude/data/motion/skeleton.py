"""The humanoid of the motion clips: its bodies, joints and shapes, z up.

It faces x with arms and legs straight down; its right is -y. A pose is 43 numbers in the
order of `JOINTS`: the root's position and quaternion, then a quaternion for each ball joint and an
angle for each hinge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from etude.core.contracts import Array
from etude.data.motion.rotations import multiply, rotate

HINGE_AXIS = (0.0, -1.0, 0.0)
"""Axis of knees and elbows; positive angles bend forwards, negative ones backwards."""


@dataclass(frozen=True)
class Shape:
    """A geometric shape of a body, in the body's frame."""

    kind: Literal["box", "capsule", "sphere"]
    size: tuple[float, ...]
    """Half sides of a box; else the radius. m."""
    points: tuple[tuple[float, float, float], ...]
    """Centre; of a capsule the centres of both ends. m."""
    mass: float
    """kg."""


@dataclass(frozen=True)
class Body:
    """One body, with its joint to the parent."""

    name: str
    parent: str | None
    offset: tuple[float, float, float]
    """m, from the parent's origin in the parent's frame."""
    joint: Literal["free", "ball", "hinge", "none"]
    shapes: tuple[Shape, ...]


def _capsule(radius: float, one: tuple[float, ...], two: tuple[float, ...], mass: float) -> Shape:
    (x1, y1, z1), (x2, y2, z2) = one, two
    return Shape("capsule", (radius,), ((x1, y1, z1), (x2, y2, z2)), mass)


def _arm(side: str, y: float) -> tuple[Body, ...]:
    upper = _capsule(0.042, (0, 0, -0.05), (0, 0, -0.23), 1.6)
    lower = _capsule(0.036, (0, 0, -0.045), (0, 0, -0.2), 1.0)
    hand = Shape("sphere", (0.045,), ((0.0, 0.0, -0.02),), 0.4)
    shoulder = (-0.02405, y * 0.18311, 0.2435)
    return (
        Body(f"{side}_shoulder", "chest", shoulder, "ball", (upper,)),
        Body(f"{side}_elbow", f"{side}_shoulder", (0, 0, -0.274788), "hinge", (lower,)),
        Body(f"{side}_wrist", f"{side}_elbow", (0, 0, -0.258947), "none", (hand,)),
    )


def _leg(side: str, y: float) -> tuple[Body, ...]:
    thigh = _capsule(0.06, (0, 0, -0.06), (0, 0, -0.36), 5.0)
    shin = _capsule(0.05, (0, 0, -0.045), (0, 0, -0.355), 3.0)
    foot = Shape("box", (0.0885, 0.045, 0.0275), ((0.045, 0.0, -0.0225),), 1.0)
    return (
        Body(f"{side}_hip", "root", (0, y * 0.084887, 0), "ball", (thigh,)),
        Body(f"{side}_knee", f"{side}_hip", (0, 0, -0.421546), "hinge", (shin,)),
        Body(f"{side}_ankle", f"{side}_knee", (0, 0, -0.40987), "ball", (foot,)),
    )


_PELVIS = _capsule(0.085, (0, -0.055, 0.045), (0, 0.055, 0.045), 8.0)
_CHEST = (
    _capsule(0.085, (0, -0.04, -0.03), (0, 0.04, -0.03), 6.0),
    _capsule(0.1, (-0.005, -0.075, 0.135), (-0.005, 0.075, 0.135), 9.0),
)
_HEAD = (
    _capsule(0.045, (0, 0, 0.0), (0, 0, 0.09), 0.5),
    Shape("sphere", (0.1025,), ((0.0, 0.0, 0.175),), 2.5),
)
BODIES: tuple[Body, ...] = (
    Body("root", None, (0, 0, 0), "free", (_PELVIS,)),
    Body("chest", "root", (0, 0, 0.236151), "ball", _CHEST),
    Body("neck", "chest", (0, 0, 0.223894), "ball", _HEAD),
    *_arm("right", -1.0),
    *_arm("left", 1.0),
    *_leg("right", -1.0),
    *_leg("left", 1.0),
)
"""Depth first, as MuJoCo numbers them; the root first. 50 kg in all."""
NAMES = tuple(body.name for body in BODIES)
PARENTS = tuple(-1 if body.parent is None else NAMES.index(body.parent) for body in BODIES)
OFFSETS = np.array([body.offset for body in BODIES], np.float64)
NUM_BODIES = len(BODIES)
ENDS = tuple(
    NAMES.index(f"{side}_{end}") for end in ("wrist", "ankle") for side in ("right", "left")
)
"""Hands and feet."""

BALLS = tuple(i for i, body in enumerate(BODIES) if body.joint == "ball")
HINGES = tuple(i for i, body in enumerate(BODIES) if body.joint == "hinge")


JOINTS = {
    body.name: {"ball": 4, "hinge": 1}[body.joint]
    for body in BODIES
    if body.joint in ("ball", "hinge")
}
"""{joint: numbers in a pose}, in the order of the columns of a pose after the root's seven."""


def _addresses(sizes: dict[str, int]) -> dict[int, int]:
    """{body: first number of its joint}, where sizes are the numbers of each type of joint."""
    found, at = {}, 0
    for i, body in enumerate(BODIES):
        found[i] = at
        at += sizes[body.joint]
    return found


_AT = _addresses({"free": 7, "ball": 4, "hinge": 1, "none": 0})
_SPEED_AT = _addresses({"free": 6, "ball": 3, "hinge": 1, "none": 0})
NUM_POSE, NUM_SPEED = 43, 34
"""Numbers of a pose and of its velocity: linear and angular for the root, 3 a ball, 1 a hinge."""
BALL_COLUMNS = np.array([[_AT[i] + k for k in range(4)] for i in BALLS])
"""[8, 4]: columns of a pose with the quaternions of ball joints."""
HINGE_COLUMNS = np.array([_AT[i] for i in HINGES])
"""[4]: columns with the angles of hinges."""
BALL_SPEED_COLUMNS = np.array([[_SPEED_AT[i] + k for k in range(3)] for i in BALLS])
HINGE_SPEED_COLUMNS = np.array([_SPEED_AT[i] for i in HINGES])


def hinge_quaternion(angle: Array) -> Array:
    """Quaternions [..., 4] of hinge angles [...]."""
    quaternion = np.zeros((*angle.shape, 4))
    quaternion[..., 0] = np.cos(angle / 2)
    quaternion[..., 1:] = np.sin(angle / 2)[..., None] * np.array(HINGE_AXIS)
    return quaternion


def forward(pose: Array) -> tuple[Array, Array]:
    """Positions [..., 15, 3] and quaternions [..., 15, 4] of all bodies in poses [..., 43]."""
    positions = np.empty((*pose.shape[:-1], NUM_BODIES, 3))
    quaternions = np.empty((*pose.shape[:-1], NUM_BODIES, 4))
    for i, body in enumerate(BODIES):
        at, parent = _AT[i], PARENTS[i]
        if body.joint == "free":
            positions[..., i, :] = pose[..., :3]
            quaternions[..., i, :] = pose[..., 3:7]
            continue
        above = quaternions[..., parent, :]
        positions[..., i, :] = positions[..., parent, :] + rotate(
            above, np.broadcast_to(OFFSETS[i], (*pose.shape[:-1], 3))
        )
        if body.joint == "none":
            quaternions[..., i, :] = above
        elif body.joint == "ball":
            quaternions[..., i, :] = multiply(above, pose[..., at : at + 4])
        else:
            quaternions[..., i, :] = multiply(above, hinge_quaternion(pose[..., at]))
    return positions, quaternions


def lowest(positions: Array, quaternions: Array) -> Array:
    """Lowest height [...] m of any shape, of bodies at [..., 15, 3] with rotation [..., 15, 4]."""
    heights = []
    for i, body in enumerate(BODIES):
        for shape in body.shapes:
            for point in _corners(shape):
                low = rotate(
                    quaternions[..., i, :], np.broadcast_to(point, positions[..., i, :].shape)
                )
                radius = 0.0 if shape.kind == "box" else shape.size[0]
                heights.append(positions[..., i, 2] + low[..., 2] - radius)
    least: Array = np.min(np.stack(heights), axis=0)
    return least


def _corners(shape: Shape) -> Array:
    """[k, 3]: points of which the lowest, less the radius, is the lowest point of the shape."""
    if shape.kind != "box":
        return np.array(shape.points, np.float64)
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
    corners: Array = np.array(shape.points[0]) + signs * np.array(shape.size)
    return corners
