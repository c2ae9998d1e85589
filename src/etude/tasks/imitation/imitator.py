"""The humanoid of imitation: actions, resets, observations and errors from its reference.

Observations of the policy and of the discriminator, and lookup tables of the clips, come first.
"""

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
    BALLS,
    ENDS,
    HINGE_COLUMNS,
    HINGE_SPEED_COLUMNS,
    HINGES,
    NAMES,
    NUM_BODIES,
    NUM_POSE,
    NUM_SPEED,
)
from etude.envs.mujoco.playing import MotionPlayer
from etude.envs.mujoco.task import Action, Draws
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


_MOVED = tuple(NAMES[i] for i in (*BALLS, *HINGES))
_BODY_SHAPES = ((NUM_BODIES, 3), (NUM_BODIES, 4), (NUM_BODIES, 3), (NUM_BODIES, 3))
_FIGURE_SHAPES = ((NUM_POSE,), (NUM_SPEED,), (NUM_BODIES, 3))
NUM_ACTIONS = 3 * len(BALLS) + len(HINGES)


class Imitator(MotionPlayer, Action):
    """Actions: [num_envs, 28] in [-1, 1], rotation vectors of the ball joints, then hinge angles.

    Arrays are [num_envs] float64 unless stated otherwise.
    """

    size = NUM_ACTIONS

    def __init__(self, config: ImitationOptions) -> None:
        MotionPlayer.__init__(self, config.max_episode_steps, config.start, config.order)
        Action.__init__(self)
        self._config = config
        self.library = motion_library(config)
        frames = self.library.frames
        self._ball_targets, self._hinge_targets = servo_targets(frames, config.lead)
        # One table for values that are looked up together, in single precision (a micrometre here),
        # because the cost of a lookup is that of the copy.
        self._bodies = join(frames.position, frames.quaternion, frames.velocity, frames.spin)
        self._figures = join(*frames.figure)
        self._phases = phases(self.library)
        self.follow({})
        ahead = len(config.future)
        width = NUM_SELF + ahead * NUM_AHEAD + 2 * bool(ahead)
        self._initial_table = self._initial_observations(width)

    def bind(self) -> None:
        env, config = self.env, self._config
        num_envs = env.num_envs
        self._bind_simulation()
        self.bind_motions()
        self.observation: Array = np.zeros((num_envs, self._initial_table.shape[1]), np.float32)
        """[num_envs, n] float32: the policy's observation."""
        errors: Array = np.zeros((4, num_envs))
        self.position_error, self.turn_error, self.velocity_error, self.spin_error = errors
        """Mean squared errors over bodies: m^2, rad^2, (m/s)^2, (rad/s)^2."""
        self.mean_distance, self.largest_distance = np.zeros((2, num_envs))
        """Mean and maximum distance of bodies from the reference, m."""
        self.progress: Array = np.zeros(num_envs)
        """Elapsed fraction of the episode."""
        self.ended: Array = np.zeros(num_envs, np.bool_)
        """[num_envs] bool: terminated by distance or height."""
        if config.style_window:
            window = (config.style_window, NUM_STYLE)
            self.style = env.state("style", *window, dtype="float32")
            """[num_envs, window, n] float32: the discriminator's observation, newest frame last."""
            self._style_table = style(self.library.frames.figure)
        self.restored()

    def _bind_simulation(self) -> None:
        simulation = self.env.simulation
        model = simulation.model
        self.pose: Array = simulation.bind("qpos")
        """[num_envs, 43]: positions of the humanoid."""
        self.speed: Array = simulation.bind("qvel")
        """[num_envs, 34]: velocities of the humanoid."""
        self._control = simulation.bind("ctrl")
        at = {name: int(model.actuator_ctrladr[model.actuator(name).id]) for name in _MOVED}
        balls = [at[NAMES[i]] + k for i in BALLS for k in range(4)]
        # Index of each control in the targets of the balls followed by those of the hinges.
        self._control_order = np.argsort([*balls, *(at[NAMES[i]] for i in HINGES)])
        # Body 0 is the world.
        self.position: Array = simulation.bind("xpos")[:, 1:]
        """[num_envs, 15, 3] m: positions of the bodies."""
        self._quaternion = simulation.bind("xquat")[:, 1:]
        self._twist = simulation.bind("cvel")[:, 1:]
        self._center = simulation.bind("subtree_com")[:, 1:2]

    def _initial_observations(self, width: int) -> Array:
        """Observations [total, width] float32 of a humanoid that is exactly at each frame."""
        known, seen = self.library, np.zeros((len(self._phases), width), np.float32)
        motion = np.repeat(np.arange(known.num_motions), known.counts)
        time = np.arange(len(motion)) - known.starts[motion]
        figures = [known.frame(motion, time + n).figure for n in self._config.future]
        observe(known.frames.figure, figures, self._phases, seen)
        return seen

    def style_windows(self) -> Array:
        """All windows of the reference clips, [N, window, n] float32."""
        return style_windows(self._config)

    def style_motions(self) -> Array:
        """Index of the clip of each window, [N] int64."""
        return style_motions(self._config)

    def apply(self, actions: Array) -> None:
        num_envs = len(actions)
        turns = actions * np.float32(self._config.reach)
        balls = rot.exp(turns[:, : 3 * len(BALLS)].reshape(num_envs, -1, 3))
        hinges = turns[:, 3 * len(BALLS) :]
        if self._config.control == "residual":
            frames = self.frames_at(1)
            balls = rot.multiply(self._ball_targets.take(frames, axis=0), balls)
            hinges = hinges + self._hinge_targets.take(frames, axis=0)
        targets = np.concatenate([balls.reshape(num_envs, -1), hinges], axis=1)
        self._control[...] = targets[:, self._control_order]

    def update(self) -> None:
        config, frames = self._config, self.frames_at(0)
        now = Figure(*map(single, (self.pose, self.speed, self.position)))
        self._update_errors(now.position, *split(self._bodies.take(frames, axis=0), _BODY_SHAPES))
        np.divide(self.env.elapsed, self.episode_steps, out=self.progress)
        self.ended[:] = False
        if config.terminate_at is not None:
            self.ended |= self.largest_distance > config.terminate_at
        if config.terminate_mean is not None:
            self.ended |= self.mean_distance > config.terminate_mean
        if config.terminate_below is not None:
            self.ended |= self.pose[:, 2] < config.terminate_below
        if config.style_window:
            self.style[:, :-1] = self.style[:, 1:]
            self.style[:, -1] = style(now)
        self._update_observation(now)

    def _update_errors(
        self, own: Array, position: Array, quaternion: Array, velocity: Array, spin: Array
    ) -> None:
        """Update the errors of the bodies from their references, [num_envs, 15, ...] each."""
        twist = single(self._twist)
        own_spin = twist[:, :, :3]
        away = own - position
        away *= away
        squares = away[:, :, 0] + away[:, :, 1] + away[:, :, 2]
        np.divide(np.add.reduce(squares, axis=1), NUM_BODIES, out=self.position_error)
        distances = np.sqrt(squares, out=squares)
        np.divide(np.add.reduce(distances, axis=1), NUM_BODIES, out=self.mean_distance)
        # Reduced over the first axis: numpy takes five times as long along rows of 15 numbers.
        np.maximum.reduce(distances.T.copy(), axis=0, out=self.largest_distance)
        angles = rot.angle_between(single(self._quaternion), quaternion)
        np.divide(np.einsum("ij,ij->i", angles, angles), NUM_BODIES, out=self.turn_error)
        # MuJoCo's velocity of a body is that at the humanoid's centre of mass.
        faster = rot.cross(own_spin, rot.difference(own, single(self._center)))
        for i in range(3):
            faster[:, :, i] += twist[:, :, 3 + i]
        faster -= velocity
        turning = rot.difference(own_spin, spin)
        for change, out in ((faster, self.velocity_error), (turning, self.spin_error)):
            np.divide(np.einsum("ijk,ijk->i", change, change), NUM_BODIES, out=out)

    def _update_observation(self, now: Figure) -> None:
        """Update the observation."""
        ahead = [
            Figure(*split(self._figures.take(self.frames_at(n), axis=0), _FIGURE_SHAPES))
            for n in self._config.future
        ]
        observe(now, ahead, self._phases[self.frames_at(0)], self.observation)

    def reset(self, env_ids: Array, draws: Draws) -> None:
        known = self.library
        self.choose(env_ids, np.array([generator.random(2) for generator in draws.generators]))
        frames = self.first_frame[env_ids]
        self.pose[env_ids] = known.frames.pose[frames]
        self.speed[env_ids] = known.frames.speed[frames]

    def begin(self, env_ids: Array, draws: Draws) -> None:
        # An episode starts exactly at its reference: the observation is in a table.
        self.observation[env_ids] = self._initial_table[self.first_frame[env_ids]]
        if self._config.style_window:
            motion, start = self.motion[env_ids], self.start[env_ids]
            before = window_rows(self.library, motion, start, self._config.style_window)
            self.style[env_ids] = self._style_table[before]
