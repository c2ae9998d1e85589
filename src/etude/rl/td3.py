"""Twin delayed deep deterministic policy gradient.

One gradient step, top to bottom (`step`):

1. Critics: regress to  r + gamma * min of the target critics  at the target actor's action in the
   next state, plus clipped noise that smooths sharp peaks of the critics; to r alone if the episode
   terminated.
2. Every `delay` steps, actor: maximise Q, the first critic's value of its action. With
   `behaviour_coef` it also imitates the replayed action (TD3+BC, for learning from a dataset, where
   errors of the critics at other actions are never corrected): it minimises
   (action - replayed action)^2 - Q / (behaviour_coef * mean of |Q|).
3. Every `target_interval` steps the target networks follow critics and actor.

The reward source (`rewards/`) gives r, `off_policy.py` samples the states. A test compares this
update with the one of stable-baselines3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch.nn import functional

from etude.core.clock import Clock
from etude.core.contracts import Broadcast
from etude.core.metrics import Column, Metric, Metrics
from etude.core.trees import Tree
from etude.data.returns import td_targets
from etude.models.actors import DeterministicPolicy
from etude.rl.base import TargetNetwork
from etude.rl.off_policy import METRICS, OffPolicy, OffPolicyConfig
from etude.rl.sampling import Batch

_TINY = 1e-8
"""Lower bound of the mean of |Q|, which is divided by."""


class TD3Config(OffPolicyConfig):
    """Twin delayed deep deterministic policy gradient."""

    policies: ClassVar[str] = "deterministic"
    metrics: ClassVar[Metrics] = (
        *METRICS,
        Metric("train/behaviour_error", "imitation", ".3g", Column(22, 10, "offline")),
        Metric(
            "train/actor_loss",
            "actor loss",
            explored_by="algorithm.exploration, algorithm.warmup_steps",
        ),
    )

    kind: Literal["td3"] = Field("td3", description="Twin delayed DDPG.")
    exploration: float = Field(0.1, ge=0, description="Std of the exploration noise.")
    target_noise: float = Field(0.2, ge=0, description="Std of the noise on target actions.")
    target_noise_clip: float = Field(0.5, ge=0, description="Clip range of the target noise.")
    delay: int = Field(2, ge=1, description="Gradient steps of the critics per step of the actor.")
    behaviour_coef: float | None = Field(
        None,
        gt=0,
        description="Weight of imitating the actions of a dataset: 1 / alpha of TD3+BC, whose "
        "default 2.5 is 0.4 here. None trains without imitation.",
    )
    target_interval: int = Field(
        2, ge=1, description="Gradient steps between updates of the target networks."
    )

    @property
    def imitates(self) -> bool:
        return self.behaviour_coef is not None

    def make(self, *parts: Any, **named: Any) -> TD3:
        return TD3(self, *parts, **named)


class TD3(OffPolicy):
    """TD3, as described in the module's docstring."""

    config: TD3Config
    policy: DeterministicPolicy
    noise_draws = 1

    def setup(self) -> None:
        self.actor_target = TargetNetwork(self.policy.actor)
        self.targets.append((self.actor_target, self.actor_optimizer))

    def broadcast(self, clock: Clock) -> Broadcast:
        broadcast = super().broadcast(clock)
        broadcast.policy["exploration"] = torch.tensor(self.config.exploration)
        return broadcast

    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        config = self.config
        targets = [self.target(batch, z[0]) for batch, z in zip(batches, noises, strict=True)]
        metrics = self.regress(batches, targets)

        if self.num_updates % config.delay == 0:
            chosen = [self.policy.actions(batch.obs) for batch in batches]
            pairs = zip(batches, chosen, strict=True)
            q_values = [self.critics.first_q(batch.obs, actions) for batch, actions in pairs]
            actor_losses = [-q.mean() for q in q_values]
            if config.behaviour_coef is not None:
                errors = [
                    functional.mse_loss(actions, batch.actions)
                    for actions, batch in zip(chosen, batches, strict=True)
                ]
                size = torch.stack([q.detach().abs().mean() for q in q_values]).mean()
                share = 1.0 / (config.behaviour_coef * size.clamp_min(_TINY))
                actor_losses = [
                    share * loss + error for loss, error in zip(actor_losses, errors, strict=True)
                ]
                metrics["train/behaviour_error"] = torch.stack(errors).detach().mean()
            metrics["train/actor_loss"] = self.minimise(self.actor_optimizer, actor_losses)

        self.update_targets()
        return metrics

    @torch.no_grad()
    def target(self, batch: Batch, noise: torch.Tensor) -> torch.Tensor:
        """The targets [n] of the critics."""
        config, following = self.config, batch.next_obs
        limit = config.target_noise_clip
        smoothing = (config.target_noise * noise).clamp(-limit, limit)
        actions = (self.actor_target.module(following).tanh() + smoothing).clamp(-1.0, 1.0)
        min_q = self.critic_target.module.min_q(following, actions)
        return td_targets(batch.rewards, min_q, batch.terminated, config.gamma)

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        super().start_from(arrays, training)
        known = self.actor_optimizer.flat.data if training is None else training["actor_target"]
        self.actor_target.data.copy_(torch.as_tensor(known))

    def state_dict(self) -> Tree:
        return {**super().state_dict(), "actor_target": self.actor_target.data}

    def load_state_dict(self, state: Tree) -> None:
        super().load_state_dict(state)
        self.actor_target.data.copy_(torch.as_tensor(state["actor_target"]))
