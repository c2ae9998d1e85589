"""Soft actor-critic: maximise rewards and the entropy of the policy.

One gradient step, top to bottom (`step`):

1. Sample actions of the policy in the replayed states, with their log-probabilities.
2. Critics: regress to  r + gamma * (min of the target critics - alpha * log-probability)  of an
   action sampled in the next state; to r alone if the episode terminated.
3. Alpha, the entropy coefficient, increases while the entropy is below its target.
4. Actor: minimise  alpha * log-probability - min of the updated critics  of its action.
5. The target critics follow the critics.

All of them use the alpha from before this step. The reward source (`rewards/`) gives r,
`off_policy.py` samples the states. The order of steps is that of stable-baselines3; a test compares
the two updates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from etude.core.errors import NonFinite
from etude.core.metrics import Column, Curve, Metric, Metrics
from etude.core.trees import Tree
from etude.data.returns import td_targets
from etude.models.actors import SquashedPolicy
from etude.rl.base import Adam
from etude.rl.off_policy import METRICS, OffPolicy, OffPolicyConfig
from etude.rl.sampling import Batch


class SACConfig(OffPolicyConfig):
    """Soft actor-critic."""

    policies: ClassVar[str] = "squashed"
    aliases = OffPolicyConfig.aliases | {"alpha": "ent_coef entropy_coef"}
    metrics: ClassVar[Metrics] = (
        *METRICS,
        Metric(
            "train/ent_coef",
            "alpha",
            ".3g",
            Column(22, 8, "online"),
            Curve(64, "yellow", (0, None), "entropy coef."),
            explored_by="algorithm.target_entropy or algorithm.alpha, algorithm.warmup_steps",
        ),
    )

    kind: Literal["sac"] = Field("sac", description="Soft actor-critic.")
    alpha: float | None = Field(None, gt=0, description="Entropy coefficient; None learns it.")
    initial_alpha: float = Field(
        1.0,
        gt=0,
        description="Initial value of a learned entropy coefficient. It falls by about a quarter "
        "in 1,000 gradient steps: start below the reward per step, or entropy outweighs rewards.",
    )
    target_entropy: float | None = Field(
        None,
        description="Entropy that a learned coefficient aims at; None: minus the action dimension.",
    )

    def read_at_start(self) -> Collection[str]:
        return ("initial_alpha",)

    def make(self, *parts: Any, **named: Any) -> SAC:
        return SAC(self, *parts, **named)


class SAC(OffPolicy):
    """SAC, as described in the module's docstring."""

    config: SACConfig
    policy: SquashedPolicy
    noise_draws = 2

    def setup(self) -> None:
        config = self.config
        given = config.target_entropy
        self.target_entropy = -float(self.policy.num_actions) if given is None else given
        self.log_alpha = torch.full(
            (1,), math.log(config.alpha or config.initial_alpha), device=self.device
        )
        self._alpha_grad = torch.zeros_like(self.log_alpha)
        self.alpha_optimizer = Adam(self.log_alpha, self._alpha_grad, config.adam_epsilon)
        self.optimizers.append(self.alpha_optimizer)

    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        alpha = self.log_alpha.exp()
        drawn = [self.policy.sample(b.obs, z[0]) for b, z in zip(batches, noises, strict=True)]

        targets = [self.target(b, z[1], alpha) for b, z in zip(batches, noises, strict=True)]
        metrics = self.regress(batches, targets, weight=0.5)
        metrics |= self.update_alpha([log_probs.detach() for _, log_probs in drawn], alpha)

        actor_losses = []
        for batch, (actions, log_probs) in zip(batches, drawn, strict=True):
            min_q = self.critics.min_q(batch.obs, actions)
            actor_losses.append((alpha * log_probs - min_q).mean())
        metrics["train/actor_loss"] = self.minimise(self.actor_optimizer, actor_losses)
        self.update_targets()
        return metrics

    @torch.no_grad()
    def target(self, batch: Batch, noise: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """The targets [n] of the critics."""
        actions, log_probs = self.policy.sample(batch.next_obs, noise)
        min_q = self.critic_target.module.min_q(batch.next_obs, actions)
        next_values = min_q - alpha * log_probs
        return td_targets(batch.rewards, next_values, batch.terminated, self.config.gamma)

    @torch.no_grad()
    def update_alpha(
        self, log_probs: Sequence[torch.Tensor], alpha: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Step a learned entropy coefficient; returns metrics, with `alpha` [1] before the step.

        log_probs: the shards' log-probabilities [n]. The loss is
        -log alpha * mean(log-probability + target entropy).
        """
        metrics = {"train/ent_coef": alpha.squeeze()}
        if self.config.alpha is not None:
            return metrics
        surplus = torch.stack([x.mean() for x in log_probs]).mean() + self.target_entropy
        loss = -self.log_alpha.squeeze() * surplus
        if self.checks and not bool(loss.isfinite()):
            raise NonFinite("the loss of the entropy coefficient")
        self._alpha_grad.copy_(-surplus)
        self.alpha_optimizer.step(self.config.learning_rate)
        return {**metrics, "train/ent_coef_loss": loss}

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        super().start_from(arrays, training)
        if training is not None:
            self.log_alpha.copy_(torch.as_tensor(training["log_alpha"]))

    def state_dict(self) -> Tree:
        alpha = {"log_alpha": self.log_alpha, "alpha_optimizer": self.alpha_optimizer.state_dict()}
        return {**super().state_dict(), **alpha}

    def load_state_dict(self, state: Tree) -> None:
        super().load_state_dict(state)
        self.log_alpha.copy_(torch.as_tensor(state["log_alpha"]))
        self.alpha_optimizer.load_state_dict(state["alpha_optimizer"])
