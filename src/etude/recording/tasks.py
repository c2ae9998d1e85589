"""Tasks as demonstrations show them: with their true progress, and the state a picture needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.core.contracts import Array, Observations
from etude.core.errors import UsageError
from etude.envs.mujoco.batch import MujocoTask
from etude.planning.recipe import Recipe
from etude.robots.kuka.scene import HAND_SITE, arm_table
from etude.tasks.pick_place import terms as pick_place_terms
from etude.tasks.pick_place.expert import PickPlaceExpert
from etude.tasks.pick_place.task import PickPlace, PickPlaceConfig
from etude.tasks.reach import task as reach
from etude.tasks.reach.task import Reach, ReachConfig

SIMULATION, TARGET = "_simulation", "_target"
"""What pictures are drawn from: observations that are not stored."""
PROGRESS = "progress"
"""True task progress, [1] from 0 at the start to 1 at success: to judge by, not to learn from."""
PROPRIO = "proprio"
"""What the robot feels of itself."""
_DAMPING = 0.05


class ShownReach(Reach):
    """Reach; progress is the share of the way to the target."""

    def __init__(self, config: ReachConfig, num_rows: int, threads: int = 1) -> None:
        self._start: Array = np.ones(num_rows)
        super().__init__(config, num_rows, threads)

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        super()._aim(rows, generators)
        self._start[rows] = self.view.distance[rows]

    def _observe(self) -> Observations:
        view = self.view
        progress = np.where(reach.success(view), 1.0, 1.0 - view.distance / self._start)
        parts = (view.joint_position, view.joint_velocity, view.hand)
        return super()._observe() | _shown(self, view.target, progress, parts)

    def cut(self, rows: Array) -> None:
        """Let the step to come be the last of these episodes, truncated."""
        self._elapsed[rows] = self._limit - 1


class ShownPickPlace(PickPlace):
    """Pick-and-place; progress is how far the staged potential has come from its start."""

    def __init__(self, config: PickPlaceConfig, num_rows: int, threads: int = 1) -> None:
        self._start: Array = np.zeros(num_rows)
        weights = np.array([getattr(config.reward, name) for name in pick_place_terms.STAGES])
        self._shares: Array = weights / weights.sum() if weights.sum() > 0 else weights + 1 / 7
        super().__init__(config, num_rows, threads)

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        super()._aim(rows, generators)
        self._start[rows] = (self.view.stages @ self._shares)[rows]

    def _observe(self) -> Observations:
        view = self.view
        gain = (view.stages @ self._shares - self._start) / (1.0 - self._start)
        terms = pick_place_terms
        felt = (terms.hand_position, terms.hand_velocity, terms.hand_turn, terms.gripper)
        progress = np.where(view.success, 1.0, gain)
        return super()._observe() | _shown(
            self, view.target, progress, tuple(term(view) for term in felt)
        )

    def cut(self, rows: Array) -> None:
        """Let the step to come be the last of these episodes, truncated."""
        self._elapsed[rows] = self._limit - 1


def _shown(
    task: MujocoTask[Any], target: Array, progress: Array, felt: tuple[Array, ...]
) -> Observations:
    return {
        PROPRIO: np.concatenate(felt, axis=1, dtype=np.float32),
        PROGRESS: np.clip(progress, 0.0, 1.0).astype(np.float32)[:, None],
        SIMULATION: task.simulation.state.copy(),
        TARGET: target.copy(),
    }


class ReachExpert:
    """Moves the hand straight at the target, by damped least squares on the joints."""

    def __init__(self, task: ShownReach, config: ReachConfig) -> None:
        table, model = arm_table(), task.simulation.model
        self._task = task
        self._body = int(model.site(HAND_SITE).bodyid[0])
        seconds = model.opt.timestep * config.substeps
        self._scale = table.speed * (config.speed * seconds)

    def reset(self, rows: Array) -> None:
        """Nothing is remembered."""

    def act(self, obs: Observations) -> Array:
        """Actions [rows, 7] float32 for where the rows are now."""
        view = self._task.view
        move, _ = self._task.simulation.jacobians(self._body, view.hand)
        move = move[:, :, : len(self._scale)]
        square = move @ move.transpose(0, 2, 1) + _DAMPING**2 * np.eye(3)
        joints = move.transpose(0, 2, 1) @ np.linalg.solve(square, view.offset[:, :, None])
        actions = joints[:, :, 0] / self._scale
        # Shortened as a whole, so that the hand keeps its direction.
        actions /= np.maximum(np.abs(actions).max(axis=1, keepdims=True), 1.0)
        return np.asarray(actions, np.float32)


ShownTask = ShownReach | ShownPickPlace


def make_shown(recipe: Recipe, rows: int, threads: int = 1) -> ShownTask:
    """The task of a recipe, for recording."""
    if isinstance(recipe.task, ReachConfig):
        return ShownReach(recipe.task, rows, threads)
    if isinstance(recipe.task, PickPlaceConfig):
        # What is learned from demonstrations is the sum of an episode's rewards, undiscounted:
        # shaping would not cancel in it.
        config = recipe.task.model_copy(update={"shaping": 0.0})
        return ShownPickPlace(config, rows, threads)
    raise UsageError(
        "Demonstrations are recorded of reach and pick-place, whose progress is known; "
        f"'{recipe.name}' has an environment of the kind '{recipe.task.kind}'."
    )


def make_expert(recipe: Recipe, task: ShownTask) -> ReachExpert | PickPlaceExpert:
    """A task's scripted expert."""
    if isinstance(task, ShownReach):
        assert isinstance(recipe.task, ReachConfig)
        return ReachExpert(task, recipe.task)
    assert isinstance(recipe.task, PickPlaceConfig)
    return PickPlaceExpert(recipe.task, task.num_rows)
