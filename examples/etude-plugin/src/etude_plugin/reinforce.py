"""An algorithm: REINFORCE with a baseline.

An iteration, top to bottom:

1. `ingest`: the return from each step on, less the value that was predicted for it (the baseline),
   is the step's advantage. Where the rollout or a time limit ends before the episode, the return is
   bootstrapped with the value of the last observation.
2. `batches`: one pass in minibatches, a gradient step each on
   mean(-log_prob * advantage) + value_coef * mean((value - return)^2).
3. `end_iteration`: the normaliser of observations takes in what was collected.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from etude.plugin import (
    ActorCritic,
    BatchMetrics,
    Clock,
    Column,
    Curve,
    Fragment,
    Key,
    Metric,
    Metrics,
    NetworkOptimizer,
    OnPolicyConfig,
    PolicyAlgorithm,
    Ranks,
    Recipe,
    RewardSource,
    SegmentBuffer,
    SegmentGeometry,
    Tree,
    UsageError,
    check_finite,
    join,
    merge_all,
    rollout_advantages,
)

SPREAD = "train/advantage_std"


class ReinforceConfig(OnPolicyConfig):
    """REINFORCE with a value function as its baseline."""

    metrics: ClassVar[Metrics] = (
        Metric(SPREAD, "adv std", ".3g", Column(20), Curve(20, "magenta", (0, None))),
    )
    takes_ranks: ClassVar[bool] = False

    kind: Literal["reinforce"] = "reinforce"
    update_epochs: Literal[1] = Field(1, description="A rollout is learned from once.")
    learning_rate: float = Field(1e-3, gt=0, description="Adam's step size.")
    gamma: float = Field(0.97, ge=0, le=1, description="Discount of a step.")
    value_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")

    def geometry(self, recipe: Recipe) -> SegmentGeometry:
        if recipe.policy.is_recurrent or recipe.collector.lag or recipe.task.num_agents > 1:
            raise UsageError(
                "reinforce trains a policy without memory, of one agent, on what that policy has "
                "just done: use --policy.kind mlp and --collector.lag 0, or --algorithm.kind ppo."
            )
        return super().geometry(recipe)

    def make(self, *parts: Any) -> "Reinforce":
        return Reinforce(self, *parts)


class Reinforce(PolicyAlgorithm):
    """See the module's text. Sums are taken over the whole rollout, so shards change nothing."""

    policy: ActorCritic

    def __init__(
        self,
        config: ReinforceConfig,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: RewardSource,
        ranks: Ranks,
    ) -> None:
        self.config, self.geometry, self.buffers, self.rewards = config, geometry, buffers, rewards
        self.policy, self.device = policy.to(device), device
        self.optimizer = NetworkOptimizer("policy", self.policy, epsilon=1e-8)

    @torch.no_grad()
    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Turns a rollout [num_envs, steps] into advantages and returns."""
        self.moments = merge_all([fragment.moments for fragment in fragments])
        rollout = join(fragments, self.buffers[0], slice(0, self.geometry.num_envs))
        check_finite(rollout, first_env=0)
        (rewards,), metrics = self.rewards.relabel_rollouts([rollout])
        # With lambda 1, generalised advantages are returns less values.
        advantages, returns = rollout_advantages(
            rollout,
            rewards,
            values=self.policy.values(self.prepare(rollout.obs), None),
            value_of=lambda obs, state: self.policy.values(self.prepare(obs), None),
            gamma=self.config.gamma,
            lam=1.0,
        )
        metrics[SPREAD] = float(advantages.std())
        self.features = {k: x.flatten(0, 1) for k, x in self.prepare(rollout.obs).items()}
        self.actions = self.put(rollout.actions).flatten(0, 1)
        self.advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
        self.returns = returns.flatten()
        return metrics

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """Gradient steps, one per minibatch; `key` is where all randomness comes from."""
        yield from self.rewards.batches(key.child("rewards"))
        order = key.child("permutation").generator().permutation(len(self.returns))
        for steps in self.put(order.reshape(-1, self.geometry.minibatch)):
            features = {name: x[steps] for name, x in self.features.items()}
            evaluated = self.policy.evaluate(features, self.actions[steps], None)
            policy_loss = -(evaluated.log_probs * self.advantages[steps]).mean()
            value_loss = (evaluated.values - self.returns[steps]).square().mean()
            loss = policy_loss + self.config.value_coef * value_loss
            self.optimizer.mean_gradient([loss])  # refuses what is not finite
            self.optimizer.step(self.config.learning_rate)
            losses = {"policy_gradient_loss": policy_loss, "value_loss": value_loss}
            yield BatchMetrics({f"train/{name}": float(x.detach()) for name, x in losses.items()})

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self.moments)
        return {}

    def state_dict(self) -> Tree:
        """All that an iteration leaves for the next, but for the policy, which is kept anyway."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "reward_source": self.rewards.state_dict(),
        }

    def load_state_dict(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.rewards.load_state_dict(state["reward_source"])
