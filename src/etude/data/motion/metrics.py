"""Errors of motion imitation, and their averages per motion.

Functions take positions [..., bodies, 3] in metres, `p` of the policy and `q` of the reference, and
return errors [...] in millimetres, averaged over bodies. Body 0 is the root. Differences over time
are per frame. Averages are per motion first, so that no motion counts more than another.
"""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array

_MM = 1000.0
ERRORS = ("mpjpe_g", "mpjpe_l", "mpjpe_pa", "vel_dist", "accel_dist")
"""Episode statistics with these errors."""


def global_error(p: Array, q: Array) -> Array:
    """Mean distance of the bodies in the world frame (mpjpe_g)."""
    return _mean_norm(p - q)


def local_error(p: Array, q: Array) -> Array:
    """Mean distance of the bodies relative to the root (mpjpe_l)."""
    return _mean_norm((p - p[..., :1, :]) - (q - q[..., :1, :]))


def procrustes_error(p: Array, q: Array) -> Array:
    """Mean distance after the best rotation, scale and translation of p onto q (mpjpe_pa).

    Best is least squares per frame, without reflections. If several rotations are equally good (all
    bodies at one point or on one line), one of them is used.
    """
    p = p - p.mean(axis=-2, keepdims=True)
    q = q - q.mean(axis=-2, keepdims=True)
    u, singular, vt = np.linalg.svd(np.swapaxes(p, -1, -2) @ q)
    proper = np.ones_like(singular)
    proper[..., -1] = np.where(np.linalg.det(u @ vt) < 0.0, -1.0, 1.0)
    rotation = (u * proper[..., None, :]) @ vt
    size = np.square(p).sum(axis=(-1, -2))
    # A figure without size stays a point at every scale.
    scale = (singular * proper).sum(axis=-1) / np.where(size > 0.0, size, 1.0)
    return _mean_norm(scale[..., None, None] * (p @ rotation) - q)


def velocity_error(p0: Array, p1: Array, q0: Array, q1: Array) -> Array:
    """Mean difference of the bodies' steps from one frame to the next (vel_dist), mm per frame."""
    return _mean_norm((p1 - p0) - (q1 - q0))


def acceleration_error(p0: Array, p1: Array, p2: Array, q0: Array, q1: Array, q2: Array) -> Array:
    """Mean difference of the bodies' second differences (accel_dist), mm per frame squared."""
    return _mean_norm((p2 - 2.0 * p1 + p0) - (q2 - 2.0 * q1 + q0))


def _mean_norm(difference: Array) -> Array:
    """[..., bodies, 3] metres to [...] millimetres."""
    error: Array = np.linalg.norm(difference, axis=-1).mean(axis=-1) * _MM
    return error


def by_motion(episodes: dict[str, Array]) -> dict[str, Array]:
    """Means over the episodes of each motion: {name: [episodes]} to {name: [motions]}.

    The motions are those in "motion" [episodes], by number, ascending.
    """
    numbers, place = np.unique(episodes["motion"], return_inverse=True)
    counts = np.bincount(place, minlength=len(numbers))
    return {
        name: np.bincount(place, weights=values, minlength=len(numbers)) / counts
        for name, values in episodes.items()
    }


def only_successes(episodes: dict[str, Array]) -> dict[str, Array]:
    """The episodes that succeeded, {name: [k]}."""
    won = episodes["is_success"] > 0
    return {name: values[won] for name, values in episodes.items()}
