"""What pick-and-place measures: its view of the simulation, and terms as free functions of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.batch import Term, Terms
from etude.robots.kuka.scene import STROKE
from etude.tasks.pick_place.scene import CUBE_HALF, TABLE_CENTER

STAGES = ("reach", "align", "grasp", "carry", "place", "release", "clear")
"""Parts of the staged potential; each is a reward term."""

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

TENT = 0.05
"""How high above the table the cube is best carried, and above the cube the hand approaches, m."""
CLEAR = 0.06
"""How far from the cube's centre hand, palm and links count as away, m."""
_CORNER = CUBE_HALF * 3**0.5
"""How far from its centre the cube reaches: what is further away cannot touch it, m."""
LOW = 0.008
"""A cube no higher than this above the table counts as put down, m."""
_NEAR_TARGET = 0.03
"""What counts as near the target in an observation, m."""
_DROPPED = 0.02
"""Let go of from higher than this, a cube was dropped and not placed, m."""


@dataclass(frozen=True)
class PickPlaceView:
    """What the terms see. Live arrays, float64 where not said otherwise."""

    joint_position: Array
    """[rows, 7] rad."""
    hand: Array
    """[rows, 3] m: between the fingertips."""
    hand_velocity: Array
    """[rows, 3] m/s, over the last control step."""
    hand_yaw: Array
    """[rows] rad."""
    cube: Array
    """[rows, 3] m: the cube's centre."""
    cube_velocity: Array
    """[rows, 6] m/s and rad/s."""
    cube_yaw: Array
    """[rows] rad, of a horizontal edge: the same every quarter turn."""
    cube_level: Array
    """[rows]: 1 where a face points up."""
    target: Array
    """[rows, 3] m: where the cube's centre should rest."""
    opening: Array
    """[rows] m between the fingers."""
    command: Array
    """[rows]: the gripper command in force, 1 open or -1 closed."""
    touch: Array
    """[rows, 2] bool: a finger touches the cube."""
    offset: Array
    """[rows, 3] m from hand to cube."""
    distance: Array
    """[rows] m from hand to cube."""
    clearance: Array
    """[rows] m from the cube's centre to the nearest surface of palm and links."""
    height: Array
    """[rows] m of the cube above the table."""
    error: Array
    """[rows] m from cube to target, on the table."""
    held: Array
    """[rows] bool: both fingers press on the cube from opposite sides."""
    reached: Array
    """[rows] bool: the hand has been around the cube."""
    lifted: Array
    """[rows] bool: the cube has been off the table while held."""
    carried: Array
    """[rows] bool: lifted, and not left lying outside the target since."""
    placed: Array
    """[rows] bool: carried, and now down inside the target."""
    rested: Array
    """[rows]: consecutive control steps at rest in the target with the hand away."""
    success: Array
    """[rows] bool."""
    fallen: Array
    """[rows] bool: the cube has left the table."""
    drop: Array
    """[rows] m above the table when last held."""
    stages: Array
    """[rows, 7], each 0 to 1: see `STAGES`."""
    best_stages: Array
    """[rows, 7]: the most of each so far in this episode."""
    gains: Array
    """[rows, 7]: what each stage pays for the last control step."""
    action: Array
    """[rows, n] in [-1, 1]."""


def hand_position(view: PickPlaceView) -> Array:
    """From the middle of the table, [rows, 3] m."""
    position: Array = view.hand - TABLE_CENTER
    return position


def hand_velocity(view: PickPlaceView) -> Array:
    return view.hand_velocity


def hand_turn(view: PickPlaceView) -> Array:
    """Of twice the yaw, [rows, 2]: the fingers are alike, so half a turn changes nothing."""
    angle = 2.0 * view.hand_yaw
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def gripper(view: PickPlaceView) -> Array:
    """Opening (1 is open), command and the touch of each finger, [rows, 4]."""
    return np.stack([view.opening / STROKE, view.command, *view.touch.T], axis=1)


def cube_offset(view: PickPlaceView) -> Array:
    return view.offset


def cube_velocity(view: PickPlaceView) -> Array:
    return view.cube_velocity[:, :3]


def cube_turn(view: PickPlaceView) -> Array:
    """Four times the cube's yaw against the hand's, and how level the cube is, [rows, 3]."""
    angle = 4.0 * (view.cube_yaw - view.hand_yaw)
    return np.stack([np.cos(angle), np.sin(angle), view.cube_level], axis=1)


def target_offset(view: PickPlaceView) -> Array:
    """From cube to target, [rows, 3] m."""
    return view.target - view.cube


def at_target(view: PickPlaceView) -> Array:
    """1 where the cube lies on the target's middle, [rows, 1]; see `lies_at`."""
    return lies_at(target_offset(view))


def lies_at(offset: Array) -> Array:
    """[rows, 1] in [0, 1] of the offset [rows, 3] m from cube to target.

    Whether to let go is decided by millimetres of an offset that is decimetres large elsewhere.
    It is a function of the measured offset, not of what the success test remembers.
    """
    flat = (offset[:, :2] ** 2).sum(axis=1) / _NEAR_TARGET**2
    near: Array = np.exp(-flat - (offset[:, 2] / LOW) ** 2)
    return near[:, None]


def hand_to_target(view: PickPlaceView) -> Array:
    return view.target - view.hand


def progress(view: PickPlaceView) -> Array:
    """Whether the cube has been carried, and lies in the target; the best stages, [rows, 9].

    Success test and reward remember these, and no sensor tells them: they are for the value
    function alone.
    """
    flags = np.stack([view.carried, view.placed], axis=1)
    return np.concatenate([flags, view.best_stages], axis=1)


def joint_position(view: PickPlaceView) -> Array:
    return view.joint_position


def gentleness(view: PickPlaceView) -> Array:
    """[rows] 0 to 1: a half for a cube let go of 2 cm above the table.

    Discounting hurries a policy; without this it learns to throw.
    """
    gentle: Array = 1.0 / (1.0 + (view.drop / _DROPPED) ** 2)
    return gentle


def free(view: PickPlaceView) -> Array:
    """[rows] bool: no finger touches the cube, and neither palm nor links can."""
    untouched: Array = ~view.touch.any(axis=1) & (view.clearance > _CORNER)
    return untouched


def rate(view: PickPlaceView) -> Array:
    """The staged potential, [rows, 7]: a later stage counts only once the earlier are done."""
    held, placed, distance, error = view.held, view.placed, view.distance, view.error
    later = held | placed
    offset = view.offset
    # From above, so that open fingers come down on either side of the cube: the way still to go
    # to a path that is a hand's breadth over the cube until it is over its middle.
    flat = np.sqrt(offset[:, 0] ** 2 + offset[:, 1] ** 2)
    above = np.minimum(2.0 * np.maximum(flat - 0.01, 0.0), TENT)
    approach = flat + np.abs(offset[:, 2] + above)
    # Up, over and down: likewise along a tent over the table.
    way = error + np.abs(view.height - np.minimum(error, TENT))
    away = np.minimum(distance, view.clearance)
    around = np.exp(-((distance / CUBE_HALF) ** 2))
    open_share = view.opening / STROKE
    stages = np.empty((distance.size, len(STAGES)))
    stages[:, 0] = np.where(later, 1.0, 1.0 - np.tanh(6.0 * approach))
    stages[:, 1] = np.where(later, 1.0, 0.5 + 0.5 * np.cos(4.0 * (view.cube_yaw - view.hand_yaw)))
    stages[:, 2] = np.where(later, 1.0, 0.5 * around * (1.0 - open_share))
    stages[:, 3] = np.where(placed, 1.0, held * (1.0 - np.tanh(2.5 * way)))
    gently = placed * gentleness(view)
    stages[:, 4] = gently * (0.5 + 0.5 * np.exp(-((error / 0.015) ** 2)))
    stages[:, 5] = gently * open_share
    stages[:, 6] = gently * free(view) * np.minimum(away / CLEAR, 1.0)
    return stages


def _gain(index: int) -> Callable[[PickPlaceView], Array]:
    def term(view: PickPlaceView) -> Array:
        gain: Array = view.gains[:, index]
        return gain

    term.__doc__ = f"What the stage '{STAGES[index]}' pays."
    return term


def action_cost(view: PickPlaceView) -> Array:
    cost: Array = np.einsum("ij,ij->i", view.action, view.action) / view.action.shape[1]
    return cost


def success(view: PickPlaceView) -> Array:
    return view.success


def success_bonus(view: PickPlaceView) -> Array:
    return view.success * gentleness(view)


def fallen(view: PickPlaceView) -> Array:
    return view.fallen


def placement_error(view: PickPlaceView) -> Array:
    """m from the target, on the table."""
    return view.error


def drop_height(view: PickPlaceView) -> Array:
    """m above the table when the cube was last held; 0 where it never was."""
    return view.drop


def outcome(view: PickPlaceView) -> Array:
    """What became of the episode, as an index into `OUTCOMES`."""
    released, down = free(view), view.height < LOW
    kinds = [
        (view.success, "success"),
        (~view.reached, "never reached"),
        (~view.lifted, "reached but no grasp"),
        (view.fallen | (released & (view.drop > _DROPPED) & ~view.placed), "dropped"),
        (view.placed & ~released, "not released"),
        (released & down & ~view.placed, "placed wrong"),
    ]
    return np.select(
        [mask for mask, _ in kinds],
        [float(OUTCOMES.index(kind)) for _, kind in kinds],
        float(OUTCOMES.index("out of time")),
    )


STATE: dict[str, Term[PickPlaceView]] = {
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
CRITIC: dict[str, Term[PickPlaceView]] = {"progress": progress}
"""The observation "critic": what only a value function may read."""


def pick_place_terms(joints: bool) -> Terms[PickPlaceView]:
    """joints: whether the joint angles are observed too, as joint control needs them."""
    return Terms(
        observations={
            "state": {**STATE, **({"joints": joint_position} if joints else {})},
            "critic": CRITIC,
        },
        rewards={
            **{name: _gain(index) for index, name in enumerate(STAGES)},
            "action_cost": action_cost,
            "success": success_bonus,
            "fallen": fallen,
        },
        terminations={"success": success, "fallen": fallen},
        success=success,
        statistics={
            "placement_error": placement_error,
            "drop_height": drop_height,
            "outcome": outcome,
        },
        outcomes=OUTCOMES,
    )
