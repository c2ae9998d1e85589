"""Pick and place: a KUKA iiwa 14 grasps a cube by friction, carries it and puts it down.

Actions go to the controller without scripts or attachments. For a success the cube must have been
lifted between two pressing fingers, and rest released in the target, with fingers, palm and links
away from it. A scripted expert demonstrates the task and tests its physics.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import ClassVar

import numpy as np

from etude.core.contracts import Array, Observations
from etude.core.errors import UsageError
from etude.envs.mujoco.simulation import Camera
from etude.envs.mujoco.task import Demonstration, Draws, Group, Task
from etude.envs.robots.kuka import STROKE
from etude.tasks.pick_place import terms
from etude.tasks.pick_place.arm import STAGES, TENT, PickPlaceArm
from etude.tasks.pick_place.scene import (
    CONTROL_SECONDS,
    REST_HEIGHT,
    TABLE_CENTER,
    PickPlaceOptions,
    scene_spec,
)
from etude.tasks.pick_place.terms import SLICES, PositionNoise

HOVER = 0.055
"""Height above the cube at which the hand stops before it descends, m."""
_GAIN = 1.5
"""Gain on displacements: the arm moves by 63 % of a commanded one in a control step."""
_CLOSING_STEPS = 10
"""Control steps after which a grasp without contact is given up."""


class Phase(IntEnum):
    """Phase of the script."""

    APPROACH = 0
    DESCEND = 1
    CLOSE = 2
    CARRY = 3
    LOWER = 4
    OPEN = 5
    RETREAT = 6


class PickPlaceExpert:
    """Runs one script per environment."""

    def __init__(self, config: PickPlaceOptions, num_envs: int) -> None:
        if config.control == "joint":
            raise UsageError('The expert moves the hand: set control to "hand" or "hand-turn".')
        self._config = config
        self.phase = np.zeros(num_envs, np.int64)
        """[num_envs]: current `Phase`."""
        self._waited = np.zeros(num_envs, np.int64)

    def reset(self, env_ids: Array) -> None:
        """Start new episodes in environments [k]."""
        self.phase[env_ids] = Phase.APPROACH
        self._waited[env_ids] = 0

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, n] float32 for the observations after the last step."""
        seen = {name: obs["state"][:, part].astype(np.float64) for name, part in SLICES.items()}
        turn = np.arctan2(seen["cube_turn"][:, 1], seen["cube_turn"][:, 0]) / 4.0
        self._advance(seen, turn)
        phase = self.phase
        move = self._moves(seen)
        config = self._config
        actions = np.zeros((phase.size, 5 if config.control == "hand-turn" else 4))
        actions[:, :3] = move * (_GAIN / config.reach_step)
        # Shortened as a whole, so that it keeps its direction.
        longest = np.abs(actions[:, :3]).max(axis=1, keepdims=True)
        actions[:, :3] /= np.maximum(longest, 1.0)
        if config.control == "hand-turn":
            turning = phase <= Phase.DESCEND
            actions[:, 3] = np.clip(turning * turn * (_GAIN / config.turn_step), -1.0, 1.0)
        closed = (phase >= Phase.CLOSE) & (phase <= Phase.LOWER)
        actions[:, -1] = np.where(closed, -1.0, 1.0)
        return actions.astype(np.float32)

    def _advance(self, seen: dict[str, Array], turn: Array) -> None:
        """Move each environment to the phase that follows from its observation."""
        phase, offset, target = self.phase, seen["cube_offset"], seen["target_offset"]
        flat, error = np.hypot(offset[:, 0], offset[:, 1]), np.hypot(target[:, 0], target[:, 1])
        height = -target[:, 2]
        touch = seen["gripper"][:, 2:] > 0.5
        opening = seen["gripper"][:, 0] * STROKE
        aligned = np.abs(turn) < 0.05 if self._config.control == "hand-turn" else turn < np.inf
        lost = ~touch.any(axis=1)
        rules = (
            (Phase.APPROACH, Phase.DESCEND, (flat < 0.01) & aligned),
            (Phase.DESCEND, Phase.CLOSE, (flat < 0.006) & (np.abs(offset[:, 2]) < 0.006)),
            (Phase.CLOSE, Phase.CARRY, touch.all(axis=1) & (self._waited >= 3)),
            (Phase.CLOSE, Phase.APPROACH, self._waited >= _CLOSING_STEPS),
            (Phase.CARRY, Phase.LOWER, error < 0.004),
            (Phase.LOWER, Phase.OPEN, height < 0.0015),
            (Phase.CARRY, Phase.APPROACH, lost),
            (Phase.LOWER, Phase.APPROACH, lost),
            (Phase.OPEN, Phase.RETREAT, lost & (opening > 0.06)),
        )
        after = phase.copy()
        for one, next_phase, when in rules:
            after[(phase == one) & (after == one) & when] = next_phase
        self._waited[:] = np.where(after == phase, self._waited + 1, 0)
        phase[:] = after

    def _moves(self, seen: dict[str, Array]) -> Array:
        """Displacements [num_envs, 3] m of the hand."""
        phase, offset, target = self.phase, seen["cube_offset"], seen["target_offset"]
        up = np.array([0.0, 0.0, 1.0])
        hover = offset + HOVER * up
        # Move horizontally only after the cube is lifted.
        height = -target[:, 2:]
        carry = np.where(height > 0.5 * TENT, target, 0.0)
        carry[:, 2] = TENT - height[:, 0]
        still = np.zeros_like(offset)
        by_phase = np.stack([hover, offset, still, carry, target, still, still + 0.1 * up])
        moves: Array = by_phase[phase, np.arange(phase.size)]
        return moves


class PickPlaceDemonstration(Demonstration):
    """Progress is the gain of the staged potential, from its initial value to 1."""

    has_gripper = True

    def bind(self) -> None:
        weights = np.array([getattr(self.config.reward, name) for name in STAGES])
        self._shares: Array = weights / weights.sum() if weights.sum() > 0 else weights + 1 / 7
        self._first_potential = self.env.state("first_potential")

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self._first_potential[env_ids] = (self.view.stages @ self._shares)[env_ids]

    def progress(self) -> Array:
        start = self._first_potential
        gain = (self.view.stages @ self._shares - start) / (1.0 - start)
        return np.where(self.view.success, 1.0, gain)

    def proprioception(self) -> tuple[Array, ...]:
        felt = (terms.hand_position, terms.hand_velocity, terms.hand_turn, terms.gripper)
        return tuple(term(self.view) for term in felt)

    def expert(self) -> PickPlaceExpert:
        return PickPlaceExpert(self.config, self.env.num_envs)


CAMERA = Camera(
    look_at=(0.5, 0.0, 0.22),
    distance=1.5,
    azimuth=145.0,
    elevation=-30.0,
    floor=0.0,
    target="disc",
    target_sink=REST_HEIGHT - float(TABLE_CENTER[2]),
)
PICTURE_CAMERA = replace(
    CAMERA, look_at=(0.58, 0.0, 0.17), distance=0.6, azimuth=180.0, elevation=-55.0
)
"""Camera of the image observation, close to the table: a cube is 7 of 84 pixels wide."""


class PickPlaceConfig(PickPlaceOptions):
    """Pick up a cube by friction and place it at a target."""

    demonstration: ClassVar[type[Demonstration] | None] = PickPlaceDemonstration

    def define(self) -> Task:
        arm, weights = PickPlaceArm(self), self.reward.model_dump()
        state, parts = dict(terms.STATE), self.random.parts()
        if self.control == "joint":
            state["joints"] = terms.joint_position
        if self.random.observation_noise:
            noise = PositionNoise(self.random.observation_noise)
            state |= noise.observations()
            parts.append(noise)
        return Task(
            model=scene_spec(CONTROL_SECONDS / self.substeps, self.cone, self.integrator),
            action=arm,
            view=arm,
            parts=parts,
            observations={
                "state": Group(state, delay=(0, self.random.observation_delay)),
                "critic": terms.CRITIC,
            },
            rewards={name: (term, weights[name]) for name, term in terms.REWARDS.items()},
            terminations={"success": terms.success, "fallen": terms.fallen},
            success=terms.success,
            statistics=terms.STATISTICS,
            outcomes=terms.OUTCOMES,
            substeps=self.substeps,
            max_episode_steps=self.max_episode_steps,
            camera=replace(CAMERA, target_radius=self.radius),
            picture_camera=replace(PICTURE_CAMERA, target_radius=self.radius),
        )
