"""Motions at one frame rate, as flat arrays that environments index by motion and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import motions as motion_poses
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion, columns_of

_LIFT_SECONDS = 4 / 30
"""Time before and after a frame in the floor over which lifting it is distributed."""


class Kinematics(Protocol):
    """The bodies of a robot in given poses."""

    joints: Mapping[str, int]
    """{joint: numbers in a pose}; see `Motion.joints`."""

    def forward(self, poses: Array) -> tuple[Array, Array]:
        """Positions [n, bodies, 3] and quaternions [n, bodies, 4] in poses [n, 7 + m]."""
        ...

    def lowest(self, poses: Array) -> Array:
        """[n] m: lowest height of any shape in poses [n, 7 + m]."""
        ...


class Frames(NamedTuple):
    """Frames of motions, [..., n] float64 each, z up."""

    pose: Array
    """[..., 7 + m] as MuJoCo's qpos."""
    speed: Array
    """[..., 6 + k] as MuJoCo's qvel: the root's angular velocity and those of balls in the body."""
    position: Array
    """[..., bodies, 3] m: bodies in the world."""
    quaternion: Array
    """[..., bodies, 4]."""
    velocity: Array
    """[..., bodies, 3] m/s."""
    spin: Array
    """[..., bodies, 3] rad/s, in the world's axes."""

    def at(self, index: Array | slice) -> Frames:
        """The frames at an index of the first axis."""
        return Frames(*(array[index] for array in self))


@dataclass(frozen=True)
class MotionLibrary:
    """Motions one after the other in flat arrays; looping ones are continued."""

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


def build(
    motions: Sequence[Motion], rate: float, continue_for: int, body: Kinematics
) -> MotionLibrary:
    """Motions at a frame rate, closed and lifted out of the floor; loops have more frames.

    body: the robot, whose joints are those of the motions.
    """
    ready = [motion_poses.close(motion) for motion in motions]
    cycles = np.array([motion_poses.cycle_frames(motion, rate) for motion in ready])
    parts = [
        _continued(motion, rate, int(count) + continue_for, body)
        for motion, count in zip(ready, cycles, strict=True)
    ]
    counts = np.array([len(part.pose) for part in parts])
    return MotionLibrary(
        names=tuple(motion.name for motion in motions),
        frames=Frames(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))),
        starts=np.concatenate([[0], np.cumsum(counts)[:-1]]),
        counts=counts,
        cycles=cycles,
        loops=np.array([motion.loops for motion in motions]),
    )


def _continued(motion: Motion, rate: float, frames: int, body: Kinematics) -> Frames:
    if not motion.loops:
        poses = motion_poses.resample(motion, rate, 0, frames)
        return measured(grounded(poses, rate, body), rate, body)
    # With more frames on either side, so that lifting and velocities are continuous at the seam.
    more = 2 * round(_LIFT_SECONDS * rate) + 1
    poses = motion_poses.resample(motion, rate, -more, frames + 2 * more)
    return measured(grounded(poses, rate, body), rate, body).at(slice(more, -more))


def grounded(poses: Array, rate: float, body: Kinematics) -> Array:
    """Poses [n, 7 + m] at a frame rate, lifted smoothly where they are in the floor.

    If a motion were lifted as a whole by its lowest point, one toe 10 cm in the floor would let it
    hover by 10 cm at all other times. Instead each frame is lifted by a moving average of a moving
    maximum of the depth, which is at least its own depth.
    """
    depth = np.maximum(-body.lowest(poses), 0.0)
    lifted = poses.copy()
    near = round(_LIFT_SECONDS * rate)
    lifted[:, 2] += _around(_around(depth, near).max(axis=1), near).mean(axis=1)
    return lifted


def _around(values: Array, near: int) -> Array:
    """[n, 2 near + 1]: windows around each of values [n]."""
    padded = np.pad(values, near, mode="edge")
    windows: Array = np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1)
    return windows


def measured(poses: Array, rate: float, body: Kinematics) -> Frames:
    """Frames of consecutive poses [n, 7 + m]: bodies by kinematics, velocities by central
    differences, and by one-sided differences at the ends.
    """
    position, quaternion = body.forward(poses)
    speeds = {name: 1 if count == 1 else 3 for name, count in body.joints.items()}
    speed = np.empty((len(poses), 6 + sum(speeds.values())))
    speed[:, :3] = _rate(poses[:, :3], rate)
    speed[:, 3:6] = _own_spin(poses[:, 3:7], rate)
    out = columns_of(speeds, 6)
    for name, columns in columns_of(body.joints).items():
        velocity = _rate if len(columns) == 1 else _own_spin
        speed[:, out[name]] = velocity(poses[:, columns], rate)
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
