"""Targets: points to reach, drawn in films and windows."""

from __future__ import annotations

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.envs.mujoco.decor import poses
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.simulation import Marker
from etude.envs.mujoco.task import Draws, Part, derived

_BODY = "etude/target"
SHARE = 0.5
"""Share of the joints' ranges around the home pose from which targets are drawn."""


class TargetPart(Part):
    """A point to reach, chosen for each episode; films and windows draw it with `radius` (m)."""

    def __init__(self, robot: Robot, radius: float = 0.03) -> None:
        self.robot, self._radius = robot, radius

    def edit(self, spec: mujoco.MjSpec) -> None:
        spec.worldbody.add_body(name=_BODY, mocap=True)

    def bind(self) -> None:
        simulation = self.env.simulation
        index = int(simulation.model.body(_BODY).mocapid[0])
        self.position: Array = simulation.bind("mocap_pos")[:, index]
        """[num_envs, 3] m: a part of the simulation's state."""

    def markers(self, env_id: int, step: int) -> tuple[Marker, ...]:
        from etude.envs.mujoco.markers import Target

        return (Target(self.position[env_id].copy(), self._radius),)


class ReachTarget(TargetPart):
    """A point for a hand to reach: where the hand is in a random pose of the robot.

    `hand`: name of a site or body. `share`: poses are within this share of the joints' ranges
    around the home pose, and without collisions. `floor`: lowest height of a point, m.
    """

    def __init__(
        self,
        robot: Robot,
        hand: str,
        share: float = SHARE,
        floor: float = -np.inf,
        radius: float = 0.03,
    ) -> None:
        super().__init__(robot, radius)
        self._name, self._share, self._floor = hand, share, floor

    def bind(self) -> None:
        super().bind()
        simulation = self.env.simulation
        model = simulation.model
        sites = [model.site(i).name for i in range(model.nsite)]
        kind = "site" if self._name in sites else "body"
        try:
            index = getattr(model, kind)(self._name).id
        except KeyError:
            raise UsageError(f"The model has neither a site nor a body {self._name!r}.") from None
        self.hand: Array = simulation.bind("site_xpos" if kind == "site" else "xpos")[:, index]
        """[num_envs, 3] m: position of the hand."""
        found = [
            getattr(data, kind)(index).xpos.copy()
            for data in poses(model, 256, self.robot.home, self._share)
        ]
        above = [point for point in found if point[2] > self._floor + self._radius]
        self.points: Array = np.array(above or found[:1])
        """[n, 3] m: points to draw from."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self.position[env_ids] = self.points[draws.integers("target", 0, len(self.points) - 1)]

    @derived
    def offset(self) -> Array:
        """[num_envs, 3] m: from the hand to the target, in the world frame."""
        return self.position - self.hand

    @derived
    def distance(self) -> Array:
        """[num_envs] m."""
        found: Array = np.linalg.norm(self.offset, axis=1)
        return found


class WalkTarget(TargetPart):
    """A point on the floor around a robot, at a distance of `near` to `far` (m).

    `floor`: height of the floor, m.
    """

    def __init__(
        self, robot: Robot, near: float, far: float, floor: float = 0.0, radius: float = 0.05
    ) -> None:
        super().__init__(robot, radius)
        self._near, self._far, self._floor = near, far, floor

    def begin(self, env_ids: Array, draws: Draws) -> None:
        angle, distance = draws.uniform("target", 2, high=(2.0 * np.pi, 1.0)).T
        distance = self._near + distance * (self._far - self._near)
        around = np.stack([np.cos(angle), np.sin(angle)], axis=1) * distance[:, None]
        self.position[env_ids, :2] = self.robot.position[env_ids, :2] + around
        self.position[env_ids, 2] = self._floor + self._radius

    @derived
    def offset(self) -> Array:
        """[num_envs, 2] m: from the base to the target, ahead and to the left of its heading."""
        x, y = self.robot.heading.T
        away = self.position[:, :2] - self.robot.position[:, :2]
        return np.stack([x * away[:, 0] + y * away[:, 1], x * away[:, 1] - y * away[:, 0]], axis=1)

    @derived
    def distance(self) -> Array:
        """[num_envs] m, on the floor."""
        found: Array = np.linalg.norm(self.offset, axis=1)
        return found

    @derived
    def approach(self) -> Array:
        """[num_envs] m/s: velocity of the base toward the target."""
        velocity = np.einsum("ij,ij->i", self.robot.heading_velocity[:, :2], self.offset)
        found: Array = velocity / np.maximum(self.distance, 1e-6)
        return found
