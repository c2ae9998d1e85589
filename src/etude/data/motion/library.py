"""Many clips at one rate, as flat arrays that environments read by motion and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import clips as clip_files
from etude.data.motion import rotations as rot
from etude.data.motion.clips import Clip
from etude.data.motion.skeleton import (
    BALL_COLUMNS,
    BALL_SPEED_COLUMNS,
    HINGE_COLUMNS,
    HINGE_SPEED_COLUMNS,
    NUM_SPEED,
    forward,
    lowest,
)

_LIFT_SECONDS = 4 / 30
"""On either side, over which being lifted out of the floor is spread."""


class Figure(NamedTuple):
    """What a figure is doing, [n, ...] float64: all that follows from a state without a model."""

    pose: Array
    """[n, 43]."""
    speed: Array
    """[n, 34]."""
    position: Array
    """[n, 15, 3] m."""


class Frames(NamedTuple):
    """Moments of motion, [..., n] float64 each, z up."""

    pose: Array
    """[..., 43] as MuJoCo's qpos."""
    speed: Array
    """[..., 34] as MuJoCo's qvel: the root's angular velocity and those of balls in the body."""
    position: Array
    """[..., 15, 3] m: bodies in the world."""
    quaternion: Array
    """[..., 15, 4]."""
    velocity: Array
    """[..., 15, 3] m/s."""
    spin: Array
    """[..., 15, 3] rad/s, in the world's axes."""

    def at(self, index: Array | slice) -> Frames:
        """The frames at an index of the first axis."""
        return Frames(*(array[index] for array in self))

    @property
    def figure(self) -> Figure:
        return Figure(self.pose, self.speed, self.position)


@dataclass(frozen=True)
class MotionLibrary:
    """Clips one after the other in flat arrays; looping ones go on for as long as was asked."""

    names: tuple[str, ...]
    frames: Frames
    """All frames of all motions, [total, ...]."""
    starts: Array
    """[motions] int64: where each one's frames begin."""
    counts: Array
    """[motions] int64: how many it has, its continuation among them."""
    cycles: Array
    """[motions] int64: how many until it begins again; all of it for one that does not loop."""
    loops: Array
    """[motions] bool."""

    @property
    def num_motions(self) -> int:
        return len(self.names)

    def rows(self, motion: Array, time: Array) -> Array:
        """[...] int64: where the frames of motions [...] at times [...] are, by frame number.

        Past its end a motion that does not loop stays at its last frame. One that does was
        continued for `continue_for` frames beyond its cycle; past them it stays as well.
        """
        index: Array = self.starts[motion] + np.minimum(time, self.counts[motion] - 1)
        return index

    def frame(self, motion: Array, time: Array) -> Frames:
        """The frames [..., n] of motions [...] at times [...]."""
        return self.frames.at(self.rows(motion, time))


def build(clips: Sequence[Clip], rate: float, continue_for: int) -> MotionLibrary:
    """The clips at a rate, seams closed, out of the floor; loops go on for so many frames more."""
    ready = [clip_files.close(clip) for clip in clips]
    cycles = np.array([clip_files.cycle_frames(clip, rate) for clip in ready])
    parts = [
        _continued(clip, rate, int(count) + continue_for)
        for clip, count in zip(ready, cycles, strict=True)
    ]
    counts = np.array([len(part.pose) for part in parts])
    return MotionLibrary(
        names=tuple(clip.name for clip in clips),
        frames=Frames(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))),
        starts=np.concatenate([[0], np.cumsum(counts)[:-1]]),
        counts=counts,
        cycles=cycles,
        loops=np.array([clip.loops for clip in clips]),
    )


def _continued(clip: Clip, rate: float, frames: int) -> Frames:
    if not clip.loops:
        return measured(grounded(clip_files.resample(clip, rate, 0, frames), rate), rate)
    # With some frames more on either side, so that neither floor nor velocities know of a seam.
    more = 2 * round(_LIFT_SECONDS * rate) + 1
    poses = clip_files.resample(clip, rate, -more, frames + 2 * more)
    return measured(grounded(poses, rate), rate).at(slice(more, -more))


def grounded(poses: Array, rate: float) -> Array:
    """Poses [n, 43], so many a second, lifted smoothly where they are in the floor.

    Lifted as a whole by its one lowest point, a clip whose toe dips 10 cm would hover by as much
    for the rest of its time. So every frame is lifted by the mean, over some frames around it, of
    the deepest dip around each of those: never less than its own.
    """
    depth = np.maximum(-lowest(*forward(poses)), 0.0)
    lifted = poses.copy()
    near = round(_LIFT_SECONDS * rate)
    lifted[:, 2] += _around(_around(depth, near).max(axis=1), near).mean(axis=1)
    return lifted


def _around(values: Array, near: int) -> Array:
    """[n, 2 near + 1]: each of values [n] with those before and after it."""
    padded = np.pad(values, near, mode="edge")
    windows: Array = np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1)
    return windows


def measured(poses: Array, rate: float) -> Frames:
    """Frames of poses [n, 43] in a row: bodies by kinematics, velocities by differences.

    Differences span the frames before and after; at the ends, one frame.
    """
    position, quaternion = forward(poses)
    speed = np.empty((len(poses), NUM_SPEED))
    speed[:, :3] = _rate(poses[:, :3], rate)
    speed[:, 3:6] = _own_spin(poses[:, 3:7], rate)
    for columns, out in zip(BALL_COLUMNS, BALL_SPEED_COLUMNS, strict=True):
        speed[:, out] = _own_spin(poses[:, columns], rate)
    speed[:, HINGE_SPEED_COLUMNS] = _rate(poses[:, HINGE_COLUMNS], rate)
    # An angular velocity is the same in the axes of the body and of the world, but for the turn.
    spin = rot.rotate(quaternion, _own_spin(quaternion, rate))
    return Frames(poses, speed, position, quaternion, _rate(position, rate), spin)


def _rate(values: Array, rate: float) -> Array:
    """[n, ...] per second."""
    change = np.empty_like(values)
    change[1:-1] = (values[2:] - values[:-2]) * (rate / 2)
    change[0], change[-1] = (values[1] - values[0]) * rate, (values[-1] - values[-2]) * rate
    return change


def _own_spin(quaternions: Array, rate: float) -> Array:
    """[n, ..., 3] rad/s in the turning body's own axes, of quaternions [n, ..., 4]."""
    spin = np.empty((*quaternions.shape[:-1], 3))

    def between(one: Array, two: Array) -> Array:
        return rot.log(rot.multiply(rot.conjugate(one), two))

    spin[1:-1] = between(quaternions[:-2], quaternions[2:]) * (rate / 2)
    spin[0] = between(quaternions[0], quaternions[1]) * rate
    spin[-1] = between(quaternions[-2], quaternions[-1]) * rate
    return spin
