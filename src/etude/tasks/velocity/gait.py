"""A clocked trot: the motion that actions are added to, and a reward for keeping its time."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.robot import Feet
from etude.envs.mujoco.task import Part, measured

LEG = 0.213
"""m: thigh and calf are equally long."""
BEND = 0.9
"""rad: how far the thigh leans in the standing pose; the calf bends back by twice as much."""
HIPS = np.array([[0.188, -0.127], [0.188, 0.127], [-0.188, -0.127], [-0.188, 0.127]])
"""[4, 2] m: where the legs front right, front left, rear right and rear left hang."""
OFFSETS = np.array([0.0, np.pi, np.pi, 0.0])
"""[4] rad of the clock: diagonal legs move together."""


class Trot(Part):
    """Diagonal feet swing together in the first half of the clock's turn, and then stand.

    While a robot is commanded to stand still, no foot swings.
    """

    def __init__(
        self, feet: Feet, command: VelocityCommand, frequency: float, height: float
    ) -> None:
        """frequency: strides per second; height: m that a foot rises by."""
        self._feet, self._command = feet, command
        self._frequency, self._height = frequency, height
        # A foot rises straight up when thigh and calf bend by this much more.
        self._fold = np.arccos(np.cos(BEND) - height / (2.0 * LEG)) - BEND
        # rad per m/s: how far legs swing to either side of the hip.
        self._swing = 0.25 / frequency / (2.0 * LEG * np.cos(BEND))

    def describe(self) -> Tree:
        return {
            "trot": {
                "about": "angles added to the default pose: see docs/export.md for the formula",
                "frequency": self._frequency,
                "fold": float(self._fold),
                "swing": float(self._swing),
                "hips": HIPS.tolist(),
                "offsets": OFFSETS.tolist(),
            }
        }

    def _angle(self, ahead: int = 0) -> Array:
        """[num_envs, 1] rad of the clock, `ahead` control steps from now."""
        steps = self.env.elapsed[:, None] + ahead
        angle: Array = steps * (2.0 * np.pi * self._frequency * self.env.dt)
        return angle

    def _walks(self) -> Array:
        """[num_envs, 1] bool: whether the command is to move."""
        found: Array = np.asarray(self._command.command.any(axis=1))[:, None]
        return found

    def reference(self) -> Array:
        """[num_envs, 12] rad from the standing pose: a plain trot at the commanded velocity.

        A standing foot moves against the motion that its hip is to have, a swinging one back to
        where it stands next. It falls by itself, and servos that yield make it too slow: both is
        left to the policy.
        """
        phase = (self._angle(ahead=1) + OFFSETS) % (2.0 * np.pi)
        swings, part = phase < np.pi, phase % np.pi / np.pi
        along = np.where(swings, -np.cos(np.pi * part), 1.0 - 2.0 * part) * self._swing
        x, y, turn = self._command.command.T[:, :, None]
        pitch = np.arctan((x - turn * HIPS[:, 1]) * along)
        roll = np.arctan((y + turn * HIPS[:, 0]) * along)
        fold = np.where(swings & self._walks(), np.sin(phase), 0.0) * self._fold
        return np.stack([roll, fold - pitch, -2.0 * fold], axis=2).reshape(-1, 12)

    @measured("1")
    def phase(self, env: MujocoEnv) -> Array:
        """[num_envs, 2]: sine and cosine of the clock, both 0 where the command is to stand."""
        angle = self._angle()
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=1) * self._walks()

    def reward(self, env: MujocoEnv) -> Array:
        """[num_envs] 0 to 1: swinging feet at their height, standing feet down and still."""
        swing = np.sin(self._angle() + OFFSETS) * self._walks()
        target = np.maximum(swing, 0.0) * self._height
        lifted = np.exp(-(((self._feet.height - target) / 0.03) ** 2))
        planar = self._feet.velocity[:, :, :2]
        still = np.exp(-np.einsum("nfi,nfi->nf", planar, planar) / 0.1)
        mean: Array = np.where(swing > 0.0, lifted, 0.5 * lifted + 0.5 * still).mean(axis=1)
        return mean
