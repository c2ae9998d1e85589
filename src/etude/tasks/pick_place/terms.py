"""Observation, reward and statistics terms of pick-and-place."""

from __future__ import annotations

from functools import wraps

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.task import Draws, Part, Term, measured
from etude.envs.robots.kuka import STROKE
from etude.tasks.pick_place.arm import (
    DROPPED,
    LOW,
    NEAR_TARGET,
    STAGES,
    PickPlaceArm,
    gentleness,
    released,
)
from etude.tasks.pick_place.scene import CONTROL_SECONDS, TABLE_CENTER

OUTCOMES = (
    "success",
    "never reached",
    "reached but no grasp",
    "dropped",
    "placed wrong",
    "not released",
    "out of time",
)
"""Names of the values of the statistic `outcome`."""


@measured("m")
def hand_position(arm: PickPlaceArm) -> Array:
    """[num_envs, 3] m: position of the hand from the middle of the table."""
    position: Array = arm.hand - TABLE_CENTER
    return position


@measured("m/s")
def hand_velocity(arm: PickPlaceArm) -> Array:
    """[num_envs, 3] m/s: mean velocity of the hand over the last control step."""
    return arm.hand_velocity


@measured("1")
def hand_turn(arm: PickPlaceArm) -> Array:
    """[num_envs, 2]: cosine and sine of twice the hand's yaw, as the gripper is symmetric by half
    turns."""
    angle = 2.0 * arm.hand_yaw
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


@measured("1")
def gripper(arm: PickPlaceArm) -> Array:
    """[num_envs, 4]: opening (1 is open), command, and contact of each finger with the cube."""
    return np.stack([arm.opening / STROKE, arm.command, *arm.touch.T], axis=1)


@measured("m")
def cube_offset(arm: PickPlaceArm) -> Array:
    """[num_envs, 3] m: position of the cube's centre from the hand."""
    return arm.offset


@measured("m/s")
def cube_velocity(arm: PickPlaceArm) -> Array:
    """[num_envs, 3] m/s: velocity of the cube's centre in the world frame."""
    return arm.cube_velocity[:, :3]


@measured("1")
def cube_turn(arm: PickPlaceArm) -> Array:
    """[num_envs, 3]: cosine and sine of four times the cube's yaw from the hand's; 1 if the cube is
    level."""
    angle = 4.0 * (arm.cube_yaw - arm.hand_yaw)
    return np.stack([np.cos(angle), np.sin(angle), arm.cube_level], axis=1)


@measured("m")
def target_offset(arm: PickPlaceArm) -> Array:
    """[num_envs, 3] m: position of the target from the cube."""
    return arm.target - arm.cube


@measured("1")
def at_target(arm: PickPlaceArm) -> Array:
    """[num_envs, 1]: exp(-(x^2 + y^2) / near_target^2 - (z / low)^2) of the offset (x, y, z) from
    cube to target, 1 in the middle of the target."""
    return lies_at(target_offset(arm))


def lies_at(offset: Array) -> Array:
    """Closeness [num_envs, 1] in [0, 1] for offsets [num_envs, 3] m from cube to target.

    The decision to release depends on millimetres of an offset that can be decimetres. This is a
    function of the measured offset, and independent of the state of the success test.
    """
    flat = (offset[:, :2] ** 2).sum(axis=1) / NEAR_TARGET**2
    near: Array = np.exp(-flat - (offset[:, 2] / LOW) ** 2)
    return near[:, None]


@measured("m")
def hand_to_target(arm: PickPlaceArm) -> Array:
    """[num_envs, 3] m: position of the target from the hand."""
    return arm.target - arm.hand


def progress(arm: PickPlaceArm) -> Array:
    """[num_envs, 9]: whether the cube was carried, whether it is placed, and the best stages.

    They are state of the success test and the reward that no sensor measures: only the value
    function reads them.
    """
    flags = np.stack([arm.carried, arm.placed], axis=1)
    return np.concatenate([flags, arm.best_stages], axis=1)


@measured("rad")
def joint_position(arm: PickPlaceArm) -> Array:
    """[num_envs, 7] rad: joint positions."""
    return arm.joint_position


def _gain(index: int) -> Term:
    def term(arm: PickPlaceArm) -> Array:
        gain: Array = arm.gains[:, index]
        return gain

    term.__doc__ = f"Gain of the stage '{STAGES[index]}'."
    return term


def action_cost(arm: PickPlaceArm) -> Array:
    action = arm.env.action
    cost: Array = np.einsum("ij,ij->i", action, action) / action.shape[1]
    return cost


def success(arm: PickPlaceArm) -> Array:
    return arm.success


def success_bonus(arm: PickPlaceArm) -> Array:
    return arm.success * gentleness(arm)


def fallen(arm: PickPlaceArm) -> Array:
    return arm.fallen


def placement_error(arm: PickPlaceArm) -> Array:
    """[num_envs] m: distance from cube to target on the table."""
    found: Array = arm.error
    return found


def drop_height(arm: PickPlaceArm) -> Array:
    """[num_envs] m: height of the cube when it was last held; 0 if it never was."""
    return arm.drop


def outcome(arm: PickPlaceArm) -> Array:
    """[num_envs]: outcome of the episode, an index into `OUTCOMES`."""
    is_free, down = released(arm), arm.height < LOW
    kinds = [
        (arm.success, "success"),
        (~arm.reached, "never reached"),
        (~arm.lifted, "reached but no grasp"),
        (arm.fallen | (is_free & (arm.drop > DROPPED) & ~arm.placed), "dropped"),
        (arm.placed & ~is_free, "not released"),
        (is_free & down & ~arm.placed, "placed wrong"),
    ]
    return np.select(
        [mask for mask, _ in kinds],
        [float(OUTCOMES.index(kind)) for _, kind in kinds],
        float(OUTCOMES.index("out of time")),
    )


STATE: dict[str, Term] = {
    "hand_position": hand_position,
    "hand_velocity": hand_velocity,
    "hand_turn": hand_turn,
    "gripper": gripper,
    "cube_offset": cube_offset,
    "cube_velocity": cube_velocity,
    "cube_turn": cube_turn,
    "target_offset": target_offset,
    "hand_to_target": hand_to_target,
    "at_target": at_target,
}
"""Terms of the observation "state", in this order."""
_WIDTHS = (3, 3, 2, 4, 3, 3, 3, 3, 3, 1)
SLICES = {
    name: slice(sum(_WIDTHS[:index]), sum(_WIDTHS[: index + 1])) for index, name in enumerate(STATE)
}
"""Slice of each term in "state"."""
CRITIC: dict[str, Term] = {"progress": progress}
"""Terms of the observation "critic", which only the value function reads."""

REWARDS: dict[str, Term] = {
    **{name: _gain(index) for index, name in enumerate(STAGES)},
    "action_cost": action_cost,
    "success": success_bonus,
    "fallen": fallen,
}
STATISTICS: dict[str, Term] = {
    "placement_error": placement_error,
    "drop_height": drop_height,
    "outcome": outcome,
}


class PositionNoise(Part):
    """Normal noise of the measured positions of cube and target; `size`: standard deviation, m.

    All terms of an observation that depend on a position use the same noisy measurement, so that a
    policy cannot average the noise away. The position of the hand has no noise, as it follows from
    the joint encoders.
    """

    def __init__(self, size: float) -> None:
        self._size = size

    def bind(self) -> None:
        self._noise = self.env.state("noise", 2, 6)
        """[num_envs, (current, previous step), (cube xyz, target xyz)] m."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        # Equal noise in both steps: the first measured velocity is that of the cube.
        self._noise[env_ids] = self._size * draws.normal("noise", 6)[:, None]

    def update(self) -> None:
        self._noise[:, 1] = self._noise[:, 0]
        self._noise[:, 0] = self._size * self.env.draws.normal("noise", 6)

    def observations(self) -> dict[str, Term]:
        """The terms of "state" that depend on the two positions, with noise."""

        def cube() -> Array:
            return self._noise[:, 0, :3]

        def target() -> Array:
            return self._noise[:, 0, 3:]

        def measured_offset(arm: PickPlaceArm) -> Array:
            offset: Array = target_offset(arm) + (target() - cube())
            return offset

        noisy: dict[str, Term] = {
            "cube_offset": lambda arm: cube_offset(arm) + cube(),
            "cube_velocity": lambda arm: (
                cube_velocity(arm) + (cube() - self._noise[:, 1, :3]) / CONTROL_SECONDS
            ),
            "target_offset": measured_offset,
            "hand_to_target": lambda arm: hand_to_target(arm) + target(),
            "at_target": lambda arm: lies_at(measured_offset(arm)),
        }
        return {name: wraps(STATE[name])(term) for name, term in noisy.items()}
