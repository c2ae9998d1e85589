"""Reach: hold the hand of a KUKA iiwa 14 at a random point, by joint control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from etude.core.config import Config
from etude.core.contracts import ActionSpec, Array
from etude.envs.mujoco.batch import Camera, MujocoConfig, MujocoTask, Simulation, Term, Terms
from etude.robots.kuka.scene import HAND_SITE, arm_table, kuka_spec

TIMESTEP = 0.01
HOME = (0.0, 0.38, 0.0, -1.28, 0.0, 1.48, 0.0)
"""Joint angles at the start, rad: the hand points down, in the middle of the box."""
BOX_CENTER = (0.55, 0.0, 0.45)
"""The middle of the box of targets, m."""
_SHARPNESS = -50.0
"""Of the precision term, 1/m: 2 cm, the default tolerance."""


class ReachReward(Config):
    """Weights of the reward terms."""

    progress: float = Field(10.0, description="Per metre the hand came closer to the target.")
    precision: float = Field(2.0, description="For coming within a few centimetres: 0 to 1.")
    hold: float = Field(1.0, description="For the share of the holding time gained or lost.")
    action_cost: float = Field(-0.01, description="Per unit of mean squared action.")
    success: float = Field(5.0, description="Once, when the target has been held.")


class ReachConfig(MujocoConfig):
    """Hold the hand near a random point; actions are joint motions, without inverse kinematics."""

    demonstration: ClassVar[str] = "etude.tasks.reach.demonstration:DemonstratedReach"

    kind: Literal["reach"] = "reach"
    box_side: float = Field(0.4, gt=0, le=0.5, description="Side of the box of targets, m.")
    tolerance: float = Field(0.02, gt=0, description="How close the hand must be, m.")
    hold_steps: int = Field(5, ge=1, description="Consecutive control steps to hold the target.")
    min_distance: float = Field(
        0.05, gt=0, description="Least distance from hand to target at the start, m."
    )
    start_jitter: float = Field(
        0.1, ge=0, le=0.3, description="Largest random offset of each joint at the start, rad."
    )
    speed: float = Field(
        0.4, gt=0, le=1, description="Largest joint speed an action asks for, share of the limit."
    )
    substeps: int = Field(10, ge=1, description="Physics steps of 10 ms per control step.")
    max_episode_steps: int = Field(50, ge=1, description="Control steps before time runs out.")
    shown_steps: int | None = Field(
        None,
        ge=1,
        description="The target is shown only in the first so many steps, in which the arm is "
        "held still; None shows it always.",
    )
    reward: ReachReward = Field(ReachReward(), description="Weights of the reward terms.")

    @model_validator(mode="after")
    def _leaves_time_to_move(self) -> ReachConfig:
        if self.shown_steps is not None and self.shown_steps >= self.max_episode_steps:
            raise ValueError(
                f"env.shown_steps {self.shown_steps} must be less than env.max_episode_steps "
                f"{self.max_episode_steps}: the arm is held still in them"
            )
        return self

    def build(self, num_envs: int, threads: int = 1) -> Reach:
        return Reach(self, num_envs, threads)


@dataclass(frozen=True)
class ReachView:
    """What the terms see. Live arrays, float64."""

    joint_position: Array
    """[rows, 7] rad."""
    joint_velocity: Array
    """[rows, 7] rad/s."""
    hand: Array
    """[rows, 3] m."""
    action: Array
    """[rows, 7] in [-1, 1]: the last one."""
    target: Array
    """[rows, 3] m."""
    offset: Array
    """[rows, 3] m, from hand to target."""
    distance: Array
    """[rows] m, from hand to target."""
    closeness: Array
    """[rows]: exp(-distance / 2 cm)."""
    held: Array
    """[rows]: consecutive control steps within tolerance."""
    shown: Array
    """[rows, 1] bool: whether the observation has the target."""
    distance_change: Array
    """[rows] m, over the last control step; likewise the two below."""
    closeness_change: Array
    held_change: Array
    hold_steps: int


def _norm(vectors: Array, out: Array | None = None) -> Array:
    """Length [rows] of vectors [rows, n]."""
    length: Array = np.sqrt(np.einsum("ij,ij->i", vectors, vectors), out=out)
    return length


def joint_position(view: ReachView) -> Array:
    return view.joint_position


def joint_velocity(view: ReachView) -> Array:
    return view.joint_velocity


def hand_position(view: ReachView) -> Array:
    return view.hand


def target_position(view: ReachView) -> Array:
    return view.target


def target_offset(view: ReachView) -> Array:
    return view.offset


def target_distance(view: ReachView) -> Array:
    return view.distance[:, None]


def hold_share(view: ReachView) -> Array:
    """How much of the holding time has passed, 0 to 1."""
    return view.held[:, None] / view.hold_steps


def progress(view: ReachView) -> Array:
    """Metres closer than before; over an episode it adds up to the distance covered."""
    return -view.distance_change


def precision(view: ReachView) -> Array:
    """Gain in closeness: still has a slope where progress is down to millimetres."""
    return view.closeness_change


def hold(view: ReachView) -> Array:
    """Share of the holding time gained, or lost on leaving; lingering near the edge earns 0."""
    return view.held_change / view.hold_steps


def action_cost(view: ReachView) -> Array:
    cost: Array = np.einsum("ij,ij->i", view.action, view.action) / view.action.shape[1]
    return cost


def success(view: ReachView) -> Array:
    return view.held >= view.hold_steps


def distance(view: ReachView) -> Array:
    return view.distance


TERMS: Terms[ReachView] = Terms(
    observations={
        "state": {
            "joint_position": joint_position,
            "joint_velocity": joint_velocity,
            "hand_position": hand_position,
            "target_position": target_position,
            "target_offset": target_offset,
            "target_distance": target_distance,
            "hold_share": hold_share,
        }
    },
    rewards={
        "progress": progress,
        "precision": precision,
        "hold": hold,
        "action_cost": action_cost,
        "success": success,
    },
    terminations={"success": success},
    success=success,
    statistics={"final_distance": distance},
)


def while_shown(term: Term[ReachView]) -> Term[ReachView]:
    """The term where the target is shown, 0 elsewhere."""

    def shown(view: ReachView) -> Array:
        # A product would keep the sign, as -0.
        return np.where(view.shown, term(view), 0.0)

    return shown


_OF_TARGET = ("target_position", "target_offset", "target_distance", "hold_share")
"""Observations that depend on the target: with `hold_share` alone one could feel one's way."""
MEMORY_TERMS = replace(
    TERMS,
    observations={
        "state": {
            name: while_shown(term) if name in _OF_TARGET else term
            for name, term in TERMS.observations["state"].items()
        },
        # For a value function, which is no part of what acts, the target is never hidden.
        "critic": {name: TERMS.observations["state"][name] for name in _OF_TARGET},
    },
)


class Reach(MujocoTask[ReachView]):
    """Actions: [rows, 7] in [-1, 1], joint targets relative to where the joints are.

    One unit asks for the configured share of the joint's speed limit: the servo moves towards a
    target `step` away at up to step * stiffness / damping = step / 0.1 s, and a control step
    lasts 0.1 s.

    With `shown_steps` it is a task of memory: while the target is shown actions do nothing, cost
    nothing and nothing counts as held, so neither pose nor velocity can carry the target on.
    """

    shot = Camera(look_at=(0.3, 0.0, 0.45), distance=1.5, azimuth=125.0, elevation=-20.0, floor=0.0)

    def __init__(self, config: ReachConfig, num_envs: int, threads: int = 1) -> None:
        table = arm_table()
        simulation = Simulation(
            kuka_spec(fingers="locked", timestep=TIMESTEP).compile(), num_envs, threads
        )
        joints = len(table.names)
        self._config = config
        self._control = simulation.bind("ctrl")
        self._joint = simulation.bind("qpos")
        self._low, self._high = table.range[:, 0].copy(), table.range[:, 1].copy()
        self._scale = table.speed * (config.speed * TIMESTEP * config.substeps)
        self._home = np.array(HOME)
        self._corner = np.array(BOX_CENTER) - config.box_side / 2
        # One array for the three potentials the reward is the change of.
        self._potentials = np.zeros((3, num_envs))
        self._changes = np.zeros((3, num_envs))
        view = ReachView(
            joint_position=self._joint,
            joint_velocity=simulation.bind("qvel"),
            hand=simulation.site(HAND_SITE),
            action=np.zeros((num_envs, joints)),
            target=np.zeros((num_envs, 3)),
            offset=np.zeros((num_envs, 3)),
            distance=self._potentials[0],
            closeness=self._potentials[1],
            held=self._potentials[2],
            shown=np.ones((num_envs, 1), np.bool_),
            distance_change=self._changes[0],
            closeness_change=self._changes[1],
            held_change=self._changes[2],
            hold_steps=config.hold_steps,
        )
        super().__init__(
            simulation,
            view,
            TERMS if config.shown_steps is None else MEMORY_TERMS,
            weights=config.reward.model_dump(),
            action=ActionSpec("box", low=(-1.0,) * joints, high=(1.0,) * joints),
            substeps=config.substeps,
            max_episode_steps=config.max_episode_steps,
        )

    def _act(self, actions: Array) -> None:
        self.view.action[:] = actions
        if self._config.shown_steps is not None:
            # Multiplied and not overwritten, so that a NaN is still found.
            free = self._elapsed >= self._config.shown_steps
            np.multiply(self.view.action, free[:, None], out=self.view.action)
        target = self._joint + self.view.action * self._scale
        np.maximum(target, self._low, out=target)
        np.minimum(target, self._high, out=self._control)

    def _measure(self) -> None:
        view = self.view
        np.negative(self._potentials, out=self._changes)
        np.subtract(view.target, view.hand, out=view.offset)
        _norm(view.offset, out=view.distance)
        np.exp(np.multiply(view.distance, _SHARPNESS, out=view.closeness), out=view.closeness)
        np.add(view.held, 1.0, out=view.held)
        np.multiply(view.held, view.distance <= self._config.tolerance, out=view.held)
        if self._config.shown_steps is not None:
            # The step just made was a free one if more than the shown ones have passed.
            np.multiply(view.held, self._elapsed > self._config.shown_steps, out=view.held)
            np.less(self._elapsed, self._config.shown_steps, out=view.shown[:, 0])
        np.add(self._changes, self._potentials, out=self._changes)

    def _place(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        draws = np.array([generator.random(self._home.size) for generator in generators])
        start = self._home + (draws * 2.0 - 1.0) * self._config.start_jitter
        self._joint[rows] = start
        self._control[rows] = start

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        view = self.view
        hand = view.hand[rows]
        draws = np.array([generator.random(3) for generator in generators])
        offset = draws * self._config.box_side + self._corner - hand
        away = _norm(offset)
        while (near := away < self._config.min_distance).any():
            for index in np.flatnonzero(near).tolist():
                draw = generators[index].random(3)
                offset[index] = draw * self._config.box_side + self._corner - hand[index]
            away = _norm(offset)
        view.target[rows] = hand + offset
        view.offset[rows] = offset
        view.distance[rows] = away
        view.closeness[rows] = np.exp(away * _SHARPNESS)
        view.held[rows] = 0.0
        view.shown[rows] = True

    def _memory(self) -> dict[str, Array]:
        # What the next step reads before it writes; the rest of the view follows from these.
        view = self.view
        return {
            "target": view.target,
            "distance": view.distance,
            "closeness": view.closeness,
            "held": view.held,
        }
