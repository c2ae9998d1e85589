"""Demonstrations of pick-and-place: its progress, beside the expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.demonstration import DemonstratedTask
from etude.tasks.pick_place import terms
from etude.tasks.pick_place.expert import PickPlaceExpert
from etude.tasks.pick_place.task import PickPlace, PickPlaceConfig


class DemonstratedPickPlace(DemonstratedTask, PickPlace):
    """Pick-and-place; progress is how far the staged potential has come from its start."""

    has_gripper = True

    def __init__(self, config: PickPlaceConfig, num_envs: int) -> None:
        self._first_potential: Array = np.zeros(num_envs)
        weights = np.array([getattr(config.reward, name) for name in terms.STAGES])
        self._shares: Array = weights / weights.sum() if weights.sum() > 0 else weights + 1 / 7
        # What is learned from demonstrations is the sum of an episode's rewards, undiscounted:
        # shaping would not cancel in it.
        PickPlace.__init__(self, config.model_copy(update={"shaping": 0.0}), num_envs)

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        super()._aim(rows, generators)
        self._first_potential[rows] = (self.view.stages @ self._shares)[rows]

    def progress(self) -> Array:
        start = self._first_potential
        gain = (self.view.stages @ self._shares - start) / (1.0 - start)
        return np.where(self.view.success, 1.0, gain)

    def proprioception(self) -> tuple[Array, ...]:
        felt = (terms.hand_position, terms.hand_velocity, terms.hand_turn, terms.gripper)
        return tuple(term(self.view) for term in felt)

    def expert(self) -> PickPlaceExpert:
        return PickPlaceExpert(self._config, self.num_envs)
