"""Soft actor-critic: maximise rewards and the entropy of the policy.

One gradient step, top to bottom (`step`):

1. Critics: regress to  r + gamma * (min of the target critics - alpha * log-probability)  of an
   action sampled in the next state; to r alone if the episode terminated.
2. Every `actor_interval` steps, actor: minimise  alpha * log-probability - min of the updated
   critics  of an action sampled in the replayed state.
3. With it, alpha, the entropy coefficient, increases while the entropy is below its target.
4. The target critics follow the critics.

All of them use the alpha from before this step. The reward source (`rewards/`) gives r,
`off_policy.py` samples the states. A test compares the update with the one of stable-baselines3.

With `subset` the critics are an ensemble as in REDQ (Chen et al. 2021): the minimum in a target is
that of a random subset, and the actor maximises the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from etude.core.errors import NonFinite, UsageError
from etude.core.metrics import Column, Curve, Metric, Metrics
from etude.core.trees import Tree
from etude.models.actors import EVERY, Critics, SquashedPolicy
from etude.planning.recipe import Recipe, Resolved
from etude.rl.base import Adam
from etude.rl.off_policy import METRICS, OffPolicy, OffPolicyConfig, ReplayGeometry
from etude.rl.sampling import Batch


class SACConfig(OffPolicyConfig):
    """Soft actor-critic."""

    policies: ClassVar[str] = "squashed"
    aliases = OffPolicyConfig.aliases | {
        "alpha": "ent_coef entropy_coef",
        "num_critics": "n_critics",
        "actor_interval": "policy_delay",
    }
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

    num_critics: int = Field(2, ge=1, description="Critics of the ensemble.")
    subset: int | None = Field(
        None,
        ge=1,
        description="Critics, drawn at random in each gradient step, whose smallest estimate is "
        "the target; the actor then maximises the mean of all (REDQ). None: the smallest estimate "
        "of all critics, for targets and actor.",
    )
    actor_interval: int = Field(
        1, ge=1, description="Gradient steps of the critics per step of the actor."
    )

    def read_at_start(self) -> Collection[str]:
        return ("initial_alpha",)

    def make(self, *parts: Any, **named: Any) -> SAC:
        return SAC(self, *parts, **named)

    def geometry(self, recipe: Recipe) -> ReplayGeometry | None:
        if self.subset is not None and self.subset > self.num_critics:
            raise UsageError(
                f"algorithm.subset {self.subset} is more than the {self.num_critics} critics: "
                f"use {self.num_critics} or fewer, or more algorithm.num_critics."
            )
        return super().geometry(recipe)

    def _update_details(self) -> list[str]:
        details = super()._update_details()
        if self.num_critics != 2:
            details.append(f"for {self.num_critics} critics")
        if self.actor_interval > 1:
            details.append(f"{self.train_batches // self.actor_interval:,} batches for the actor")
        return details

    def estimates(self, run: Resolved, training: Tree) -> dict[str, int]:
        found = super().estimates(run, training)
        return {**found, "workspace": found["workspace"] * max(self.num_critics, 2) // 2}


class SAC(OffPolicy):
    """SAC, as described in the module's docstring."""

    config: SACConfig
    policy: SquashedPolicy
    noise_draws = 2

    def make_critics(self, generator: torch.Generator | None) -> Critics:
        return self.policy.make_critics(generator, self.config.num_critics)

    def setup(self) -> None:
        config = self.config
        given = config.target_entropy
        self.target_entropy = -float(self.policy.num_actions) if given is None else given
        start = math.log(config.alpha or config.initial_alpha)
        log_alpha = torch.full((1,), start, device=self.device)
        self.alpha_optimizer = Adam(log_alpha, torch.zeros_like(log_alpha), config.adam_epsilon)
        self.optimizers.append(self.alpha_optimizer)

    @property
    def log_alpha(self) -> torch.Tensor:
        """[1] logarithm of the entropy coefficient."""
        return self.alpha_optimizer.data

    @property
    def intervals(self) -> tuple[int, ...]:
        return (*super().intervals, self.config.actor_interval)

    def begin_step(self) -> None:
        """Draw the critics of this step's targets."""
        num, subset = self.config.num_critics, self.config.subset
        if subset is not None:
            drawn = self._key.child("subset", self.num_updates).generator()
            among = drawn.choice(num, subset, replace=False)
            self.drawn = {"among": torch.from_numpy(among).to(self.device)}

    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        config, alpha = self.config, self.log_alpha.exp()
        targets = [self.target(b, z[1], alpha) for b, z in zip(batches, noises, strict=True)]
        metrics = self.regress(batches, targets, 1.0 / config.num_critics)
        if self.num_updates % config.actor_interval == 0:
            metrics |= self._update_actor(batches, noises, alpha)
        self.update_targets()
        return metrics

    @torch.no_grad()
    def target(self, batch: Batch, noise: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """The targets [n] of the critics."""
        actions, log_probs = self.policy.sample(batch.next_obs, noise)
        among = self.drawn.get("among", EVERY)
        min_q = self.critic_target.module.min_q(batch.next_obs, actions, among)
        return self.td_targets(batch, min_q - alpha * log_probs)

    def _update_actor(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor], alpha: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Update actor and entropy coefficient; returns metrics."""
        drawn = [self.policy.sample(b.obs, z[0]) for b, z in zip(batches, noises, strict=True)]
        losses = []
        for batch, (actions, log_probs) in zip(batches, drawn, strict=True):
            if self.config.subset is None:
                q = self.critics.min_q(batch.obs, actions)
            else:
                q = self.critics(batch.obs, actions).mean(0)
            losses.append((alpha * log_probs - q).mean())
        metrics = {"train/actor_loss": self.minimise(self.actor_optimizer, losses)}
        return metrics | self.update_alpha([log_probs.detach() for _, log_probs in drawn], alpha)

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
        self.alpha_optimizer.grad.copy_(-surplus)
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
