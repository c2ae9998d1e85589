"""What an imitating policy and a judge of style are shown: pure functions of moments of motion."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array
from etude.motion import rotations as rot
from etude.motion.library import Frames, MotionLibrary
from etude.motion.skeleton import BALL_COLUMNS, ENDS, HINGE_COLUMNS, NUM_BODIES

NUM_JOINT_SPEEDS = 28
NUM_SELF = 1 + 6 + 6 + 3 * (NUM_BODIES - 1) + NUM_JOINT_SPEEDS
"""Numbers about the figure itself."""
NUM_AHEAD = 3 * NUM_BODIES + 3 + NUM_JOINT_SPEEDS + 6 + NUM_JOINT_SPEEDS
"""Numbers about one moment of the reference."""
NUM_STYLE = (
    1 + 6 + 6 + 6 * len(BALL_COLUMNS) + len(HINGE_COLUMNS) + NUM_JOINT_SPEEDS + 3 * len(ENDS)
)
"""Numbers of one moment for a judge of style."""


class Facing:
    """The frame of the figure's heading: turns vectors of its rows [n] so that it faces x."""

    def __init__(self, root: Array) -> None:
        """root: [n, 4] quaternions."""
        self._cosine, self._sine = rot.heading_free(root)

    def __call__(self, vectors: Array) -> Array:
        """[n, 3] or [n, k, 3]."""
        if vectors.ndim == 2:
            return rot.turn(vectors, self._cosine, self._sine)
        return rot.turn(vectors, self._cosine[:, None], self._sine[:, None])

    def axes(self, root: Array) -> Array:
        """[n, 6]: where the root's x and z axes point."""
        axes = rot.two_axes(root).reshape(-1, 2, 3)
        return self(axes).reshape(-1, 6)


def root_motion(now: Frames, facing: Facing, out: Array) -> None:
    """Height, orientation, linear and angular velocity of the root into out [n, 13]."""
    root = now.pose[:, 3:7]
    out[:, 0] = now.pose[:, 2]
    out[:, 1:7] = facing.axes(root)
    out[:, 7:10] = facing(now.speed[:, :3])
    out[:, 10:13] = facing(rot.rotate(root, now.speed[:, 3:6]))


def observe(now: Frames, ahead: list[Frames], phase: Array, out: Array) -> None:
    """All that a policy reads into out [n, NUM_SELF + len(ahead) * NUM_AHEAD + 2]; float32.

    now: the figure; ahead: the reference at later moments, as differences from the figure now;
    phase: [n, 2]. Without moments ahead there is no phase either: nothing tells of the reference.
    """
    facing = Facing(now.pose[:, 3:7])
    root_motion(now, facing, out[:, :13])
    bodies = facing(now.position[:, 1:] - now.position[:, :1])
    out[:, 13 : 13 + bodies[0].size] = bodies.reshape(len(bodies), -1)
    out[:, NUM_SELF - NUM_JOINT_SPEEDS : NUM_SELF] = now.speed[:, 6:]
    at = NUM_SELF
    if not ahead:
        return
    inverse = _inverse_rotations(now.pose)
    for then in ahead:
        _observe_ahead(now, then, inverse, facing, out[:, at : at + NUM_AHEAD])
        at += NUM_AHEAD
    out[:, at:] = phase


def _inverse_rotations(pose: Array) -> Array:
    """[n, 9, 4]: those of the ball joints and, last, of the root."""
    return rot.conjugate(_rotations(pose))


def _rotations(pose: Array) -> Array:
    return pose[:, _ROTATION_COLUMNS]


_ROTATION_COLUMNS = np.concatenate([BALL_COLUMNS, [[3, 4, 5, 6]]])


def _observe_ahead(now: Frames, then: Frames, inverse: Array, facing: Facing, out: Array) -> None:
    """How the reference differs from the figure, into out [n, NUM_AHEAD]."""
    rows = len(out)
    out[:, :45] = facing(then.position - now.position).reshape(rows, -1)
    turns = rot.log(rot.multiply(inverse, _rotations(then.pose)))
    out[:, 45:72] = turns.reshape(rows, -1)
    out[:, 72:76] = then.pose[:, HINGE_COLUMNS] - now.pose[:, HINGE_COLUMNS]
    np.subtract(then.speed[:, 6:], now.speed[:, 6:], out=out[:, 76:104], casting="same_kind")
    out[:, 104:107] = facing(then.speed[:, :3] - now.speed[:, :3])
    out[:, 107:110] = then.speed[:, 3:6] - now.speed[:, 3:6]


def style(now: Frames) -> Array:
    """[n, NUM_STYLE] float32: a moment of motion, wherever it is and whichever way it faces."""
    rows = len(now.pose)
    out = np.empty((rows, NUM_STYLE), np.float32)
    facing = Facing(now.pose[:, 3:7])
    root_motion(now, facing, out[:, :13])
    balls = 13 + 6 * len(BALL_COLUMNS)
    hinges = balls + len(HINGE_COLUMNS)
    speeds = hinges + NUM_JOINT_SPEEDS
    out[:, 13:balls] = rot.two_axes(now.pose[:, BALL_COLUMNS]).reshape(rows, -1)
    out[:, balls:hinges] = now.pose[:, HINGE_COLUMNS]
    out[:, hinges:speeds] = now.speed[:, 6:]
    out[:, speeds:] = facing(now.position[:, ENDS] - now.position[:, :1]).reshape(rows, -1)
    return out


def window_rows(library: MotionLibrary, motion: Array, time: Array, window: int) -> Array:
    """[n, window] int64: frames of the library up to and with times [n] of motions [n].

    What came before the start of a looping clip is the end of its cycle, as the features of a
    moment do not depend on where it happens; another clip has stood still in its first frame.
    """
    before = time[:, None] - np.arange(window - 1, -1, -1)
    earlier = np.where(library.loops[motion][:, None], before % library.cycles[motion][:, None], 0)
    return library.rows(motion[:, None], np.where(before < 0, earlier, before))


def reference_windows(library: MotionLibrary, window: int) -> Array:
    """[N, window, NUM_STYLE] float32: the window that ends in each frame of each motion."""
    motion = np.repeat(np.arange(library.num_motions), library.cycles)
    time = np.concatenate([np.arange(count) for count in library.cycles])
    windows: Array = style(library.frames)[window_rows(library, motion, time, window)]
    return windows
