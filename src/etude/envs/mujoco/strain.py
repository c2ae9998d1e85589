"""Measurements of what a policy asks of its robot: torques, joint ranges, self-penetration."""

from __future__ import annotations

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.data.motion import rotations as rot
from etude.envs.mujoco.reference import SelfContacts
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Draws, Part, Term

_BALL = int(mujoco.mjtJoint.mjJNT_BALL)
_FULL = 0.99
"""Share of the limit from which a torque counts as saturated."""
_OPPOSITE = -0.9


class StrainMeter(Part):
    """Counts saturated torques and their reversals in every physics step, and keeps the largest
    distance beyond a joint's range and the deepest self-penetration after control steps."""

    def __init__(self, robot: Robot, contacts: SelfContacts) -> None:
        self._robot, self._contacts = robot, contacts

    def bind(self) -> None:
        env, model = self.env, self.env.simulation.model
        self._force = env.simulation.bind("actuator_force")
        limited = model.actuator_forcelimited.astype(bool)
        sizes = np.diff(np.append(model.actuator_ctrladr, model.nu))
        balls = (sizes > 1) | (model.jnt_type[model.actuator_trnid[:, 0]] == _BALL)
        self._widths = np.where(balls, 3, 1)
        self._first = np.cumsum(self._widths) - self._widths
        # Without a limit no torque is saturated.
        self._limits = np.where(limited, np.abs(model.actuator_forcerange).max(axis=1), np.inf)
        count = len(self._limits)
        self._substeps = env.state("strain/substeps")
        self._full, self._turned = (
            env.state(f"strain/{name}", count) for name in ("full", "reversed")
        )
        self._before = env.state("strain/torque", int(self._widths.sum()))
        self.beyond, self.depth = env.state("strain/beyond"), env.state("strain/depth")
        """[num_envs] rad or m, and m: largest in the open episode."""
        env.simulation.watchers.append(self._watch)

    def begin(self, env_ids: Array, draws: Draws) -> None:
        for array in (self._substeps, self._full, self._turned, self._before, self.beyond):
            array[env_ids] = 0.0
        self.depth[env_ids] = 0.0

    def _watch(self) -> None:
        shares = self._force / np.repeat(self._limits, self._widths)
        full = np.add.reduceat(shares * shares, self._first, axis=1) > _FULL**2
        # Of two opposite torques at their limits this is -1.
        opposed = np.add.reduceat(shares * self._before, self._first, axis=1) < _OPPOSITE
        self._full += full
        self._turned += full & opposed
        self._before[:] = shares
        self._substeps += 1.0

    def update(self) -> None:
        robot, model = self._robot, self.env.simulation.model
        joints = robot.joint_positions + robot.default_joints - robot.joint_offset
        low, high = robot.joint_range.T
        beyond = [low - joints, joints - high]
        if robot.ball_ids.size:
            limited = model.jnt_limited[robot.ball_ids].astype(bool)
            largest = np.where(limited, model.jnt_range[robot.ball_ids, 1], np.inf)
            vectors = rot.log(robot.ball_quaternions)
            beyond.append(np.sqrt(np.einsum("nbi,nbi->nb", vectors, vectors)) - largest)
        for part in beyond:
            np.maximum(self.beyond, part.max(axis=1, initial=0.0), out=self.beyond)
        np.maximum(self.depth, self._contacts.depth, out=self.depth)

    def statistics(self) -> dict[str, Term]:
        """Statistics {name: [num_envs]} of the open episode: the mean share of saturated physics
        steps over joints, the share of steps in which the full torque of a joint turned round, of
        the joint with the most, the distance beyond a range in rad or m, and the depth in mm."""

        def share(counts: Array) -> Array:
            found: Array = counts / np.maximum(self._substeps, 1.0)[:, None]
            return found

        return {
            "saturated": lambda _: share(self._full).mean(axis=1),
            "reversals": lambda _: share(self._turned).max(axis=1),
            "beyond_range": lambda _: 1.0 * self.beyond,
            "penetration": lambda _: 1000.0 * self.depth,
        }
