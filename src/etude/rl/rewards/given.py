"""Reward sources, for replayed transitions and for rollouts; and the environment's own rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field

from etude.core.contracts import Array, BatchMetrics, Fragment
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.core.trees import Tree
from etude.planning.recipe import Resolved, RewardsConfig

if TYPE_CHECKING:
    from etude.rl.sampling import Batch, Experience, Sample


class RewardSource:
    """Base of reward sources; itself it keeps the environment's rewards.

    For replayed transitions (SAC, TD3), a gradient step calls `update`, `sample` and `relabel`. For
    rollouts (PPO), an iteration calls `relabel_rollouts` and then `batches`. A source supports one
    of the two, or both. Learned rewards replace those of sampled transitions; they are never
    written back to the replay.
    """

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        """Take one gradient step of the reward model, over all shards in order; returns metrics."""
        return {}

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        """Sample transitions of one shard's store to learn from: a `Sampler`."""
        from etude.rl.sampling import uniform

        return uniform(store, generator, size)

    def relabel(self, batch: Batch) -> Batch:
        """Replace the rewards of a minibatch."""
        return batch

    def relabel_rollouts(
        self, rollouts: Sequence[Fragment]
    ) -> tuple[list[Array], dict[str, float]]:
        """Rewards [num_envs, steps] float32 of each shard's rollout, and metrics about them.

        Called before rewards are scaled and returns and advantages computed.
        """
        return [rollout.rewards for rollout in rollouts], {}

    def batches(self, key: Key) -> Iterator[BatchMetrics]:
        """Take gradient steps on the rollouts that were last relabelled."""
        return iter(())

    def gather(self) -> None:
        """Gather the state of the other ranks; all ranks call it together."""

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        pass


GIVEN = RewardSource()


class GivenConfig(RewardsConfig):
    """The environment's own rewards."""

    kind: Literal["given"] = Field("given", description="Rewards of the environment.")

    @property
    def uses_stored(self) -> bool:
        return True

    def for_rollouts(
        self, run: Resolved, key: Key | None, device: torch.device, ranks: Ranks = ALONE
    ) -> RewardSource:
        return GIVEN

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> RewardSource:
        return GIVEN
