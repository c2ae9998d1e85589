"""How far points are from the arm: the palm, which is a box, and the links, which are capsules."""

from __future__ import annotations

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.simulation import Simulation
from etude.robots.kuka.scene import PALM, arm_table


class Clearance:
    """Distances to the surfaces of palm and links, for whole batches of rows.

    The fingers are left to whoever knows what they should be doing.
    """

    def __init__(self, simulation: Simulation) -> None:
        model: mujoco.MjModel = simulation.model
        names = arm_table().names
        palm, first = model.geom(PALM).id, model.geom(names[0]).id
        position, frame = simulation.bind("geom_xpos"), simulation.bind("geom_xmat")
        frame = frame.reshape(simulation.num_envs, -1, 3, 3)
        # The links' geoms follow each other in the model: a slice of a live array is live too.
        capsules = slice(first, first + len(names))
        self._palm, self._palm_frame = position[:, palm], frame[:, palm]
        self._palm_half = model.geom_size[palm].copy()
        self._links, self._axes = position[:, capsules], frame[:, capsules, :, 2]
        self._radius, self._half = model.geom_size[capsules, :2].copy().T

    def of(self, points: Array) -> Array:
        """[rows] m from points [rows, 3] to the nearest surface, less than 0 inside a link."""
        away = points[:, None] - self._links
        along = np.einsum("ijk,ijk->ij", away, self._axes)
        along = np.minimum(np.maximum(along, -self._half), self._half)
        away -= along[:, :, None] * self._axes
        links = np.sqrt(np.einsum("ijk,ijk->ij", away, away)) - self._radius
        inside = np.einsum("ijk,ij->ik", self._palm_frame, points - self._palm)
        outside = np.maximum(np.abs(inside) - self._palm_half, 0.0)
        palm = np.sqrt(np.einsum("ij,ij->i", outside, outside))
        nearest: Array = np.minimum(palm, links.min(axis=1))
        return nearest
