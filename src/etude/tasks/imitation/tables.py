"""The clips of a task, and tables of what is looked up frame by frame, made once from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import clips, library
from etude.data.motion import rotations as rot
from etude.data.motion.library import Frames, MotionLibrary
from etude.data.motion.skeleton import (
    BALL_COLUMNS,
    BALL_SPEED_COLUMNS,
    HINGE_COLUMNS,
    HINGE_SPEED_COLUMNS,
)
from etude.envs.robots.humanoid import CONTROL_RATE
from etude.tasks.imitation import features
from etude.tasks.imitation.options import ImitationOptions

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
    finer = features.reference_windows(motion_library(config, between), window, between)
    return np.concatenate([features.reference_windows(motion_library(config), window), finer])


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
