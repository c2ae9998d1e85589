"""Motions of any robot: poses over time, closed loops, and frames at a constant rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import rotations as rot

_MAX_SHIFT = 0.05
"""m: largest shift of a root's path that closes its velocity."""
_TURNING = np.pi / 4
"""rad: a cycle whose end is turned by more continues to turn; by less, it is straight."""


@dataclass(frozen=True)
class Motion:
    """Poses of a robot with a floating root over time, z up."""

    name: str
    times: Array
    """[frames] s, from 0."""
    poses: Array
    """[frames, 7 + n]: position (m) and quaternion (w, x, y, z) of the root, then the joints."""
    loops: bool
    """Whether it continues from its start after its end; its last frame is the next cycle's
    first."""
    joints: Mapping[str, int]
    """{joint: numbers in a pose}, in the order of the columns: 1 (rad or m), or 4 for the
    quaternion of a ball joint."""

    @property
    def columns(self) -> dict[str, list[int]]:
        """{joint: its columns of the poses}."""
        return columns_of(self.joints)

    @property
    def quaternions(self) -> list[list[int]]:
        """Columns of the quaternions, the root's first."""
        return [[3, 4, 5, 6], *(c for c in self.columns.values() if len(c) == 4)]

    @property
    def seconds(self) -> float:
        return float(self.times[-1])

    @property
    def travel(self) -> Array:
        """[2] m: displacement from start to end."""
        travelled: Array = self.poses[-1, :2] - self.poses[0, :2]
        return travelled

    @property
    def turn(self) -> float:
        """rad: rotation of the next cycle, 0 for most."""
        start, end = rot.heading(self.poses[[0, -1], 3:7])
        turned = float((end - start + np.pi) % (2 * np.pi) - np.pi)
        return turned if self.loops and abs(turned) > _TURNING else 0.0


def columns_of(joints: Mapping[str, int], first: int = 7) -> dict[str, list[int]]:
    """{joint: its columns} of joints with these numbers of columns, from `first` on."""
    found: dict[str, list[int]] = {}
    for name, count in joints.items():
        found[name] = list(range(first, first + count))
        first += count
    return found


def close(motion: Motion) -> Motion:
    """A looping motion whose end equals its start.

    Recorded cycles do not close: a walk's shoulder is 28 degrees off. Each gap is distributed
    linearly over the motion, half of it from either end, so that no joint's speed changes by more
    than its gap divided by the length. The velocity of the root does not close either: a walk sways
    to the left at its end and to the right at its start, and a figure that starts there with the
    mean of both, which is zero, falls over.
    """
    if not motion.loops:
        return motion
    poses, share = motion.poses.copy(), 0.5 - motion.times / motion.seconds
    for columns in motion.quaternions:
        first, last = poses[0, columns], poses[-1, columns]
        if columns[0] == 3:
            last = rot.multiply(rot.about_z(np.array(-motion.turn)), last)
        gap = rot.log(rot.multiply(rot.conjugate(first), last))
        poses[:, columns] = rot.multiply(poses[:, columns], rot.exp(share[:, None] * gap))
    for column in (2, *(c[0] for c in motion.columns.values() if len(c) == 1)):
        poses[:, column] += share * (poses[-1, column] - poses[0, column])
    if not motion.turn:
        poses[:, :3] += _close_speed(motion, poses[:, :3])
    return replace(motion, poses=poses)


def _close_speed(motion: Motion, path: Array) -> Array:
    """[frames, 3] m: shift of a root's path after which its first and last velocity are equal.

    Half of the difference is added at either end and fades out over a time in which the shift is at
    most `_MAX_SHIFT`.
    """
    times = motion.times
    first = (path[1] - path[0]) / (times[1] - times[0])
    last = (path[-1] - path[-2]) / (times[-1] - times[-2])
    gap = last - first
    size = float(np.linalg.norm(gap))
    if size == 0.0:
        return np.zeros_like(path)
    ramp = min(motion.seconds / 2, 4 * _MAX_SHIFT / size)
    near = np.minimum(np.minimum(times, motion.seconds - times), ramp)
    shift: Array = (near - near * near / (2 * ramp))[:, None] * gap / 2
    return shift


def sample(motion: Motion, times: Array) -> Array:
    """Poses [n, 7 + n] at times [n] s within the motion, interpolated along the shorter
    rotation."""
    after = np.clip(np.searchsorted(motion.times, times, side="right"), 1, len(motion.times) - 1)
    start, end = motion.times[after - 1], motion.times[after]
    share = np.clip((times - start) / (end - start), 0.0, 1.0)
    one, two = motion.poses[after - 1], motion.poses[after]
    poses: Array = one + share[:, None] * (two - one)
    for columns in motion.quaternions:
        poses[:, columns] = rot.slerp(one[:, columns], two[:, columns], share)
    return poses


def resample(motion: Motion, rate: float, first: int, frames: int) -> Array:
    """`frames` poses [frames, 7 + n] at a rate per second; frame 0 is the motion's start.

    A looping motion continues before and after, and its root travels; its length is scaled to a
    whole number of frames. Others end, so that there may be fewer poses.
    """
    period = cycle_frames(motion, rate)
    if not motion.loops:
        return sample(motion, np.arange(first, min(first + frames, period)) / rate)
    index = np.arange(first, first + frames)
    cycle = sample(motion, np.arange(period) * (motion.seconds / period))
    poses, cycles = cycle[index % period], index // period
    # Each cycle begins at the end of the previous one, and is turned about that point.
    numbers = np.arange(cycles[0], cycles[-1] + 1)
    step = np.append(motion.travel, 0.0)
    steps = rot.rotate(rot.about_z(motion.turn * numbers), np.broadcast_to(step, (len(numbers), 3)))
    travelled = np.cumsum(steps, axis=0) - steps
    travelled -= travelled[-cycles[0]]
    turned = rot.about_z(motion.turn * cycles)
    start = np.append(motion.poses[0, :2], 0.0)
    poses[:, :3] = start + rot.rotate(turned, poses[:, :3] - start) + travelled[cycles - cycles[0]]
    poses[:, 3:7] = rot.multiply(turned, poses[:, 3:7])
    return poses


def cycle_frames(motion: Motion, rate: float) -> int:
    """Number of frames of one cycle of a looping motion; of others, all frames."""
    if motion.loops:
        return max(2, round(motion.seconds * rate))
    return int(motion.seconds * rate + 1e-6) + 1


def at_rate(motion: Motion, rate: float) -> Motion:
    """The motion with frames at a constant rate per second, as .npz files have them."""
    count = max(1, round(motion.seconds * rate)) if motion.loops else cycle_frames(motion, rate) - 1
    times = np.arange(count + 1) / rate
    # The last frame of a loop is the first of the next cycle, so its length must be kept.
    length = motion.seconds if motion.loops else times[-1]
    poses = sample(motion, times * (length / times[-1]) if count else times)
    return replace(motion, times=times, poses=poses)


def frame_rate(motion: Motion) -> float:
    """Frames per second: the largest rate that occurs in the motion."""
    return float(1.0 / np.diff(motion.times).min())
