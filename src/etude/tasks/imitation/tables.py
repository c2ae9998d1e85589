"""Tables of what is looked up frame by frame, made once from the clips."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array
from etude.motion import rotations as rot
from etude.motion.library import Frames, MotionLibrary
from etude.motion.skeleton import (
    BALL_COLUMNS,
    BALL_SPEED_COLUMNS,
    HINGE_COLUMNS,
    HINGE_SPEED_COLUMNS,
)


def single(array: Array) -> Array:
    """The same in single precision, contiguous."""
    return np.ascontiguousarray(array, np.float32)


def join(*arrays: Array) -> Array:
    """[n, ...] each as the columns of one float32 array."""
    return single(np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1))


def split(joined: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Views of the arrays that were joined; their shapes are without the first axis."""
    parts, at = [], 0
    for shape in shapes:
        end = at + math.prod(shape)
        parts.append(joined[:, at:end].reshape(-1, *shape))
        at = end
    return parts


def phases(known: MotionLibrary) -> Array:
    """[total, 2] float32: sine and cosine of how far along each frame is.

    A circle for loops; for other clips half of one, so that end and start differ.
    """
    angles = [
        np.arange(count) * ((2 if loops else 1) * np.pi / cycle)
        for count, cycle, loops in zip(known.counts, known.cycles, known.loops, strict=True)
    ]
    angle = np.concatenate(angles)
    return single(np.stack([np.sin(angle), np.cos(angle)], axis=1))


def aims(frames: Frames, lead: float) -> tuple[Array, Array]:
    """What servos are told to follow the clip: [total, 8, 4] and [total, 4], float32.

    A servo pulls to its target and brakes all speed; sent ahead by damping / stiffness times the
    clip's speed, it brakes only what differs from that speed.
    """
    ahead = rot.exp(lead * frames.speed[:, BALL_SPEED_COLUMNS])
    balls = rot.multiply(frames.pose[:, BALL_COLUMNS], ahead)
    hinges = frames.pose[:, HINGE_COLUMNS] + lead * frames.speed[:, HINGE_SPEED_COLUMNS]
    return single(balls), single(hinges)
