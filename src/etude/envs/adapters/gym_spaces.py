"""Gymnasium's spaces as Etude's specs, and rows of values to and from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from etude.core.contracts import ActionSpec, Array, ArraySpec, Observations
from etude.core.errors import UsageError


class Spaces:
    """What an environment sees and does, from its two spaces; `env_id` is for messages."""

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Space[Any], env_id: str
    ) -> None:
        self._single, self.observations = _observation_specs(observation, env_id)
        self.action = _action_spec(action, env_id)
        self._action_space = action

    def empty(self, rows: int) -> Observations:
        """Zeros, {name: [rows, ...]}, for `store` to fill."""
        return {
            name: np.zeros((rows, *spec.shape), spec.dtype)
            for name, spec in self.observations.items()
        }

    def store(self, obs: Observations, row: int, value: Any) -> None:
        """Write what the environment observed into a row."""
        if self._single is not None:
            obs[self._single][row] = value
        else:
            for name, part in value.items():
                obs[name][row] = part

    def actions(self, actions: Array) -> Sequence[Any]:
        """What each row's environment takes, of actions as `ActionSpec.to_env` gives them.

        actions: [rows, n] float32 for a box, [rows] or [rows, n] integers for choices. Copied:
        an environment may keep or change what it is given.
        """
        space = self._action_space
        if isinstance(space, spaces.Discrete):
            chosen: list[int] = (actions + int(space.start)).tolist()
            return chosen
        return list(actions.astype(space.dtype).reshape(len(actions), *(space.shape or ())))


def _observation_specs(
    space: spaces.Space[Any], env_id: str
) -> tuple[str | None, dict[str, ArraySpec]]:
    """The one name of a plain observation, or None for a dict of them; and the specs."""
    if isinstance(space, spaces.Box):
        picture = space.dtype == np.uint8 and len(space.shape) == 3
        name = "image" if picture else "state"
        return name, {name: _array_spec(space)}
    if isinstance(space, spaces.Dict):
        boxes = {name: box for name, box in space.items() if isinstance(box, spaces.Box)}
        if len(boxes) == len(space):
            return None, {str(name): _array_spec(box) for name, box in boxes.items()}
    raise UsageError(
        f"'{env_id}' observes {space}; a Box or a Dict of Boxes is needed. "
        "gymnasium.wrappers.FlattenObservation makes one of most spaces."
    )


def _array_spec(box: spaces.Box) -> ArraySpec:
    return ArraySpec(box.shape, "uint8" if box.dtype == np.uint8 else "float32")


def _action_spec(space: spaces.Space[Any], env_id: str) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", sizes=(int(space.n),))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return ActionSpec("multi_discrete", sizes=tuple(space.nvec.tolist()))
    if isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).all():
        low, high = space.low.ravel().tolist(), space.high.ravel().tolist()
        return ActionSpec("box", low=tuple(low), high=tuple(high))
    raise UsageError(
        f"'{env_id}' acts in {space}; a bounded Box, Discrete or MultiDiscrete is needed."
    )
