"""Rotations as quaternions (w, x, y, z) with any leading shape.

Most functions work on components, since numpy is several times slower along an axis of three or
four numbers.
"""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array

_TINY = 1e-12


def normalise(quaternion: Array) -> Array:
    """Quaternions [..., 4] scaled to unit length."""
    unit: Array = (
        quaternion / np.sqrt(np.einsum("...i,...i->...", quaternion, quaternion))[..., None]
    )
    return unit


def conjugate(quaternion: Array) -> Array:
    """[..., 4]: the inverse of a unit quaternion."""
    inverse: Array = np.negative(quaternion)
    inverse[..., 0] = quaternion[..., 0]
    return inverse


def multiply(one: Array, two: Array) -> Array:
    """[..., 4]: first `two`, then `one`."""
    w1, x1, y1, z1 = one[..., 0], one[..., 1], one[..., 2], one[..., 3]
    w2, x2, y2, z2 = two[..., 0], two[..., 1], two[..., 2], two[..., 3]
    product = np.empty(np.broadcast_shapes(one.shape, two.shape), np.result_type(one, two))
    product[..., 0] = w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2
    product[..., 1] = w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2
    product[..., 2] = w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2
    product[..., 3] = w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2
    return product


def cross(one: Array, two: Array) -> Array:
    """Cross product [..., 3]; numpy's is several times slower on small vectors."""
    x1, y1, z1 = one[..., 0], one[..., 1], one[..., 2]
    x2, y2, z2 = two[..., 0], two[..., 1], two[..., 2]
    product = np.empty(np.broadcast_shapes(one.shape, two.shape), np.result_type(one, two))
    product[..., 0] = y1 * z2 - z1 * y2
    product[..., 1] = z1 * x2 - x1 * z2
    product[..., 2] = x1 * y2 - y1 * x2
    return product


def rotate(quaternion: Array, vector: Array) -> Array:
    """Rotate vectors [..., 3] by unit quaternions [..., 4]."""
    axis = quaternion[..., 1:]
    twice = 2.0 * cross(axis, vector)
    turned: Array = vector + quaternion[..., :1] * twice + cross(axis, twice)
    return turned


def log(quaternion: Array) -> Array:
    """Rotation vectors [..., 3] of the shorter rotation, at most pi long."""
    sine = np.sqrt(np.einsum("...i,...i->...", quaternion[..., 1:], quaternion[..., 1:]))
    cosine = quaternion[..., 0]
    angle = 2.0 * np.arctan2(sine, np.abs(cosine))
    scale = np.where(sine > _TINY, angle / np.maximum(sine, _TINY), 2.0)
    vector: Array = np.where(cosine < 0, -scale, scale)[..., None] * quaternion[..., 1:]
    return vector


def exp(vector: Array) -> Array:
    """Unit quaternions [..., 4] of rotation vectors [..., 3]."""
    angle = np.sqrt(np.einsum("...i,...i->...", vector, vector))
    half = angle / 2
    quaternion = np.empty((*vector.shape[:-1], 4), vector.dtype)
    np.cos(half, out=quaternion[..., 0])
    scale = np.where(angle > _TINY, np.sin(half) / np.maximum(angle, _TINY), 0.5)
    for i in range(3):
        np.multiply(vector[..., i], scale, out=quaternion[..., i + 1])
    return quaternion


def slerp(one: Array, two: Array, share: Array) -> Array:
    """[..., 4]: interpolation from `one` to `two` along the shorter rotation, share [...]."""
    step = log(multiply(conjugate(one), two))
    return multiply(one, exp(share[..., None] * step))


def angle_between(one: Array, two: Array) -> Array:
    """Angle [...] rad, 0 to pi, between unit quaternions [..., 4]."""
    cosine = np.abs(np.einsum("...i,...i->...", one, two))
    angle: Array = 2.0 * np.arccos(np.minimum(cosine, 1.0))
    return angle


def heading(quaternion: Array) -> Array:
    """Heading [...] rad: the rotation about the vertical, without the tilt.

    It is defined when the figure lies down and in a somersault, where a forward axis has no
    horizontal direction. It is undefined upside down, where it is set to 0.
    """
    angle: Array = 2.0 * np.arctan2(quaternion[..., 3], quaternion[..., 0])
    return angle


def about_z(angle: Array) -> Array:
    """Unit quaternions [..., 4] of turns [...] rad about the vertical."""
    angle = np.asarray(angle, np.float64)
    quaternion = np.zeros((*angle.shape, 4))
    quaternion[..., 0], quaternion[..., 3] = np.cos(angle / 2), np.sin(angle / 2)
    return quaternion


def heading_free(quaternion: Array) -> tuple[Array, Array]:
    """(cos, sin) [...] of the rotation that removes the heading, without trigonometry."""
    w, z = quaternion[..., 0], quaternion[..., 3]
    length = w * w + z * z
    upside_down = length < _TINY
    length = np.where(upside_down, 1.0, length)
    cosine: Array = np.where(upside_down, 1.0, (w * w - z * z) / length)
    sine: Array = -2.0 * w * z / length
    return cosine, sine


def turn(vector: Array, cosine: Array, sine: Array, out: Array | None = None) -> Array:
    """Rotate vectors [..., 3] about the vertical; cosine and sine broadcast to [...]."""
    x, y = vector[..., 0], vector[..., 1]
    turned = np.empty_like(vector) if out is None else out
    turned[..., 0] = cosine * x - sine * y
    turned[..., 1] = sine * x + cosine * y
    turned[..., 2] = vector[..., 2]
    return turned


def two_axes(quaternion: Array) -> Array:
    """[..., 6]: the rotated x and z axes, a continuous representation of rotations."""
    w, x, y, z = (quaternion[..., i] for i in range(4))
    axes = np.empty((*quaternion.shape[:-1], 6), quaternion.dtype)
    axes[..., 0] = 1 - 2 * (y * y + z * z)
    axes[..., 1] = 2 * (x * y + w * z)
    axes[..., 2] = 2 * (x * z - w * y)
    axes[..., 3] = 2 * (x * z + w * y)
    axes[..., 4] = 2 * (y * z - w * x)
    axes[..., 5] = 1 - 2 * (x * x + y * y)
    return axes
