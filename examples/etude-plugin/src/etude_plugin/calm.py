"""A reward source: the environment's rewards, less a cost of jerky actions."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from etude.plugin import (
    ALONE,
    Array,
    Curve,
    Fragment,
    Key,
    Metric,
    Metrics,
    Ranks,
    Resolved,
    RewardsConfig,
    RewardSource,
)

JERK = "rollout/jerk"


class CalmConfig(RewardsConfig):
    """The environment's rewards, less a cost of jerky actions."""

    metrics: ClassVar[Metrics] = (Metric(JERK, "jerk", curve=Curve(50)),)

    kind: Literal["calm"] = "calm"
    cost: float = Field(0.001, ge=0, description="Cost of the squared change of an action.")

    def for_rollouts(
        self, run: Resolved, key: Key | None, device: torch.device, ranks: Ranks = ALONE
    ) -> "CalmRewards":
        return CalmRewards(self.cost, ranks)


class CalmRewards(RewardSource):
    """A source without learned parameters; one that has some also defines `state_dict`."""

    def __init__(self, cost: float, ranks: Ranks) -> None:
        self.cost, self.ranks = cost, ranks

    def relabel_rollouts(
        self, rollouts: Sequence[Fragment]
    ) -> tuple[list[Array], dict[str, float]]:
        """Rewards [num_envs, steps] of every shard's rollout, and metrics."""
        jerks = [jerk(rollout) for rollout in rollouts]
        rewards = [r.rewards - self.cost * j for r, j in zip(rollouts, jerks, strict=True)]
        # Shards may be shared by several processes; each has the same mean over all of them.
        means = self.ranks.gather([float(j.mean()) for j in jerks])
        return rewards, {JERK: sum(means) / len(means)}


def jerk(rollout: Fragment) -> Array:
    """[num_envs, steps] float32: each action's squared distance from the one before it.

    It is 0 at the first step of an episode and at the first step of a rollout.
    """
    jerks = np.zeros_like(rollout.rewards)
    change = np.square(rollout.actions[:, 1:] - rollout.actions[:, :-1]).sum(axis=2)
    ended = (rollout.terminated | rollout.truncated)[:, :-1]
    jerks[:, 1:] = np.where(ended, 0.0, change)
    return jerks
