"""Cartesian control of the hand by damped least squares, for whole batches of rows."""

from __future__ import annotations

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.simulation import Simulation
from etude.envs.robots.kuka.scene import HAND_SITE, ArmTable

DAMPING = 0.05
"""Weight of joint motion against hand error: bounds joint steps near stretched poses."""
POSTURE = 0.2
"""Share of the way to the home posture taken per call, in the one direction that leaves the hand
where it is. Without it the elbow drifts, and the same hand pose no longer means the same arm."""


class HandControl:
    """Turns hand displacements into joint targets; the fingers keep pointing down.

    Nothing is remembered between calls: a displacement is relative to where the hand is.
    """

    def __init__(self, simulation: Simulation, table: ArmTable, home: Array) -> None:
        """home: [7] rad, the posture the arm prefers."""
        site = simulation.model.site(HAND_SITE)
        self._simulation = simulation
        self._body = int(site.bodyid[0])
        self._hand = simulation.site(HAND_SITE)
        self.frame: Array = simulation.bind("site_xmat")[:, site.id].reshape(-1, 3, 3)
        """[rows, 3, 3], live: the hand's axes as columns; fingers close along the second."""
        self._home = home
        self._position = simulation.bind("qpos")[:, : len(home)]
        self._low, self._high = table.range[:, 0].copy(), table.range[:, 1].copy()
        self._speed = table.speed
        self._diagonal = np.arange(6)

    def yaw(self) -> Array:
        """[rows] rad: how the hand is turned about the vertical; 0 in the middle of the range."""
        yaw: Array = np.arctan2(-self.frame[:, 1, 0], -self.frame[:, 0, 0])
        return yaw

    def targets(self, displacement: Array, yaw: Array, seconds: float) -> Array:
        """[rows, 7] joint angles that move the hand by [rows, 3] m and turn it to [rows] rad.

        No joint is asked to move faster than its limit, or beyond its range, in `seconds`.
        """
        joints = self._home.size
        translation, rotation = self._simulation.jacobians(self._body, self._hand)
        jacobian = np.concatenate([translation, rotation], axis=1)[:, :, :joints]
        error = np.concatenate([displacement, _turn(self.frame, _pointing_down(yaw))], axis=1)
        posture = (self._home - self._position) * POSTURE
        error -= (jacobian @ posture[:, :, None])[:, :, 0]
        transposed = jacobian.transpose(0, 2, 1)
        square = jacobian @ transposed
        square[:, self._diagonal, self._diagonal] += DAMPING**2
        step = posture + (transposed @ np.linalg.solve(square, error[:, :, None]))[:, :, 0]
        # The whole step is shortened, not single joints: the hand keeps its direction.
        excess = (np.abs(step) / (self._speed * seconds)).max(axis=1, keepdims=True)
        step /= np.maximum(excess, 1.0)
        target: Array = np.minimum(np.maximum(self._position + step, self._low), self._high)
        return target


def _pointing_down(yaw: Array) -> Array:
    """[rows, 3, 3]: frames whose third axis points down, turned to [rows] rad."""
    frame = np.zeros((yaw.size, 3, 3))
    frame[:, 1, 1] = np.cos(yaw)
    frame[:, 0, 1] = -np.sin(yaw)
    frame[:, 0, 0] = -frame[:, 1, 1]
    frame[:, 1, 0] = frame[:, 0, 1]
    frame[:, 2, 2] = -1.0
    return frame


def _turn(frame: Array, wanted: Array) -> Array:
    """[rows, 3] rotation vectors (their sine) that turn frames [rows, 3, 3] to the wanted ones."""
    rotation = wanted @ frame.transpose(0, 2, 1)
    turn = np.stack(
        [
            rotation[:, 2, 1] - rotation[:, 1, 2],
            rotation[:, 0, 2] - rotation[:, 2, 0],
            rotation[:, 1, 0] - rotation[:, 0, 1],
        ],
        axis=1,
    )
    turn *= 0.5
    return turn


def solve_pose(model: mujoco.MjModel, start: Array, hand: Array, yaw: float) -> Array:
    """[7] joint angles that put the hand at [3] m, pointing down; from `start` [7]."""
    data, joints = mujoco.MjData(model), len(start)
    site = model.site(HAND_SITE).id
    data.qpos[:joints] = start
    wanted = _pointing_down(np.array([yaw]))
    translation, rotation = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for _ in range(100):
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        turn = _turn(data.site_xmat[site].reshape(1, 3, 3), wanted)[0]
        error = np.concatenate([hand - data.site_xpos[site], turn])
        mujoco.mj_jacSite(model, data, translation, rotation, site)
        jacobian = np.concatenate([translation, rotation])[:, :joints]
        square = jacobian @ jacobian.T + DAMPING**2 * np.eye(6)
        data.qpos[:joints] += jacobian.T @ np.linalg.solve(square, error)
    solution: Array = data.qpos[:joints].copy()
    return solution
