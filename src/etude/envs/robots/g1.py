"""The Unitree G1 with 29 joints: places of its model and motion in packages, and its motors."""

from __future__ import annotations

import math
from typing import NamedTuple

MODEL = "mjlab/asset_zoo/robots/unitree_g1/xmls/g1.xml"
"""The model in the package mjlab (1.6.0, Apache-2.0)."""
_MOTIONS = "holosoma/data/motions/g1_29dof/whole_body_tracking"
MOTION = f"{_MOTIONS}/sub3_largebox_003_mj.npz"
"""A person who lifts a box: 325 frames of 50 per second, in holosoma (0.0.3, Apache-2.0)."""
CRAWL = f"{_MOTIONS}/motion_crawl_slope.npz"
"""A person who crawls: 959 frames."""
BODIES = (
    "pelvis|torso_link|(left|right)_(hip_roll|knee|ankle_roll|shoulder_roll|elbow|wrist_yaw)_link"
)
ENDS = "(left|right)_(ankle_roll|wrist_yaw)_link"
"""Feet and hands."""
STIFFER = 2.5
"""Stiffness of the servos by that of published controllers; with it, the reference alone is tracked
1.5 times as long, and policies learn faster."""


class Motor(NamedTuple):
    """A motor with its gear."""

    armature: float
    """kg m^2."""
    torque: float
    """N m."""

    @property
    def pair(self) -> Motor:
        """Two motors that move one joint together."""
        return Motor(2 * self.armature, 2 * self.torque)


_5020, _7520_14 = Motor(0.00361, 25.0), Motor(0.01018, 88.0)
_7520_22, _4010 = Motor(0.02510, 139.0), Motor(0.00425, 5.0)
MOTORS = {
    ".*_(elbow|shoulder_pitch|shoulder_roll|shoulder_yaw|wrist_roll)_joint": _5020,
    ".*_hip_(pitch|yaw)_joint|waist_yaw_joint": _7520_14,
    ".*_(hip_roll|knee)_joint": _7520_22,
    ".*_wrist_(pitch|yaw)_joint": _4010,
    "waist_(pitch|roll)_joint|.*_ankle_(pitch|roll)_joint": _5020.pair,
}
"""{pattern of joint names: motor}."""
_OMEGA = 2.0 * math.pi * 10.0
"""rad/s: natural frequency of a motor on its published servo; the damping ratio is 2."""
ARMATURE = {joints: motor.armature for joints, motor in MOTORS.items()}
TORQUE = {joints: motor.torque for joints, motor in MOTORS.items()}
STIFFNESS = {joints: STIFFER * motor.armature * _OMEGA**2 for joints, motor in MOTORS.items()}
DAMPING = {joints: 4.0 * motor.armature * _OMEGA for joints, motor in MOTORS.items()}
