"""Mirror images of a robot, left for right: reflection in the plane y = 0 of its base.

A robot that is built symmetrically moves symmetrically. A term says how its numbers look in the
mirror, as a `Reflection`; that of joints and feet is found from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import numpy as np

from etude.core.contracts import Array, Reflection
from etude.core.errors import UsageError

TOLERANCE = 1e-3
"""Largest distance of a part from the mirror image of its counterpart, m."""
Mirror = Reflection | Callable[[Any], Reflection | None]
"""A reflection, or a function of the task's environments that finds it in the compiled model."""
VECTOR = Reflection((0, 1, 2), (1.0, -1.0, 1.0))
"""Reflection of a position, velocity or direction (x, y, z)."""
ROTATION = Reflection((0, 1, 2), (-1.0, 1.0, -1.0))
"""Reflection of an angular velocity or a rotation vector."""
PLANAR_VELOCITY = Reflection((0, 1, 2), (1.0, -1.0, -1.0))
"""Reflection of a velocity ahead, to the left, and turning left."""


def unchanged(size: int) -> Reflection:
    """The reflection of numbers that look the same in the mirror."""
    return Reflection(tuple(range(size)), (1.0,) * size)


def swapped(places: Array, what: Sequence[str]) -> Reflection:
    """The reflection of one number for each of some places [n, 2 or 3]: that of the place opposite.

    what: their names, for the error if there is no such place.
    """
    return Reflection(tuple(_opposite(places, what)), (1.0,) * len(places))


def joints(model: mujoco.MjModel, home: Array, base: int, ids: Array) -> Reflection:
    """The reflection of the joints `ids` [n], of one degree of freedom each, in the pose `home`.

    Joints are a pair if their places are, and their axes are parallel or opposite in the mirror.
    """
    data = mujoco.MjData(model)
    data.qpos[:] = home
    mujoco.mj_kinematics(model, data)
    turned = data.xmat[base].reshape(3, 3)
    places = (data.xanchor[ids] - data.xpos[base]) @ turned
    axes = data.xaxis[ids] @ turned
    is_hinge = model.jnt_type[ids] == int(mujoco.mjtJoint.mjJNT_HINGE)
    signs = np.where(is_hinge[:, None], ROTATION.signs, VECTOR.signs)
    names = [model.joint(int(j)).name for j in ids]
    agree = axes @ (axes * signs).T
    columns = _opposite(places, names, np.abs(np.abs(agree) - 1.0) < TOLERANCE)
    return Reflection(
        tuple(columns), tuple(float(np.sign(agree[i, j])) for i, j in enumerate(columns))
    )


def _opposite(places: Array, names: Sequence[str], allowed: Array | None = None) -> list[int]:
    """Index of the place opposite to each of `places` [n, 2 or 3]; allowed: [n, n] bool."""
    image = places * np.array((1.0, -1.0, 1.0)[: places.shape[1]])
    distance = np.linalg.norm(places[:, None] - image, axis=2)
    if allowed is not None:
        distance = np.where(allowed, distance, np.inf)
    found = distance.argmin(axis=1)
    for i, j in enumerate(found):
        if distance[i, j] > TOLERANCE or found[j] != i:
            raise UsageError(f"The robot is not symmetric: {names[i]} has no counterpart.")
    return [int(j) for j in found]


def scaled(reflection: Reflection, scale: Any, copies: int) -> Reflection:
    """The reflection of `copies` measurements in a row, multiplied by `scale`, a number or [n]."""
    columns, size = np.array(reflection.columns), len(reflection.columns)
    factors = np.broadcast_to(np.asarray(scale, np.float64), size)
    signs = reflection.signs * factors / factors[columns]
    return joined([Reflection(reflection.columns, tuple(signs.tolist()))] * copies)


def joined(parts: Sequence[Reflection]) -> Reflection:
    """The reflection of concatenated numbers."""
    columns: list[int] = []
    signs: list[float] = []
    for part in parts:
        start = len(signs)
        columns += [start + column for column in part.columns]
        signs += part.signs
    return Reflection(tuple(columns), tuple(signs))
