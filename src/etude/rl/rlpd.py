"""Reinforcement learning with prior data (Ball et al. 2023): SAC that also replays demonstrations.

Differences from SAC (`sac.py`):

1. Half of every minibatch is sampled from the dataset, the other half from the replay. There is no
   training before environment steps, and no imitation.
2. Critics are an ensemble with layer norm, which limits overestimation at actions that are in
   neither. The targets of a step are the minimum of two critics, drawn at random.
3. Critics are updated `actor_interval` times as often as actor and entropy coefficient; the actor
   maximises the mean of all critics.

The paper takes 20 gradient steps per environment step (from states). Here that ratio is
`train_batches` / steps of an iteration; it is 1 in the recipes, to save time, and the plan shows
it.

The rewards of the dataset must be those of the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.data.returns import td_targets
from etude.data.store.manifest import open_episodes
from etude.data.store.views import EpisodesOf, open_with_task
from etude.models.actors import Critics
from etude.planning.recipe import Recipe, Resolved, RewardsSection
from etude.rl import offline
from etude.rl.off_policy import ReplayGeometry
from etude.rl.offline import dataset_geometry
from etude.rl.sac import SAC, SACConfig
from etude.rl.sampling import Batch, Experience, Sample, mixture, uniform


class RLPDConfig(SACConfig):
    """SAC that also replays a dataset of demonstrations."""

    rewards_from: ClassVar[str] = ""

    kind: Literal["rlpd"] = Field(  # type: ignore[assignment]
        "rlpd", description="SAC that also replays demonstrations (RLPD)."
    )
    train_batches: int = Field(
        100,
        ge=1,
        description="Gradient steps of an iteration. The paper takes 20 for each environment step: "
        "20 x collector.num_envs x rollout_steps.",
    )
    share: float = Field(
        0.5, gt=0, lt=1, description="Fraction of every minibatch that is from the dataset."
    )
    num_critics: int = Field(10, ge=1, description="Critics of the ensemble.")
    subset: int = Field(
        2, ge=1, description="Critics, drawn at random, whose smallest estimate is the target."
    )
    actor_interval: int = Field(
        5, ge=1, description="Gradient steps of the critics per step of the actor."
    )

    def learns_from(self, recipe: Recipe) -> str:
        return "dataset"

    @property
    def offline(self) -> bool:
        return False

    @property
    def replayed(self) -> int:
        return self.batch_size - int(self.batch_size * self.share)

    def geometry(self, recipe: Recipe) -> ReplayGeometry | None:
        if recipe.env is None:
            raise UsageError(
                "rlpd learns in an environment: give one with --env.kind, --env.id or --env.task; "
                "`etude train iql` learns from a dataset alone."
            )
        if recipe.rewards.kind != "given":
            raise UsageError(
                f"rlpd learns from the rewards of environment and dataset; rewards.kind is "
                f"{recipe.rewards.kind}: leave it at given."
            )
        if getattr(recipe.policy, "layer_norm", "all") == "off":
            raise UsageError(
                "The critics of rlpd need layer norm: set --policy.layer-norm critic or all."
            )
        if self.subset > self.num_critics:
            raise UsageError(
                f"algorithm.subset {self.subset} is more than the {self.num_critics} critics: "
                f"use {self.num_critics} or fewer, or more algorithm.num_critics."
            )
        dataset_geometry(self)
        return super().geometry(recipe)

    def make(self, policy: Any, *parts: Any, **named: Any) -> RLPD:
        return RLPD(self, policy, *parts, **named)

    def update_lines(self, rewards: RewardsSection) -> list[str]:
        shown, batches = self.batch_size - self.replayed, self.train_batches
        return [
            f"update: {batches:,} batches of {self.batch_size:,} transitions, {shown:,} of them "
            f"from the dataset, for {self.num_critics} critics; "
            f"{batches // self.actor_interval:,} for the actor",
            *rewards.lines,
        ]

    def estimates(self, run: Resolved, training: Tree) -> dict[str, int]:
        found = super().estimates(run, training)
        return {**found, "workspace": found["workspace"] * max(self.num_critics, 2) // 2}

    def _notes(self, run: Resolved) -> list[str]:
        store = open_episodes(Path(self.dataset), ())
        episodes, steps = store.num_episodes, store.num_transitions
        store.close()
        data = f"{episodes:,} episodes of {steps:,} steps are replayed besides new experience."
        steps, batches = run.geometry.steps_per_iteration, self.train_batches
        ratio = (
            f"{batches / steps:.3g} gradient steps per environment step, to save time. The paper "
            f"takes 20, as does --algorithm.train-batches {20 * steps}: learning then takes "
            f"{20 * steps / batches:.3g} times as long."
        )
        return [*super()._notes(run), data, *([ratio] if batches < 20 * steps else [])]


class RLPD(SAC):
    """RLPD, as described in the module's docstring."""

    config: RLPDConfig

    def setup(self) -> None:
        super().setup()
        config, policy = self.config, self.policy
        store = open_with_task(Path(config.dataset), set(policy.observations))
        offline.check_fits(store, policy.observations, policy.action, policy.observations)
        if missing := set(policy.observations) - store.geometry.observations.keys():
            raise UsageError(
                f"{store.path} has no {', '.join(sorted(missing))}, which the policy reads: choose "
                "other observations, or record it again."
            )
        if unknown := store.labels.num_unrewarded:
            raise UsageError(
                f"{store.path} has no rewards for {unknown:,} of its {store.num_episodes:,} "
                "episodes, and rlpd needs those of the environment: record it with --reward task."
            )
        every = np.arange(store.num_episodes)
        self.demonstrations = EpisodesOf(store, every, policy.action)

    def make_critics(self, generator: torch.Generator | None) -> Critics:
        return self.policy.make_critics(generator, self.config.num_critics)

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        return mixture(self._demonstrated, super().sample, self.config.share)(
            store, generator, size
        )

    def _demonstrated(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        return uniform(self.demonstrations, generator, size)

    def begin_step(self) -> None:
        drawn = self._key.child("subset", self.num_updates).generator()
        among = drawn.choice(self.config.num_critics, self.config.subset, replace=False)
        self.among = torch.from_numpy(among).to(self.device)

    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        config, alpha = self.config, self.log_alpha.exp()
        targets = [self.target(b, z[1], alpha) for b, z in zip(batches, noises, strict=True)]
        metrics = self.regress(batches, targets, 1.0 / config.num_critics)
        self.update_targets()
        if self.num_updates % config.actor_interval == 0:
            metrics |= self._update_actor(batches, noises, alpha)
        return metrics

    @torch.no_grad()
    def target(self, batch: Batch, noise: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """The targets [n] of the critics."""
        actions, log_probs = self.policy.sample(batch.next_obs, noise)
        min_q = self.critic_target.module.min_q(batch.next_obs, actions, self.among)
        next_values = min_q - alpha * log_probs
        return td_targets(batch.rewards, next_values, batch.terminated, self.config.gamma)

    def _update_actor(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor], alpha: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Update the actor, on the mean of all critics, and the entropy coefficient."""
        drawn = [self.policy.sample(b.obs, z[0]) for b, z in zip(batches, noises, strict=True)]
        losses = []
        for batch, (actions, log_probs) in zip(batches, drawn, strict=True):
            mean_q = self.critics(batch.obs, actions).mean(0)
            losses.append((alpha * log_probs - mean_q).mean())
        metrics = {"train/actor_loss": self.minimise(self.actor_optimizer, losses)}
        return metrics | self.update_alpha([log_probs.detach() for _, log_probs in drawn], alpha)

    def check_unchanged(self) -> None:
        super().check_unchanged()
        self.demonstrations.check_unchanged()

    def state_dict(self) -> Tree:
        return {**super().state_dict(), "demonstrations": self.demonstrations.state_dict()}

    def load_state_dict(self, state: Tree) -> None:
        super().load_state_dict(state)
        self.demonstrations.load_state_dict(state["demonstrations"])

    def close(self) -> None:
        super().close()
        self.demonstrations.close()
