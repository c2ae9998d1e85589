"""Clips at one frame rate, as flat arrays that environments index by motion and time."""

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
"""Time before and after a frame in the floor over which lifting it is distributed."""


class Figure(NamedTuple):
    """Pose, velocity and body positions of figures, [n, ...] float64."""

    pose: Array
    """[n, 43]."""
    speed: Array
    """[n, 34]."""
    position: Array
    """[n, 15, 3] m."""


class Frames(NamedTuple):
    """Frames of motions, [..., n] float64 each, z up."""

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
    """Clips one after the other in flat arrays; looping ones are continued."""

    names: tuple[str, ...]
    frames: Frames
    """All frames of all motions, [total, ...]."""
    starts: Array
    """[motions] int64: first frame of each."""
    counts: Array
    """[motions] int64: number of frames, with the continuation."""
    cycles: Array
    """[motions] int64: number of frames of one cycle; all frames if it does not loop."""
    loops: Array
    """[motions] bool."""

    @property
    def num_motions(self) -> int:
        return len(self.names)

    def rows(self, motion: Array, time: Array) -> Array:
        """[...] int64: rows of the frames of motions [...] at times [...], by frame number.

        A motion stays at its last frame after its end. A looping one is continued for
        `continue_for` frames beyond its cycle.
        """
        index: Array = self.starts[motion] + np.minimum(time, self.counts[motion] - 1)
        return index

    def frame(self, motion: Array, time: Array) -> Frames:
        """The frames [..., n] of motions [...] at times [...]."""
        return self.frames.at(self.rows(motion, time))


def build(clips: Sequence[Clip], rate: float, continue_for: int) -> MotionLibrary:
    """Clips at a frame rate, closed and lifted out of the floor; loops have more frames."""
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
    # With more frames on either side, so that lifting and velocities are continuous at the seam.
    more = 2 * round(_LIFT_SECONDS * rate) + 1
    poses = clip_files.resample(clip, rate, -more, frames + 2 * more)
    return measured(grounded(poses, rate), rate).at(slice(more, -more))


def grounded(poses: Array, rate: float) -> Array:
    """Poses [n, 43] at a frame rate, lifted smoothly where they are in the floor.

    If a clip were lifted as a whole by its lowest point, one toe 10 cm in the floor would let it
    hover by 10 cm at all other times. Instead each frame is lifted by a moving average of a moving
    maximum of the depth, which is at least its own depth.
    """
    depth = np.maximum(-lowest(*forward(poses)), 0.0)
    lifted = poses.copy()
    near = round(_LIFT_SECONDS * rate)
    lifted[:, 2] += _around(_around(depth, near).max(axis=1), near).mean(axis=1)
    return lifted


def _around(values: Array, near: int) -> Array:
    """[n, 2 near + 1]: windows around each of values [n]."""
    padded = np.pad(values, near, mode="edge")
    windows: Array = np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1)
    return windows


def measured(poses: Array, rate: float) -> Frames:
    """Frames of consecutive poses [n, 43]: bodies by kinematics, velocities by central
    differences, and by one-sided differences at the ends.
    """
    position, quaternion = forward(poses)
    speed = np.empty((len(poses), NUM_SPEED))
    speed[:, :3] = _rate(poses[:, :3], rate)
    speed[:, 3:6] = _own_spin(poses[:, 3:7], rate)
    for columns, out in zip(BALL_COLUMNS, BALL_SPEED_COLUMNS, strict=True):
        speed[:, out] = _own_spin(poses[:, columns], rate)
    speed[:, HINGE_SPEED_COLUMNS] = _rate(poses[:, HINGE_COLUMNS], rate)
    # From the axes of the body to those of the world.
    spin = rot.rotate(quaternion, _own_spin(quaternion, rate))
    return Frames(poses, speed, position, quaternion, _rate(position, rate), spin)


def _rate(values: Array, rate: float) -> Array:
    """Derivatives [n, ...] per second."""
    change = np.empty_like(values)
    change[1:-1] = (values[2:] - values[:-2]) * (rate / 2)
    change[0], change[-1] = (values[1] - values[0]) * rate, (values[-1] - values[-2]) * rate
    return change


def _own_spin(quaternions: Array, rate: float) -> Array:
    """Angular velocities [n, ..., 3] rad/s in the body's axes, of quaternions [n, ..., 4]."""
    spin = np.empty((*quaternions.shape[:-1], 3))

    def between(one: Array, two: Array) -> Array:
        return rot.log(rot.multiply(rot.conjugate(one), two))

    spin[1:-1] = between(quaternions[:-2], quaternions[2:]) * (rate / 2)
    spin[0] = between(quaternions[0], quaternions[1]) * rate
    spin[-1] = between(quaternions[-2], quaternions[-1]) * rate
    return spin
