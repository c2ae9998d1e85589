"""Where rewards come from, of replayed experience and of fresh."""

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
    """Where rewards come from: as it stands, from the environment. What learns rewards overrides.

    Of replayed transitions (SAC, TD3), a gradient step calls `update`, `sample` and `relabel`. Of
    fresh experience (PPO), an iteration calls `relabel_rollouts` and then `batches`. A source
    serves one of the two, or both. Learned rewards replace stored ones in what was sampled; they
    are never written back.
    """

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        """One gradient step of what is learned here, over all shards in their order; metrics."""
        return {}

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        """The transitions of one shard's store to learn from: a `Sampler`."""

        from etude.rl.sampling import uniform

        return uniform(store, generator, size)

    def relabel(self, batch: Batch) -> Batch:
        """The batch with this source's rewards."""
        return batch

    def relabel_rollouts(
        self, rollouts: Sequence[Fragment]
    ) -> tuple[list[Array], dict[str, float]]:
        """Rewards [num_envs, steps] float32 of every shard's rollout; and metrics about them.

        They come before anything that is made of them: scaling, returns, advantages.
        """
        return [rollout.rewards for rollout in rollouts], {}

    def batches(self, key: Key) -> Iterator[BatchMetrics]:
        """Learns from the rollouts that were last relabelled, one gradient step at a time."""
        return iter(())

    def gather(self) -> None:
        """Brings the other ranks' parts of the state here; all ranks call it together."""

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
