"""Demonstrations of pick-and-place: its progress, beside the expert."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.demonstration import Demonstration
from etude.envs.mujoco.env import Draws
from etude.tasks.pick_place import terms
from etude.tasks.pick_place.arm import STAGES
from etude.tasks.pick_place.expert import PickPlaceExpert


class PickPlaceDemonstration(Demonstration):
    """Progress is how far the staged potential has come from its start."""

    has_gripper = True

    def bind(self) -> None:
        weights = np.array([getattr(self.config.reward, name) for name in STAGES])
        self._shares: Array = weights / weights.sum() if weights.sum() > 0 else weights + 1 / 7
        self._first_potential = self.env.state("first_potential")

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self._first_potential[env_ids] = (self.view.stages @ self._shares)[env_ids]

    def progress(self) -> Array:
        start = self._first_potential
        gain = (self.view.stages @ self._shares - start) / (1.0 - start)
        return np.where(self.view.success, 1.0, gain)

    def proprioception(self) -> tuple[Array, ...]:
        felt = (terms.hand_position, terms.hand_velocity, terms.hand_turn, terms.gripper)
        return tuple(term(self.view) for term in felt)

    def expert(self) -> PickPlaceExpert:
        return PickPlaceExpert(self.config, self.env.num_envs)
