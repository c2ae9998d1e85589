"""Reinforcement learning with prior data (Ball et al. 2023): SAC that also replays demonstrations.

The gradient step is that of SAC (`sac.py`). Half of every minibatch is sampled from the dataset,
the other half from the replay. There is no training before environment steps, and no imitation.

The settings are those of the paper: critics are an ensemble with layer norm, which limits
overestimation at actions that are in neither, with targets from a random `subset` of two; they are
updated `actor_interval` times as often as actor and entropy coefficient.

The paper takes 20 gradient steps per environment step (from states). Here that ratio is
`train_batches` / steps of an iteration; it is 1 in the recipes, to save time, and the plan shows
it.

The rewards of the dataset must be those of the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.data.store.manifest import open_episodes
from etude.data.store.views import EpisodesOf, open_with_task
from etude.planning.recipe import Recipe, Resolved
from etude.rl import offline
from etude.rl.off_policy import ReplayGeometry
from etude.rl.offline import dataset_geometry
from etude.rl.sac import SAC, SACConfig
from etude.rl.sampling import Experience, Sample, mixture


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
    subset: int | None = Field(
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
        dataset_geometry(self)
        return super().geometry(recipe)

    def make(self, policy: Any, *parts: Any, **named: Any) -> RLPD:
        return RLPD(self, policy, *parts, **named)

    def _update_details(self) -> list[str]:
        shown = self.batch_size - self.replayed
        return [f"{shown:,} of them from the dataset", *super()._update_details()]

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

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        return mixture(self._demonstrated, super().sample, self.config.share)(
            store, generator, size
        )

    def _demonstrated(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        return self.uniform(self.demonstrations, generator, size)

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
