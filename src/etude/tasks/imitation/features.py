"""What an imitating policy and the discriminator are shown: pure functions of moments of motion."""

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
"""Numbers about the figure itself."""
NUM_AHEAD = 3 * _AHEAD_VECTORS + 3 * 9 + len(HINGE_COLUMNS) + 3 + NUM_JOINT_SPEEDS
"""Numbers about one moment of the reference."""
NUM_STYLE = (
    1 + 6 + 6 + 6 * len(BALL_COLUMNS) + len(HINGE_COLUMNS) + NUM_JOINT_SPEEDS + 3 * len(ENDS)
)
"""Numbers of one moment for the discriminator."""


def observe(now: Figure, ahead: list[Figure], phase: Array, out: Array) -> None:
    """All that a policy reads into out [n, NUM_SELF + len(ahead) * NUM_AHEAD + 2]; float32.

    now: the figure; ahead: the reference at later moments, as differences from the figure now;
    phase: [n, 2]. Without moments ahead there is no phase either: nothing tells of the reference.
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
    # All that has a direction is turned at once: the calls cost more than the numbers.
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
    """(cos, sin) [n, 1] of the turns that make figures face x."""
    cosine, sine = rot.heading_free(root)
    return cosine[:, None], sine[:, None]


_ROTATION_COLUMNS = np.concatenate([BALL_COLUMNS, [[3, 4, 5, 6]]])
"""[9, 4]: the ball joints and, last, the root."""


def style(now: Figure) -> Array:
    """[n, NUM_STYLE] float32: a moment of motion, wherever it is and whichever way it faces."""
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
    """[n, window] int64: frames of the library up to and with times [n] of motions [n].

    What came before the start of a looping clip is the end of its cycle, as the features of a
    moment do not depend on where it happens; another clip has stood still in its first frame.
    apart: how many frames of the library lie between those of a window.
    """
    before = time[:, None] - apart * np.arange(window - 1, -1, -1)
    earlier = np.where(library.loops[motion][:, None], before % library.cycles[motion][:, None], 0)
    return library.rows(motion[:, None], np.where(before < 0, earlier, before))


def reference_windows(library: MotionLibrary, window: int, apart: int = 1) -> Array:
    """[N, window, NUM_STYLE] float32: the window that ends in each frame of each motion."""
    motion = np.repeat(np.arange(library.num_motions), library.cycles)
    time = np.concatenate([np.arange(count) for count in library.cycles])
    rows = window_rows(library, motion, time, window, apart)
    windows: Array = style(library.frames.figure)[rows]
    return windows


_BETWEEN = 4
"""Moments of a frame at which windows for the discriminator may begin."""


def motion_library(config: ImitationOptions, finer: int = 1) -> MotionLibrary:
    """The config's clips at the control rate, or a finer one, for as long as an episode takes."""
    ahead = max(config.future, default=0)
    found = clips.load(config.clips, config.folder)
    frames = config.max_episode_steps + ahead + 1
    return library.build(found, finer * CONTROL_RATE, finer * frames)


def style_windows(config: ImitationOptions) -> Array:
    """[N, window, n] float32: every window of the reference clips, newest frame last.

    They are what the observation "style" shows of a figure that moves exactly as its clip, and of
    one that does so a fraction of a frame later: a discriminator that knows a few dozen windows by
    heart would call all others false.
    """
    window, between = config.style_window, _BETWEEN
    finer = reference_windows(motion_library(config, between), window, between)
    return np.concatenate([reference_windows(motion_library(config), window), finer])


def style_motions(config: ImitationOptions) -> Array:
    """[N] int64: the clip that each of `style_windows` is of."""
    libraries = motion_library(config), motion_library(config, _BETWEEN)
    return np.concatenate([np.repeat(np.arange(x.num_motions), x.cycles) for x in libraries])


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
