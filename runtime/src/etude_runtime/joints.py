"""What actions of joint targets do: default pose + reference motion + scale x action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etude_runtime.contract import Array, ContractError


class Trot:
    """The open-loop trot that a walking policy's actions are added to.

    In the first half of its turn of the clock a foot swings, and then it stands; diagonal feet
    together. A standing foot moves against the velocity that its hip is to have.
    """

    def __init__(self, said: dict[str, Any], period: float) -> None:
        """said: "trot" of `policy.json`; period: seconds of a control step."""
        self._turn = 2.0 * np.pi * float(said["frequency"]) * period
        self._fold, self._swing = float(said["fold"]), float(said["swing"])
        self._hips, self._offsets = np.array(said["hips"]), np.array(said["offsets"])

    def phase(self, step: int, command: Sequence[float]) -> Array:
        """[2]: the term "phase" after `step` control steps of an episode; 0 to stand still."""
        angle = step * self._turn
        return np.array([np.sin(angle), np.cos(angle)]) * bool(np.any(command))

    def reference(self, step: int, command: Sequence[float]) -> Array:
        """[12] rad: what is added to the default pose in the step after `step` of them."""
        phase = ((step + 1) * self._turn + self._offsets) % (2.0 * np.pi)
        swings, part = phase < np.pi, phase % np.pi / np.pi
        along = np.where(swings, -np.cos(np.pi * part), 1.0 - 2.0 * part) * self._swing
        x, y, turning = command
        pitch = np.arctan((x - turning * self._hips[:, 1]) * along)
        roll = np.arctan((y + turning * self._hips[:, 0]) * along)
        fold = np.where(swings & bool(np.any(command)), np.sin(phase), 0.0) * self._fold
        return np.stack([roll, fold - pitch, -2.0 * fold], axis=1).reshape(-1)


class Motion:
    """One of the motions that a tracking policy follows, at its control rate."""

    def __init__(self, document: dict[str, Any], arrays: dict[str, Array], number: int = 0) -> None:
        """document: `Policy.document`; arrays: of `motion.safetensors`; number: of the motion."""
        said = document["motion"]
        count, first = int(said["counts"][number]), int(said["starts"][number])
        self.name, self.loops = str(said["names"][number]), bool(said["loops"][number])
        self.joints, self.bodies = list(said["joints"]), list(said["bodies"])
        self.anchor = self.bodies.index(said["anchor"])
        """Index of the anchor among the bodies."""
        if any(len(array) < first + count for array in arrays.values()) or count < 1:
            raise ContractError("The motion's arrays have fewer frames than policy.json says.")
        self._arrays = {name: array[first : first + count] for name, array in arrays.items()}
        self.last = count - 1
        """Number of the last frame; a motion stays there."""

    def at(self, name: str, step: int) -> Array:
        """An array's frame after `step` control steps: root [7] (position, quaternion), root_speed
        [6], joints [n], joint_speeds [n], targets [n] (of the servos), phase [2], bodies [b, 3],
        body_quaternions [b, 4]; quaternions are w x y z."""
        frame: Array = self._arrays[name][min(step, self.last)]
        return frame


class JointTargets:
    """Actions as position targets of the joints, in the order of `names`."""

    def __init__(self, document: dict[str, Any], motion: Motion | None = None) -> None:
        """document: `Policy.document`; motion: `Policy.motion`, to whose targets a tracking
        policy's actions are added."""
        action = document.get("action", {})
        if action.get("kind") != "joint_targets":
            raise ContractError(
                f"The actions of this policy are {action.get('kind', 'not described')}, and not "
                "joint_targets."
            )
        self.names = list(action["joints"])
        joints = {joint["name"]: joint for joint in document["joints"]}
        chosen = [joints[name] for name in self.names]
        unlimited = [-np.inf, np.inf]
        self.default = np.array([joint["default"] for joint in chosen])
        """[n] rad: the pose around which joints are measured."""
        self.low, self.high = np.array([joint["range"] or unlimited for joint in chosen]).T
        self._scale = np.asarray(action["scale"])
        reference = action.get("reference")
        if reference not in (None, "trot", "referencemotion"):
            raise ContractError(f"The reference motion '{reference}' is not known here.")
        if (reference == "referencemotion") != (motion is not None):
            raise ContractError("A policy that tracks a motion, and no other, needs one.")
        period = document["control"]["period"]
        self.trot = Trot(document["trot"], period) if reference == "trot" else None
        self.motion = motion

    def targets(self, action: Array, step: int, command: Sequence[float] = ()) -> Array:
        """[n] rad of an action, after `step` control steps of the episode."""
        start = self.default if self.motion is None else self.motion.at("targets", step + 1)
        target = start + action * self._scale
        if self.trot is not None:
            target = target + self.trot.reference(step, command)
        kept: Array = np.clip(target, self.low, self.high)
        return kept
