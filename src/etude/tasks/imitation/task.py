"""Imitation: a simulated humanoid moves like the people in recorded clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator

from etude.core.config import Config
from etude.core.contracts import ActionSpec, Array, Observations
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.envs.mujoco.batch import MujocoConfig, MujocoTask, Simulation
from etude.metrics.declared import Curve, Metric, Metrics
from etude.motion import clips, library
from etude.motion import rotations as rot
from etude.motion.library import Figure, MotionLibrary
from etude.motion.skeleton import (
    BALLS,
    HINGES,
    NAMES,
    NUM_BODIES,
    NUM_POSE,
    NUM_SPEED,
)
from etude.robots.humanoid import CAMERA, CONTROL_RATE, Physics, humanoid, substeps
from etude.tasks.imitation import features
from etude.tasks.imitation.tables import aims, join, phases, single, split
from etude.tasks.imitation.terms import (
    ErrorMeter,
    ImitationView,
    empty_view,
    imitation_terms,
)

_LAST_START = 10
"""Frames that a clip which does not loop has left at least, at a random start."""
_BETWEEN = 4
"""Moments of a frame at which windows for a judge of style may begin."""
_MOVED = tuple(NAMES[i] for i in (*BALLS, *HINGES))
_BODY_SHAPES = ((NUM_BODIES, 3), (NUM_BODIES, 4), (NUM_BODIES, 3), (NUM_BODIES, 3))
_FIGURE_SHAPES = ((NUM_POSE,), (NUM_SPEED,), (NUM_BODIES, 3))
NUM_ACTIONS = 3 * len(BALLS) + len(HINGES)


class ImitationReward(Config):
    """Weights of the reward terms, each 0 to 1."""

    position: float = Field(0.5, description="Bodies are where they are in the clip.")
    turn: float = Field(0.3, description="They are turned as in the clip.")
    velocity: float = Field(0.1, description="They move as fast, and the same way.")
    spin: float = Field(0.1, description="They turn as fast, and the same way.")
    effort: float = Field(0.0, le=0, description="Per unit of mean squared action.")


class ImitationConfig(MujocoConfig):
    """A humanoid follows clips of recorded motion; actions are joint rotations for its servos."""

    metrics: ClassVar[Metrics] = (
        Metric("eval/mpjpe_l", "mpjpe_l, mm", ".1f", curve=Curve(4, "bright_green", (0, None))),
    )
    kind: Literal["imitation"] = "imitation"
    clips: tuple[str, ...] = Field(("walk",), description="Names of clips, or all.")
    folder: str | None = Field(
        None, description="Where the clips are; None: those that come with pybullet."
    )
    start: Literal["random", "first"] = Field(
        "random", description="Frame of the clip that an episode begins with."
    )
    order: Literal["drawn", "in turn"] = Field(
        "drawn", description="Clips are drawn anew for each episode, or row r plays the r-th."
    )
    control: Literal["residual", "absolute"] = Field(
        "residual", description="Actions turn joints from the clip's pose, or from the rest pose."
    )
    lead: float = Field(
        0.1, ge=0, description="How far ahead the clip's pose is aimed at, s: the servos' own lag."
    )
    reach: float = Field(0.5, gt=0, description="How far a unit action turns a joint, rad.")
    terminate_at: float | None = Field(
        0.4, gt=0, description="An episode ends when any body is so far off, m; None: never."
    )
    terminate_mean: float | None = Field(
        None, gt=0, description="An episode ends when bodies are so far off on average, m."
    )
    terminate_below: float | None = Field(
        None, description="An episode ends when the root is lower than this, m."
    )
    max_episode_steps: int = Field(300, ge=1, description="Control steps of 1/30 s at most.")
    evaluation_steps: int = Field(300, ge=1, description="Likewise when looping clips are judged.")
    future: tuple[int, ...] = Field(
        (1,), description="Frames of the clip that are observed, counted from now; () for none."
    )
    style_window: int = Field(
        0, ge=0, description='Frames of the observation "style", for a judge of it; 0: none.'
    )
    measure: bool = Field(False, description="Report the errors of each episode in mm.")
    physics: Physics = Field(
        "fast", description="checked: smaller steps, another integrator, limited torques."
    )
    reward: ImitationReward = Field(ImitationReward(), description="Weights of the terms.")
    sharpness: float = Field(
        1.0, gt=0, description="How fast the reward falls with distances; less leads from farther."
    )

    @field_validator("clips")
    @classmethod
    def _some(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or len(set(names)) < len(names):
            raise ValueError("name at least one clip, and each only once")
        return names

    @field_validator("future")
    @classmethod
    def _ahead(cls, offsets: tuple[int, ...]) -> tuple[int, ...]:
        if any(offset < 0 for offset in offsets):
            raise ValueError("frames of the future are counted from now, 0 or more")
        return offsets

    def for_evaluation(self) -> Self:
        """Row r plays clip r from its first frame, is let go astray further, and is measured.

        Where no distance ends an episode the clip is not tracked: none ends it here either, and
        it may begin where it does in training.
        """
        tracks = self.terminate_at is not None or self.terminate_mean is not None
        return self.model_copy(
            update={
                "start": "first" if tracks else self.start,
                "order": "in turn",
                "terminate_at": None,
                "terminate_mean": 0.5 if tracks else None,
                "max_episode_steps": self.evaluation_steps,
                "measure": True,
            }
        )

    def build(self, num_envs: int, threads: int = 1) -> Imitation:
        return Imitation(self, num_envs, threads)


def motion_library(config: ImitationConfig, finer: int = 1) -> MotionLibrary:
    """The config's clips at the control rate, or a finer one, for as long as an episode takes."""
    ahead = max(config.future, default=0)
    found = clips.load(config.clips, config.folder)
    frames = config.max_episode_steps + ahead + 1
    return library.build(found, finer * CONTROL_RATE, finer * frames)


def style_windows(config: ImitationConfig) -> Array:
    """[N, window, n] float32: every window of the reference clips, newest frame last.

    They are what the observation "style" shows of a figure that moves exactly as its clip, and of
    one that does so a fraction of a frame later: a judge that knows a few dozen windows by heart
    would call all others false.
    """
    window, between = config.style_window, _BETWEEN
    finer = features.reference_windows(motion_library(config, between), window, between)
    return np.concatenate([features.reference_windows(motion_library(config), window), finer])


def style_motions(config: ImitationConfig) -> Array:
    """[N] int64: the clip that each of `style_windows` is of."""
    libraries = motion_library(config), motion_library(config, _BETWEEN)
    return np.concatenate([np.repeat(np.arange(x.num_motions), x.cycles) for x in libraries])


class Imitation(MujocoTask[ImitationView]):
    """Actions: [rows, 28] in [-1, 1], rotation vectors of the ball joints, then hinge angles."""

    aims = False
    shot = CAMERA

    def __init__(self, config: ImitationConfig, num_envs: int, threads: int = 1) -> None:
        self._config = config
        self.library = motion_library(config)
        simulation = Simulation(humanoid(config.physics), num_envs, threads)
        self._bind(simulation)
        frames = self.library.frames
        self._ball_aims, self._hinge_aims = aims(frames, config.lead)
        # One table for what is looked up together, in single precision, which is a micrometre
        # here: a lookup costs as much as what it copies.
        self._bodies = join(frames.position, frames.quaternion, frames.velocity, frames.spin)
        self._figures = join(*frames.figure)
        self._phases = phases(self.library)
        self._start = np.zeros(num_envs, np.int64)
        self._first_frame = np.zeros(num_envs, np.int64)
        self._last_frame = np.zeros(num_envs, np.int64)
        self._limits = np.full(num_envs, config.max_episode_steps)
        self._set_chances(np.ones(self.library.num_motions))
        ahead = len(config.future)
        width = features.NUM_SELF + ahead * features.NUM_AHEAD + 2 * bool(ahead)
        self._seen = np.zeros((num_envs, width), np.float32)
        self._first_sights = self._look_ahead(width)
        view = empty_view(num_envs)
        self._motion = view.motion
        self._find_frames(np.arange(num_envs))
        self._meter = ErrorMeter(view, num_envs, NUM_BODIES) if config.measure else None
        self._style: Array | None = None
        if config.style_window:
            self._style = np.zeros((num_envs, config.style_window, features.NUM_STYLE), np.float32)
            self._style_table = features.style(frames.figure)
        super().__init__(
            simulation,
            view,
            imitation_terms(
                config.terminate_at,
                config.terminate_mean,
                config.terminate_below,
                config.sharpness,
                config.measure,
            ),
            weights=config.reward.model_dump(),
            action=ActionSpec("box", low=(-1.0,) * NUM_ACTIONS, high=(1.0,) * NUM_ACTIONS),
            substeps=substeps(config.physics),
            max_episode_steps=self._longest(),
        )
        self._limit = self._limits
        self.spec = replace(self.spec, motions=self.library.names)

    def reference_pose(self, row: int, step: int) -> Array:
        """[43] the clip's pose so many steps after the start of a row's episode."""
        frame = self.library.rows(self._motion[row], self._start[row] + step)
        pose: Array = self.library.frames.pose[frame]
        return pose

    def _look_ahead(self, width: int) -> Array:
        """[total, width] float32: the observation of a figure that is where each frame has it."""
        known, seen = self.library, np.zeros((len(self._phases), width), np.float32)
        motion = np.repeat(np.arange(known.num_motions), known.counts)
        time = np.arange(len(motion)) - known.starts[motion]
        figures = [known.frame(motion, time + n).figure for n in self._config.future]
        features.observe(known.frames.figure, figures, self._phases, seen)
        return seen

    def follow(self, curriculum: Tree) -> None:
        """Draw the clips of episodes to come by the curriculum's weights; evenly without any."""
        count = self.library.num_motions
        weights = np.asarray(curriculum.get("weights", np.ones(count)), np.float64)
        if weights.shape != (count,) or not (weights >= 0).all() or not weights.sum() > 0:
            raise UsageError(f"A curriculum over {count} clips needs as many weights, 0 or more.")
        self._set_chances(weights)

    def style_windows(self) -> Array:
        """Every window of the reference clips, [N, window, n] float32."""
        return style_windows(self._config)

    def style_motions(self) -> Array:
        """[N] int64: the clip that each window is of."""
        return style_motions(self._config)

    def _set_chances(self, weights: Array) -> None:
        self._chances = np.cumsum(weights) / weights.sum()

    def _bind(self, simulation: Simulation) -> None:
        model = simulation.model
        self._pose, self._speed = simulation.bind("qpos"), simulation.bind("qvel")
        self._control = simulation.bind("ctrl")
        at = {name: int(model.actuator_ctrladr[model.actuator(name).id]) for name in _MOVED}
        balls = [at[NAMES[i]] + k for i in BALLS for k in range(4)]
        # Where each control comes from, among the balls' numbers and then the hinges'.
        self._control_order = np.argsort([*balls, *(at[NAMES[i]] for i in HINGES)])
        # Body 0 is the world.
        self._position, self._quaternion = (simulation.bind(n)[:, 1:] for n in ("xpos", "xquat"))
        self._twist, self._center = (
            simulation.bind("cvel")[:, 1:],
            simulation.bind("subtree_com")[:, 1:2],
        )

    def _longest(self) -> int:
        """Control steps of the longest episode."""
        return int(
            self._steps_from(np.arange(self.library.num_motions), np.zeros(1, np.int64)).max()
        )

    def _steps_from(self, motion: Array, start: Array) -> Array:
        """[k] steps of episodes of motions [k] from frames [k]."""
        most, known = self._config.max_episode_steps, self.library
        left = known.cycles[motion] - 1 - start
        if self._config.order == "drawn":
            left = np.minimum(left, most)
        steps: Array = np.where(known.loops[motion], most, left)
        return steps

    def _act(self, actions: Array) -> None:
        np.divide(np.einsum("ij,ij->i", actions, actions), NUM_ACTIONS, out=self.view.effort)
        turns = actions * np.float32(self._config.reach)
        balls = rot.exp(turns[:, : 3 * len(BALLS)].reshape(self.num_envs, -1, 3))
        hinges = turns[:, 3 * len(BALLS) :]
        if self._config.control == "residual":
            rows = self._rows_at(1)
            balls = rot.multiply(self._ball_aims.take(rows, axis=0), balls)
            hinges = hinges + self._hinge_aims.take(rows, axis=0)
        told = np.concatenate([balls.reshape(self.num_envs, -1), hinges], axis=1)
        self._control[...] = told[:, self._control_order]

    def _rows_at(self, ahead: int | Array) -> Array:
        """[rows] where the library has the frames so many steps from now."""
        frames: Array = np.minimum(self._first_frame + self._elapsed + ahead, self._last_frame)
        return frames

    def _find_frames(self, rows: Array) -> None:
        """Note where the library has the first and last frames of the episodes in rows [k]."""
        known, motion = self.library, self._motion[rows]
        self._first_frame[rows] = known.starts[motion] + self._start[rows]
        self._last_frame[rows] = known.starts[motion] + known.counts[motion] - 1

    def _measure(self) -> None:
        view, rows = self.view, self._rows_at(0)
        now = Figure(*map(single, (self._pose, self._speed, self._position)))
        self._compare(now.position, *split(self._bodies.take(rows, axis=0), _BODY_SHAPES))
        np.divide(self._elapsed, self._limits, out=view.progress)
        view.height[:] = self._pose[:, 2]
        view.ended[:] = False
        for ends in self._terms.terminations.values():
            np.logical_or(view.ended, ends(view), out=view.ended)
        if self._meter is not None:
            known = self.library
            cycles = np.where(known.loops[self._motion], known.cycles[self._motion], self._limits)
            self._meter.add(self._position, known.frames.position[rows], self._elapsed, cycles)
            begun = known.frames.pose[self._rows_at(-self._elapsed)]
            view.travelled[:] = np.linalg.norm(self._pose[:, :2] - begun[:, :2], axis=1)
        if self._style is not None:
            self._style[:, :-1] = self._style[:, 1:]
            self._style[:, -1] = features.style(now)
        self._see(now)

    def _compare(
        self, own: Array, position: Array, quaternion: Array, velocity: Array, spin: Array
    ) -> None:
        """Bodies of the figures against those of their references, [rows, 15, ...] each."""
        view, twist = self.view, single(self._twist)
        own_spin = twist[:, :, :3]
        away = own - position
        away *= away
        squares = away[:, :, 0] + away[:, :, 1] + away[:, :, 2]
        np.divide(np.add.reduce(squares, axis=1), NUM_BODIES, out=view.position_error)
        distances = np.sqrt(squares, out=squares)
        np.divide(np.add.reduce(distances, axis=1), NUM_BODIES, out=view.mean_distance)
        # Body by body: along a row of 15 numbers numpy takes five times as long.
        np.maximum.reduce(distances.T.copy(), axis=0, out=view.largest_distance)
        angles = rot.angle_between(single(self._quaternion), quaternion)
        np.divide(np.einsum("ij,ij->i", angles, angles), NUM_BODIES, out=view.turn_error)
        # MuJoCo gives the velocity at the figure's centre of mass, as if it were part of a body.
        faster = rot.cross(own_spin, rot.difference(own, single(self._center)))
        for i in range(3):
            faster[:, :, i] += twist[:, :, 3 + i]
        faster -= velocity
        turning = rot.difference(own_spin, spin)
        for change, out in ((faster, view.velocity_error), (turning, view.spin_error)):
            np.divide(np.einsum("ijk,ijk->i", change, change), NUM_BODIES, out=out)

    def _see(self, now: Figure) -> None:
        """Bring the observation of all rows up to date."""
        ahead = [
            Figure(*split(self._figures.take(self._rows_at(n), axis=0), _FIGURE_SHAPES))
            for n in self._config.future
        ]
        features.observe(now, ahead, self._phases[self._rows_at(0)], self._seen)

    def _observe(self) -> Observations:
        shown = {"state": self._seen.copy()}
        if self._style is None:
            return shown
        shown["style"] = self._style.copy()
        if self.library.num_motions > 1:
            shown["motion"] = self._motion[:, None].astype(np.float32)
        return shown

    def _place(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        config, known = self._config, self.library
        draws = np.array([generator.random(2) for generator in generators])
        if config.order == "in turn":
            motion = rows % known.num_motions
        else:
            motion = np.searchsorted(self._chances, draws[:, 0], side="right")
        self._motion[rows] = motion
        starts = np.where(
            known.loops[motion], known.cycles[motion], known.cycles[motion] - _LAST_START
        )
        first = config.start == "first"
        self._start[rows] = 0 if first else draws[:, 1] * np.maximum(starts, 1)
        self._limits[rows] = self._steps_from(motion, self._start[rows])
        self._find_frames(rows)
        frames = self._first_frame[rows]
        self._pose[rows], self._speed[rows] = known.frames.pose[frames], known.frames.speed[frames]

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        # An episode begins on its reference, and what that looks like is known.
        frames = self._first_frame[rows]
        self._seen[rows] = self._first_sights[frames]
        if self._meter is not None:
            position = self.library.frames.position[frames]
            self._meter.begin(rows, position, position)
        if self._style is not None:
            motion, start = self._motion[rows], self._start[rows]
            before = features.window_rows(self.library, motion, start, self._style.shape[1])
            self._style[rows] = self._style_table[before]

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot, on any instance with as many rows."""
        super().restore(snapshot, key)
        self._find_frames(np.arange(self.num_envs))

    def _memory(self) -> dict[str, Array]:
        # The rest of the view follows from these and from the simulation.
        memory = {"motion": self._motion, "start": self._start, "limit": self._limits}
        if self._meter is not None:
            memory |= self._meter.memory()
        if self._style is not None:
            memory["style"] = self._style
        return memory
