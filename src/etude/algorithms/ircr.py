"""IRCR, a baseline without learning: a step is worth what its episode was worth.

The reward of a transition is its episode's return, scaled to [0, 1] by the least and the largest
return that all shards hold. Half of a batch is drawn from the best ten episodes of the shard's
store, the other half from all of its episodes, each uniform over the transitions.

Only finished episodes have a return, so only their transitions are drawn. Until a shard has one,
its batches are of open episodes and the rewards 0: nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from etude.algorithms.rewards import Batch, Experience
from etude.core.contracts import Array
from etude.core.keys import Key
from etude.core.recipe import Config
from etude.core.trees import Tree
from etude.experience.episodes import Transitions


class IRCRConfig(Config):
    """The return of the whole episode as every step's reward."""

    kind: Literal["ircr"] = Field("ircr", description="Normalised return of the episode.")
    best: int = Field(10, ge=1, description="Episodes that half of each batch is drawn from.")


class IRCR:
    """A `RewardSource`; see the module's text. `update` comes before `batch` in a step."""

    def __init__(self, config: IRCRConfig, device: torch.device) -> None:
        self.config, self._device = config, device
        self._low, self._high = 0.0, 0.0

    def batch(self, store: Experience, generator: np.random.Generator, size: int) -> Batch:
        """The first size // 2 from the best episodes, the rest from all."""
        if not store.num_episodes:
            steps = store.sample_transitions(generator, size)
            return Batch.of(steps, torch.zeros(size), self._device)
        lengths, returns = store.lengths, store.returns
        best = best_episodes(returns, self.config.best)
        half = size // 2
        among = best[_draw(generator, lengths[best], half)]
        drawn = np.concatenate((among, _draw(generator, lengths, size - half)))
        subsets = store.subsets_of(generator, drawn, 1)
        rewards = torch.from_numpy(self._scaled(subsets.returns))
        return Batch.of(_one_each(subsets.steps), rewards, self._device)

    def _scaled(self, returns: Array) -> Array:
        """[n] float32 in [0, 1]; 0 where all returns are the same."""
        span = self._high - self._low
        if not span > 0.0:
            return np.zeros(len(returns), np.float32)
        return np.clip((returns - self._low) / span, 0.0, 1.0).astype(np.float32)

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        """Look up the range of the returns held; nothing is learned and nothing drawn."""
        held = np.concatenate([store.returns for store in stores])
        if not len(held):
            return {}
        self._low, self._high = float(held.min()), float(held.max())
        return {"train/return_low": self._low, "train/return_high": self._high}

    def state_dict(self) -> Tree:
        return {"low": self._low, "high": self._high}

    def load_state_dict(self, state: Tree) -> None:
        self._low, self._high = float(state["low"]), float(state["high"])


def best_episodes(returns: Array, num: int) -> Array:
    """The numbers of the `num` largest of `returns` [episodes], the newer where they are equal."""
    newest_first = np.argsort(-returns[::-1], kind="stable")
    best: Array = len(returns) - 1 - newest_first[:num]
    return best


def _draw(generator: np.random.Generator, lengths: Array, num: int) -> Array:
    """`num` places in `lengths` [episodes], each in proportion to its length: [num] int64."""
    ends = np.cumsum(lengths)
    return ends.searchsorted(generator.integers(0, ends[-1], num), "right")


def _one_each(steps: Transitions) -> Transitions:
    """Leading axes [n, 1] as [n]."""

    def flat(arrays: dict[str, Array]) -> dict[str, Array]:
        return {name: array[:, 0] for name, array in arrays.items()}

    rest = (steps.actions, steps.rewards, steps.terminated, steps.truncated)
    actions, rewards, terminated, truncated = (array[:, 0] for array in rest)
    return Transitions(
        flat(steps.obs), actions, rewards, terminated, truncated, flat(steps.next_obs)
    )
