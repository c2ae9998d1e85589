"""Observations of imitation and of the discriminator, and lookup tables of the clips."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import clips, library
from etude.data.motion import rotations as rot
from etude.data.motion.library import Figure, Frames, MotionLibrary
from etude.data.motion.skeleton import (
    BALL_COLUMNS,
    BALL_SPEED_COLUMNS,
    ENDS,
    HINGE_COLUMNS,
    HINGE_SPEED_COLUMNS,
    NUM_BODIES,
)
from etude.envs.robots.humanoid import CONTROL_RATE
from etude.tasks.imitation.options import ImitationOptions

NUM_JOINT_SPEEDS = 28
_OWN_VECTORS, _AHEAD_VECTORS = 2 + 1 + NUM_BODIES - 1, NUM_BODIES + 1
NUM_SELF = 3 * _OWN_VECTORS + 1 + 3 + NUM_JOINT_SPEEDS
"""Size of the features of the humanoid itself."""
NUM_AHEAD = 3 * _AHEAD_VECTORS + 3 * 9 + len(HINGE_COLUMNS) + 3 + NUM_JOINT_SPEEDS
"""Size of the features of one frame of the reference."""
NUM_STYLE = (
    1 + 6 + 6 + 6 * len(BALL_COLUMNS) + len(HINGE_COLUMNS) + NUM_JOINT_SPEEDS + 3 * len(ENDS)
)
"""Size of the features of one frame for the discriminator."""


def observe(now: Figure, ahead: list[Figure], phase: Array, out: Array) -> None:
    """Write the policy's observation to out [n, NUM_SELF + len(ahead) * NUM_AHEAD + 2] float32.

    now: the humanoid; ahead: frames of the reference, observed as differences from the humanoid;
    phase: [n, 2]. Without frames ahead the phase is left out too, and nothing shows the reference.
    """
    rows, root = len(out), now.pose[:, 3:7]
    vectors = np.empty((rows, _OWN_VECTORS + _AHEAD_VECTORS * len(ahead), 3), np.float32)
    vectors[:, :2] = rot.two_axes(root).reshape(rows, 2, 3)
    vectors[:, 2] = now.speed[:, :3]
    vectors[:, 3:_OWN_VECTORS] = rot.difference(now.position[:, 1:], now.position[:, :1])
    at = _OWN_VECTORS
    for then in ahead:
        np.subtract(then.position, now.position, out=vectors[:, at : at + NUM_BODIES])
        np.subtract(then.speed[:, :3], now.speed[:, :3], out=vectors[:, at + NUM_BODIES])
        at += _AHEAD_VECTORS
    # Rotate all vectors in one call, because calls cost more than the numbers.
    width = vectors.shape[1] * 3
    rot.turn(vectors, *_facing(root), out=out[:, :width].reshape(rows, -1, 3))
    out[:, width] = now.pose[:, 2]
    out[:, width + 1 : width + 4 + NUM_JOINT_SPEEDS] = now.speed[:, 3:]
    at = width + 4 + NUM_JOINT_SPEEDS
    if not ahead:
        return
    inverse = rot.conjugate(now.pose[:, _ROTATION_COLUMNS])
    for then in ahead:
        turns = rot.small_turn(rot.multiply(inverse, then.pose[:, _ROTATION_COLUMNS]))
        out[:, at : at + 27] = turns.reshape(rows, -1)
        out[:, at + 27 : at + 31] = then.pose[:, HINGE_COLUMNS] - now.pose[:, HINGE_COLUMNS]
        out[:, at + 31 : at + 34 + NUM_JOINT_SPEEDS] = then.speed[:, 3:] - now.speed[:, 3:]
        at += 34 + NUM_JOINT_SPEEDS
    out[:, at:] = phase


def _facing(root: Array) -> tuple[Array, Array]:
    """(cos, sin) [n, 1] of the rotations that make humanoids face x."""
    cosine, sine = rot.heading_free(root)
    return cosine[:, None], sine[:, None]


_ROTATION_COLUMNS = np.concatenate([BALL_COLUMNS, [[3, 4, 5, 6]]])
"""[9, 4]: columns of the ball joints' quaternions and, last, the root's."""


def style(now: Figure) -> Array:
    """Features [n, NUM_STYLE] float32 of a frame, invariant to position and heading."""
    rows, root = len(now.pose), now.pose[:, 3:7]
    vectors = np.empty((rows, 4 + len(ENDS), 3), np.float32)
    vectors[:, :2] = rot.two_axes(root).reshape(rows, 2, 3)
    vectors[:, 2] = now.speed[:, :3]
    vectors[:, 3] = rot.rotate(root, now.speed[:, 3:6])
    np.subtract(now.position[:, ENDS], now.position[:, :1], out=vectors[:, 4:])
    out = np.empty((rows, NUM_STYLE), np.float32)
    ends = 1 + 3 * (4 + len(ENDS))
    balls = ends + 6 * len(BALL_COLUMNS)
    hinges = balls + len(HINGE_COLUMNS)
    out[:, 0] = now.pose[:, 2]
    rot.turn(vectors, *_facing(root), out=out[:, 1:ends].reshape(rows, -1, 3))
    out[:, ends:balls] = rot.two_axes(now.pose[:, BALL_COLUMNS]).reshape(rows, -1)
    out[:, balls:hinges] = now.pose[:, HINGE_COLUMNS]
    out[:, hinges:] = now.speed[:, 6:]
    return out


def window_rows(
    library: MotionLibrary, motion: Array, time: Array, window: int, apart: int = 1
) -> Array:
    """Rows [n, window] int64 in the library of the windows that end at times [n] of motions [n].

    Before its start a looping clip continues with the end of its cycle (features do not depend on
    the position), and other clips repeat their first frame. apart: distance of the frames of a
    window in the library.
    """
    before = time[:, None] - apart * np.arange(window - 1, -1, -1)
    earlier = np.where(library.loops[motion][:, None], before % library.cycles[motion][:, None], 0)
    return library.rows(motion[:, None], np.where(before < 0, earlier, before))


def reference_windows(library: MotionLibrary, window: int, apart: int = 1) -> Array:
    """Windows [N, window, NUM_STYLE] float32 that end in each frame of each motion."""
    motion = np.repeat(np.arange(library.num_motions), library.cycles)
    time = np.concatenate([np.arange(count) for count in library.cycles])
    rows = window_rows(library, motion, time, window, apart)
    windows: Array = style(library.frames.figure)[rows]
    return windows


_BETWEEN = 4
"""Windows per frame for the discriminator, by interpolation between frames."""


def motion_library(config: ImitationOptions, finer: int = 1) -> MotionLibrary:
    """The clips of a config, at `finer` times the control rate, for the length of an episode."""
    ahead = max(config.future, default=0)
    found = clips.load(config.clips, config.folder)
    frames = config.max_episode_steps + ahead + 1
    return library.build(found, finer * CONTROL_RATE, finer * frames)


def style_windows(config: ImitationOptions) -> Array:
    """All windows [N, window, n] float32 of the reference clips, newest frame last.

    They are the observation "style" of a humanoid that moves exactly as its clip, at the frames and
    at fractions of frames. With windows at whole frames alone, a discriminator memorises a few
    dozen windows and rejects all others.
    """
    window, between = config.style_window, _BETWEEN
    finer = reference_windows(motion_library(config, between), window, between)
    return np.concatenate([reference_windows(motion_library(config), window), finer])


def style_motions(config: ImitationOptions) -> Array:
    """Index of the clip of each of `style_windows`, [N] int64."""
    libraries = motion_library(config), motion_library(config, _BETWEEN)
    return np.concatenate([np.repeat(np.arange(x.num_motions), x.cycles) for x in libraries])


def single(array: Array) -> Array:
    """A contiguous float32 copy."""
    return np.ascontiguousarray(array, np.float32)


def join(*arrays: Array) -> Array:
    """Join arrays [n, ...] as the columns of one float32 array."""
    return single(np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1))


def split(joined: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Views of joined arrays; shapes are given without the first axis."""
    parts, at = [], 0
    for shape in shapes:
        end = at + math.prod(shape)
        parts.append(joined[:, at:end].reshape(-1, *shape))
        at = end
    return parts


def phases(known: MotionLibrary) -> Array:
    """Sine and cosine [total, 2] float32 of the phase of each frame.

    The phase covers a full circle in looping clips and half a circle in others, so that their end
    differs from their start.
    """
    angles = [
        np.arange(count) * ((2 if loops else 1) * np.pi / cycle)
        for count, cycle, loops in zip(known.counts, known.cycles, known.loops, strict=True)
    ]
    angle = np.concatenate(angles)
    return single(np.stack([np.sin(angle), np.cos(angle)], axis=1))


def servo_targets(frames: Frames, lead: float) -> tuple[Array, Array]:
    """Targets of the servos for following the clips: [total, 8, 4] and [total, 4] float32.

    A servo is a spring to its target with damping of the joint velocity. With a target that leads
    by damping / stiffness times the clip's velocity, it damps only the difference from that
    velocity.
    """
    ahead = rot.exp(lead * frames.speed[:, BALL_SPEED_COLUMNS])
    balls = rot.multiply(frames.pose[:, BALL_COLUMNS], ahead)
    hinges = frames.pose[:, HINGE_COLUMNS] + lead * frames.speed[:, HINGE_SPEED_COLUMNS]
    return single(balls), single(hinges)
