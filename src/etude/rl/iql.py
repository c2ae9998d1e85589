"""Implicit Q-learning (Kostrikov et al. 2021): a policy from a dataset, whose critics are only
evaluated at actions of the dataset.

One gradient step, top to bottom (`step`):

1. Values: V(s) regresses to an upper expectile of the target critics' minimum at the dataset's
   actions. Errors where V is too low have the weight `expectile`, others 1 - `expectile`, so V
   approaches the value of the better actions in the dataset.
2. Critics: regress to  r + gamma * V(s'),  to r alone if the episode terminated.
3. Actor: the squared error to the dataset's action, weighted by exp(temperature * (Q - V)): actions
   better than V are imitated more.
4. Every `target_interval` steps the target critics follow.

The reward source (`rewards/`) gives r, `off_policy.py` samples the states. With an environment and
no dataset the same update learns from the replay; it then needs a larger `temperature` and more
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from etude.core.clock import Clock
from etude.core.contracts import Broadcast
from etude.core.metrics import Column, Metric, Metrics
from etude.core.trees import Tree
from etude.data.returns import td_targets
from etude.models.actors import DeterministicPolicy
from etude.planning.recipe import Recipe
from etude.rl.base import NetworkOptimizer
from etude.rl.off_policy import METRICS, OffPolicy, OffPolicyConfig
from etude.rl.sampling import Batch


class IQLConfig(OffPolicyConfig):
    """Implicit Q-learning."""

    policies: ClassVar[str] = "deterministic"
    metrics: ClassVar[Metrics] = (
        *METRICS,
        Metric("train/v_mean", "V", ".3g", Column(22, 9, "offline"), epoch=2),
        Metric("train/weight_mean", "weight", ".3g", Column(23, 8, "offline")),
        Metric(
            "train/actor_loss",
            "actor loss",
            explored_by="algorithm.exploration, algorithm.warmup_steps",
        ),
    )

    kind: Literal["iql"] = Field("iql", description="Implicit Q-learning.")
    expectile: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="Expectile of Q at the dataset's actions that V approaches; .5 is the mean.",
    )
    temperature: float = Field(
        3.0,
        ge=0,
        description="Preference for better actions; 0 imitates all actions equally.",
    )
    max_weight: float = Field(100.0, gt=0, description="Largest weight of an action.")
    exploration: float = Field(0.1, ge=0, description="Std of the exploration noise.")

    def learns_from(self, recipe: Recipe) -> str:
        return "dataset"

    @property
    def imitates(self) -> bool:
        return bool(self.dataset)

    def make(self, *parts: Any) -> IQL:
        return IQL(self, *parts)


class IQL(OffPolicy):
    """IQL, as described in the module's docstring."""

    config: IQLConfig
    policy: DeterministicPolicy
    noise_draws = 1

    def setup(self) -> None:
        generator = None
        if self.device.type != "meta":
            generator = torch.Generator().manual_seed(self._key.child("values").integer())
        self.values = self.policy.make_values(generator).to(self.device)
        self.value_optimizer = NetworkOptimizer("values", self.values, self.config.adam_epsilon)
        self.optimizers.append(self.value_optimizer)

    def broadcast(self, clock: Clock) -> Broadcast:
        broadcast = super().broadcast(clock)
        broadcast.policy["exploration"] = torch.tensor(self.config.exploration)
        return broadcast

    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        config = self.config
        value_losses, advantages, v_means = [], [], []
        for batch in batches:
            with torch.no_grad():
                q = self.critic_target.module.min_q(batch.obs, batch.actions)
            values = self.values(batch.obs).squeeze(-1)
            advantage = q - values
            below = (advantage < 0).float()
            weight = (config.expectile - below).abs()  # 1 - expectile where V is too high
            value_losses.append((weight * advantage.square()).mean())
            advantages.append(advantage.detach())
            v_means.append(values.detach().mean())
        targets = [self.target(batch) for batch in batches]
        metrics = {"train/value_loss": self.minimise(self.value_optimizer, value_losses)}
        metrics |= self.regress(batches, targets)

        weights = [(config.temperature * a).exp().clamp(max=config.max_weight) for a in advantages]
        actor_losses = [
            (w * (self.policy.actions(batch.obs) - batch.actions).square().mean(-1)).mean()
            for w, batch in zip(weights, batches, strict=True)
        ]
        metrics["train/actor_loss"] = self.minimise(self.actor_optimizer, actor_losses)
        self.update_targets()
        return metrics | {
            "train/v_mean": torch.stack(v_means).mean(),
            "train/weight_mean": torch.stack([w.mean() for w in weights]).mean(),
        }

    @torch.no_grad()
    def target(self, batch: Batch) -> torch.Tensor:
        """The targets [n] of the critics."""
        following = self.values(batch.next_obs).squeeze(-1)
        return td_targets(batch.rewards, following, batch.terminated, self.config.gamma)

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        super().start_from(arrays, training)
        if training is not None:
            self.value_optimizer.flat.data.copy_(torch.as_tensor(training["values"]))

    def state_dict(self) -> Tree:
        values = {
            "values": self.value_optimizer.flat.data.detach(),
            "value_optimizer": self.value_optimizer.state_dict(),
        }
        return {**super().state_dict(), **values}

    def load_state_dict(self, state: Tree) -> None:
        super().load_state_dict(state)
        self.value_optimizer.flat.data.copy_(torch.as_tensor(state["values"]))
        self.value_optimizer.load_state_dict(state["value_optimizer"])
