"""What pick-and-place observes, rewards and reports: functions of its arm."""

from __future__ import annotations

from functools import wraps

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.task import Draws, Part, Term, measured
from etude.envs.robots.kuka.scene import STROKE
from etude.tasks.pick_place.arm import (
    DROPPED,
    LOW,
    NEAR_TARGET,
    STAGES,
    PickPlaceArm,
    free,
    gentleness,
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
"""What became of an episode, by the number in the statistic `outcome`."""


@measured("m")
def hand_position(arm: PickPlaceArm) -> Array:
    """From the middle of the table, [num_envs, 3] m."""
    position: Array = arm.hand - TABLE_CENTER
    return position


@measured("m/s")
def hand_velocity(arm: PickPlaceArm) -> Array:
    """Over the last control step."""
    return arm.hand_velocity


@measured("1")
def hand_turn(arm: PickPlaceArm) -> Array:
    """Of twice the yaw, [num_envs, 2]: the fingers are alike, so half a turn changes nothing."""
    angle = 2.0 * arm.hand_yaw
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


@measured("1")
def gripper(arm: PickPlaceArm) -> Array:
    """Opening (1 is open), command and the touch of each finger, [num_envs, 4]."""
    return np.stack([arm.opening / STROKE, arm.command, *arm.touch.T], axis=1)


@measured("m")
def cube_offset(arm: PickPlaceArm) -> Array:
    """From the hand to the cube's centre."""
    return arm.offset


@measured("m/s")
def cube_velocity(arm: PickPlaceArm) -> Array:
    """Of the cube's centre, along the world's axes."""
    return arm.cube_velocity[:, :3]


@measured("1")
def cube_turn(arm: PickPlaceArm) -> Array:
    """Four times the cube's yaw against the hand's, and how level the cube is, [num_envs, 3]."""
    angle = 4.0 * (arm.cube_yaw - arm.hand_yaw)
    return np.stack([np.cos(angle), np.sin(angle), arm.cube_level], axis=1)


@measured("m")
def target_offset(arm: PickPlaceArm) -> Array:
    """From cube to target, [num_envs, 3] m."""
    return arm.target - arm.cube


@measured("1")
def at_target(arm: PickPlaceArm) -> Array:
    """1 where the cube lies on the target's middle, [num_envs, 1]: of its offset (x, y, z) from it
    exp(-(x^2 + y^2) / near_target^2 - (z / low)^2)."""
    return lies_at(target_offset(arm))


def lies_at(offset: Array) -> Array:
    """[num_envs, 1] in [0, 1] of the offset [num_envs, 3] m from cube to target.

    Whether to let go is decided by millimetres of an offset that is decimetres large elsewhere.
    It is a function of the measured offset, not of what the success test remembers.
    """
    flat = (offset[:, :2] ** 2).sum(axis=1) / NEAR_TARGET**2
    near: Array = np.exp(-flat - (offset[:, 2] / LOW) ** 2)
    return near[:, None]


@measured("m")
def hand_to_target(arm: PickPlaceArm) -> Array:
    """From the hand to the target."""
    return arm.target - arm.hand


def progress(arm: PickPlaceArm) -> Array:
    """Whether the cube has been carried, and lies in the target; the best stages, [num_envs, 9].

    Success test and reward remember these, and no sensor tells them: they are for the value
    function alone.
    """
    flags = np.stack([arm.carried, arm.placed], axis=1)
    return np.concatenate([flags, arm.best_stages], axis=1)


@measured("rad")
def joint_position(arm: PickPlaceArm) -> Array:
    """In the order of the joints."""
    return arm.joint_position


def _gain(index: int) -> Term:
    def term(arm: PickPlaceArm) -> Array:
        gain: Array = arm.gains[:, index]
        return gain

    term.__doc__ = f"What the stage '{STAGES[index]}' pays."
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
    """m from the target, on the table."""
    found: Array = arm.error
    return found


def drop_height(arm: PickPlaceArm) -> Array:
    """m above the table when the cube was last held; 0 where it never was."""
    return arm.drop


def outcome(arm: PickPlaceArm) -> Array:
    """What became of the episode, as an index into `OUTCOMES`."""
    released, down = free(arm), arm.height < LOW
    kinds = [
        (arm.success, "success"),
        (~arm.reached, "never reached"),
        (~arm.lifted, "reached but no grasp"),
        (arm.fallen | (released & (arm.drop > DROPPED) & ~arm.placed), "dropped"),
        (arm.placed & ~released, "not released"),
        (released & down & ~arm.placed, "placed wrong"),
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
"""The observation "state", in this order."""
_WIDTHS = (3, 3, 2, 4, 3, 3, 3, 3, 3, 1)
SLICES = {
    name: slice(sum(_WIDTHS[:index]), sum(_WIDTHS[: index + 1])) for index, name in enumerate(STATE)
}
"""Where each part of "state" is."""
CRITIC: dict[str, Term] = {"progress": progress}
"""The observation "critic": what only a value function may read."""

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
    """Measured positions of cube and target are off by normal noise of a standard deviation, m.

    Each measurement is disturbed once: all that an observation says of the two positions is derived
    from the same disturbed numbers. So no part of an observation can be used to average the noise
    of another away. The hand is exact, as joint encoders are.
    """

    def __init__(self, size: float) -> None:
        self._size = size

    def bind(self) -> None:
        self._noise = self.env.state("noise", 2, 6)
        """[num_envs, (now, a step ago), (cube, target)] m."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        # A cube that was never seen before is taken to be still.
        self._noise[env_ids] = self._size * draws.normal("noise", 6)[:, None]

    def update(self) -> None:
        self._noise[:, 1] = self._noise[:, 0]
        self._noise[:, 0] = self._size * self.env.draws.normal("noise", 6)

    def observations(self) -> dict[str, Term]:
        """The terms of "state" that tell of the two positions, as measured."""

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
