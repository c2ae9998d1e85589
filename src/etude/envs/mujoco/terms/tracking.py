"""Terms of tasks that track a `ReferenceMotion`: observations, rewards and terminations.

Observations accept the keywords noise, clip, scale, delay and history. Vectors are in the frame of
the robot's anchor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import rotations as rot
from etude.envs.mujoco.reference import ReferenceMotion, SelfContacts
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Function, Observation, Term
from etude.envs.mujoco.terms.observations import as_term


def anchor_position(motion: ReferenceMotion, ahead: int = 0, **pipeline: Any) -> Observation:
    """[num_envs, 3] m: from the anchor to that of the reference, `ahead` steps from now."""

    def term(_: object) -> Array:
        own, at = motion.position, motion.anchor
        away = motion.ahead(ahead).position[:, at] - own[:, at]
        return rot.rotate(rot.conjugate(motion.quaternion[:, at]), away)

    return as_term(
        term, "m", "from the anchor to that of the reference, in its frame", None, pipeline
    )


def anchor_orientation(motion: ReferenceMotion, ahead: int = 0, **pipeline: Any) -> Observation:
    """[num_envs, 6]: the x and z axes of the reference's anchor, `ahead` steps from now."""

    def term(_: object) -> Array:
        at = motion.anchor
        wanted = motion.ahead(ahead).quaternion[:, at]
        return rot.two_axes(rot.multiply(rot.conjugate(motion.quaternion[:, at]), wanted))

    return as_term(
        term, "1", "x and z axes of the reference's anchor, in its frame", None, pipeline
    )


def joint_errors(motion: ReferenceMotion, ahead: int = 0, **pipeline: Any) -> Observation:
    """[num_envs, joints] rad or m: the reference `ahead` steps from now, less the position; of ball
    joints rotation vectors."""
    return as_term(
        lambda _: motion.joint_errors(ahead),
        "rad or m",
        "the reference less the joint positions",
        None,
        pipeline,
    )


def joint_velocities(motion: ReferenceMotion, ahead: int = 0, **pipeline: Any) -> Observation:
    """[num_envs, joints] rad/s or m/s: of the reference, `ahead` steps from now."""

    def term(_: object) -> Array:
        found: Array = motion.ahead(ahead).speed[:, motion.dof_ids]
        return found

    return as_term(term, "rad/s or m/s", "joint velocities of the reference", None, pipeline)


def phase(motion: ReferenceMotion, **pipeline: Any) -> Observation:
    """[num_envs, 2]: sine and cosine of the motion's phase."""
    return as_term(lambda _: motion.phase, "1", "sine and cosine of the phase", None, pipeline)


def body_positions(motion: ReferenceMotion, **pipeline: Any) -> Observation:
    """[num_envs, 3 bodies] m: positions of the bodies from the anchor."""

    def term(_: object) -> Array:
        own, at = motion.position, motion.anchor
        back = rot.conjugate(motion.quaternion[:, at])[:, None]
        return rot.rotate(back, own - own[:, at, None]).reshape(len(own), -1)

    return as_term(
        term, "m", "positions of the bodies from the anchor, in its frame", None, pipeline
    )


def body_orientations(motion: ReferenceMotion, **pipeline: Any) -> Observation:
    """[num_envs, 6 bodies]: the x and z axes of the bodies."""

    def term(_: object) -> Array:
        own = motion.quaternion
        back = rot.conjugate(own[:, motion.anchor])[:, None]
        return rot.two_axes(rot.multiply(back, own)).reshape(len(own), -1)

    return as_term(term, "1", "x and z axes of the bodies, in the anchor's frame", None, pipeline)


def body_errors(motion: ReferenceMotion, **pipeline: Any) -> Observation:
    """[num_envs, 3 bodies] m: from the bodies to the reference with the same anchor."""

    def term(_: object) -> Array:
        away = motion.aligned[0] - motion.position
        back = rot.conjugate(motion.quaternion[:, motion.anchor])[:, None]
        return rot.rotate(back, away).reshape(len(away), -1)

    return as_term(
        term, "m", "from the bodies to the reference, in the anchor's frame", None, pipeline
    )


def _near(error: Function, std: float) -> Term:
    """exp(-error / std^2) of a mean squared error [num_envs]."""
    return lambda view: np.exp(-error(view) / std**2)


def _mean_square(difference: Array) -> Array:
    """[num_envs]: mean over bodies of the squared lengths of [num_envs, bodies, 3]."""
    squares = np.einsum("nbi,nbi->n", difference, difference)
    mean: Array = squares / difference.shape[1]
    return mean


def _mean_square_angle(one: Array, two: Array) -> Array:
    """[num_envs] rad^2: mean over bodies of the squared angles between [num_envs, bodies, 4]."""
    angles = rot.angle_between(one, two)
    mean: Array = np.einsum("nb,nb->n", angles, angles) / angles.shape[1]
    return mean


def track_anchor_position(motion: ReferenceMotion, std: float) -> Term:
    """exp(-error^2 / std^2) of the anchor's position in the world, std in m."""

    def error(_: object) -> Array:
        at = [motion.anchor]
        return _mean_square(motion.position[:, at] - motion.wanted.position[:, at])

    return _near(error, std)


def track_anchor_orientation(motion: ReferenceMotion, std: float) -> Term:
    """exp(-error^2 / std^2) of the anchor's orientation in the world, std in rad."""

    def error(_: object) -> Array:
        at = [motion.anchor]
        return _mean_square_angle(motion.quaternion[:, at], motion.wanted.quaternion[:, at])

    return _near(error, std)


def track_positions(motion: ReferenceMotion, std: float, aligned: bool = True) -> Term:
    """exp(-error^2 / std^2) of the bodies' positions, std in m.

    aligned: without the errors of the anchor's horizontal position and heading.
    """

    def error(_: object) -> Array:
        wanted = motion.aligned[0] if aligned else motion.wanted.position
        return _mean_square(motion.position - wanted)

    return _near(error, std)


def track_orientations(motion: ReferenceMotion, std: float, aligned: bool = True) -> Term:
    """exp(-error^2 / std^2) of the bodies' orientations, std in rad; see `track_positions`."""

    def error(_: object) -> Array:
        wanted = motion.aligned[1] if aligned else motion.wanted.quaternion
        return _mean_square_angle(motion.quaternion, wanted)

    return _near(error, std)


def track_velocities(motion: ReferenceMotion, std: float) -> Term:
    """exp(-error^2 / std^2) of the bodies' velocities, std in m/s."""
    return _near(lambda _: _mean_square(motion.velocity - motion.wanted.velocity), std)


def track_spins(motion: ReferenceMotion, std: float) -> Term:
    """exp(-error^2 / std^2) of the bodies' angular velocities, std in rad/s."""
    return _near(lambda _: _mean_square(motion.spin - motion.wanted.spin), std)


def joint_limits(robot: Robot, share: float = 0.9) -> Term:
    """Sum over joints of the distance beyond `share` of their ranges, rad or m."""

    def term(_: object) -> Array:
        low, high = robot.joint_range.T
        width = high - low
        margin = np.where(np.isfinite(width), width, 0.0) * (1.0 - share) / 2
        joints = robot.joint_positions + robot.default_joints
        beyond: Array = np.maximum(low + margin - joints, 0.0)
        beyond += np.maximum(joints - high + margin, 0.0)
        total: Array = beyond.sum(axis=1)
        return total

    return term


def self_contacts(contacts: SelfContacts) -> Term:
    """Number of contacts of the robot with itself."""
    return lambda _: contacts.count


def anchor_height_off(motion: ReferenceMotion, distance: float) -> Term:
    """Whether the anchor's height differs from the reference by more than `distance` (m)."""

    def term(_: object) -> Array:
        at = motion.anchor
        off: Array = np.abs(motion.position[:, at, 2] - motion.wanted.position[:, at, 2]) > distance
        return off

    return term


def anchor_tilt_off(motion: ReferenceMotion, difference: float) -> Term:
    """Whether the cosine of the anchor's tilt differs from the reference by more than
    `difference`."""

    def term(_: object) -> Array:
        at = motion.anchor
        own, wanted = motion.quaternion[:, at], motion.wanted.quaternion[:, at]
        off: Array = np.abs(rot.two_axes(own)[:, 5] - rot.two_axes(wanted)[:, 5]) > difference
        return off

    return term


def ends_height_off(motion: ReferenceMotion, distance: float) -> Term:
    """Whether the height of any of the motion's ends differs from the reference by more than
    `distance` (m)."""

    def term(_: object) -> Array:
        heights = motion.position[:, motion.ends, 2] - motion.wanted.position[:, motion.ends, 2]
        off: Array = (np.abs(heights) > distance).any(axis=1)
        return off

    return term


def bodies_off(motion: ReferenceMotion, distance: float) -> Term:
    """Whether the mean distance of the bodies from the reference is more than `distance` (m)."""
    return lambda _: motion.mean_distance > distance
