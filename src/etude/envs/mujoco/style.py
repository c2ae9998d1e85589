"""Windows of a robot's motion for a discriminator, and those of its reference motions."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import rotations as rot
from etude.data.motion.library import MotionLibrary
from etude.envs.mujoco.reference import ReferenceMotion
from etude.envs.mujoco.task import Draws, Part

_FINER = 4
"""Frames of the reference per control step, by interpolation."""


class StyleWindow(Part):
    """The last `length` frames of a robot's motion, as a discriminator compares them with its
    reference (`etude.core.contracts.StyleReference`).

    A frame is described by the root's height, axes and velocities, the positions of the motion's
    `ends` from the root, and the joints with their velocities, independent of place and heading.
    The part comes after the motion.
    """

    def __init__(self, motion: ReferenceMotion, length: int) -> None:
        self._motion, self._length = motion, length

    def bind(self) -> None:
        frames = self._motion.library.frames
        self._table = self._features(frames.pose, frames.speed, frames.position)
        self.frames = self.env.state("style", self._length, self._table.shape[1], dtype="float32")
        """[num_envs, length, n] float32, newest frame last."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        motion = self._motion
        rows = self._rows(motion.library, motion.motion[env_ids], motion.start[env_ids])
        self.frames[env_ids] = self._table[rows]

    def update(self) -> None:
        motion = self._motion
        self.frames[:, :-1] = self.frames[:, 1:]
        self.frames[:, -1] = self._features(motion.pose, motion.speed, motion.position)

    def _features(self, pose: Array, speed: Array, position: Array) -> Array:
        """[frames, n] float32 of poses [frames, nq], velocities [frames, nv] and bodies [frames,
        bodies, 3]."""
        motion, robot = self._motion, self._motion.robot
        root, count = pose[:, 3:7], len(pose)
        cosine, sine = rot.heading_free(root)
        vectors = np.concatenate(
            [
                rot.two_axes(root).reshape(count, 2, 3),
                speed[:, None, :3],
                rot.rotate(root, speed[:, 3:6])[:, None],
                position[:, motion.ends] - pose[:, None, :3],
            ],
            axis=1,
        )
        parts = (
            pose[:, 2],
            rot.turn(vectors, cosine[:, None], sine[:, None]),
            rot.two_axes(pose[:, robot.ball_qpos_ids]),
            pose[:, robot.qpos_ids],
            speed[:, motion.dof_ids],
        )
        columns = [part.reshape(count, -1) for part in parts]
        return np.concatenate(columns, axis=1).astype(np.float32)

    def _rows(self, library: MotionLibrary, motion: Array, time: Array, apart: int = 1) -> Array:
        """Rows [n, length] in the library of the windows that end at times [n] of motions [n].

        Before its start a looping motion continues with the end of its cycle, and others repeat
        their first frame. apart: distance of the frames of a window in the library.
        """
        before = time[:, None] - apart * np.arange(self._length - 1, -1, -1)
        looped = before % library.cycles[motion][:, None]
        earlier = np.where(library.loops[motion][:, None], looped, 0)
        return library.rows(motion[:, None], np.where(before < 0, earlier, before))

    def _windows(self, finer: int) -> tuple[Array, Array]:
        """Windows [n, length, features] that end in each frame at `finer` times the control rate,
        and their motions [n]."""
        library = self._motion.library_at(finer, 1)
        motion = np.repeat(np.arange(library.num_motions), library.cycles)
        time = np.concatenate([np.arange(count) for count in library.cycles])
        frames = library.frames
        table = self._features(frames.pose, frames.speed, frames.position)
        return table[self._rows(library, motion, time, finer)], motion

    def style_windows(self) -> Array:
        """[n, length, features] float32: all windows of the reference, at frames and at fractions
        of frames: a discriminator would memorise a few dozen windows, and reject all others."""
        return np.concatenate([self._windows(finer)[0] for finer in (1, _FINER)])

    def style_motions(self) -> Array:
        """[n] int64: index of the motion of each of `style_windows`."""
        return np.concatenate([self._windows(finer)[1] for finer in (1, _FINER)])
