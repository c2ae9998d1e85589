"""What SAC and TD3 share: replay, warm-up, shards, and gradient steps that are checked first.

An iteration, top to bottom:

1. `ingest`: what was collected is appended to the episode stores, one per shard.
2. `batches`: nothing while the warm-up lasts, in which actions are uniformly random. Then
   `train_batches` gradient steps. Before each, the reward source takes one. Then every
   shard's part of a batch is sampled from that shard's store and relabelled by the reward source;
   `learn` makes targets, losses and the step.
3. `end_iteration`: the observation normaliser, where one is wanted, takes in what was collected.

With a dataset in place of the replay nothing is collected and there is no warm-up: the first
iteration fits the normaliser to a sample of the dataset, and it stays as it is from then on.

Gradients are summed in shard order. All noise is drawn from the key that is handed in, so a run
that is killed and resumed takes the same steps.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import mse_loss

from etude.core.clock import Clock
from etude.core.contracts import BatchMetrics, Broadcast, EnvSpec, Fragment
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.data.segments import Ratio, check_division, check_finite
from etude.data.store.episodes import StoreGeometry
from etude.data.store.geometry import LANES, store_specs
from etude.models.actors import Actor, Critics
from etude.models.encoders import random_shift
from etude.models.normalise import merge_all
from etude.models.policies import Features
from etude.rl.base import PolicyAlgorithm
from etude.rl.optimizer import NetworkOptimizer, TargetNetwork
from etude.rl.rewards.given import RewardSource
from etude.rl.sampling import Batch, Experience, Sample, ahead, fit_normaliser

if TYPE_CHECKING:
    from etude.rl.replay import OffPolicyConfig


@dataclass(frozen=True)
class ReplayGeometry:
    """How environments, groups, batches and shards divide; illegal sizes are refused."""

    num_envs: int
    steps: int
    batch_size: int
    shards: int
    envs_per_group: int

    def __post_init__(self) -> None:
        check_division(asdict(self), _ratios, _OPTIONS, lambda sizes: "Use learner.shards 1.")

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.steps

    def store(self, env: EnvSpec, capacity: int) -> StoreGeometry:
        """What one shard's store holds, when all of them together hold `capacity`."""
        lanes, share = self.num_envs // self.shards, capacity // self.shards
        if lanes > LANES:
            raise UsageError(
                f"collector.num_envs {self.num_envs:,} over learner.shards {self.shards} is more "
                f"than the {LANES:,} environments that a replay takes: use at most "
                f"--collector.num-envs {LANES * self.shards}."
            )
        # Where episodes have no limit, the longest that a store of this capacity takes.
        longest = env.max_episode_steps or max(1, share // (2 * lanes) - 1)
        least = 2 * self.num_envs * (longest + 1)
        if capacity < least:
            raise UsageError(
                f"algorithm.capacity {capacity:,} is too small for {self.num_envs:,} environments "
                f"with episodes of up to {longest:,} steps, since those in progress could fill "
                f"half of it: use {least:,} or more, or fewer collector.num_envs."
            )
        return StoreGeometry(store_specs(env), lanes, longest, share)


def _ratios(sizes: SimpleNamespace) -> tuple[Ratio, ...]:
    num_envs, group, shards = sizes.num_envs, sizes.envs_per_group, sizes.shards
    groups = "the number of groups (collector.num_envs / collector.envs_per_group)"
    return (
        ("collector.num_envs", num_envs, "collector.envs_per_group", group),
        (groups, num_envs // group, "learner.shards", shards),
        ("algorithm.batch_size", sizes.batch_size, "learner.shards", shards),
    )


_OPTIONS = {
    "num_envs": "collector.num_envs",
    "envs_per_group": "collector.envs_per_group",
    "batch_size": "algorithm.batch_size",
    "shards": "learner.shards",
}


class OffPolicy(PolicyAlgorithm, ABC):
    """See the module's text. Owns policy, critics, their targets, optimizers and the replay."""

    policy: Actor
    noise_draws: ClassVar[int]
    """Standard normal numbers per action dimension that a gradient step takes for a transition."""

    def __init__(
        self,
        config: OffPolicyConfig,
        policy: Actor,
        stores: Sequence[Experience],
        rewards: RewardSource,
        key: Key,
        device: torch.device,
    ) -> None:
        """One store per shard; the critics' initial weights are drawn from `key`."""
        self.config, self.stores, self.rewards = config, stores, rewards
        self.policy, self.device = policy.to(device), device
        generator = torch.Generator().manual_seed(key.integer()) if device.type != "meta" else None
        self.critics = self.make_critics(generator).to(device)
        self.actor_optimizer = NetworkOptimizer("actor", self.policy, config.adam_epsilon)
        self.critic_optimizer = NetworkOptimizer("critics", self.critics, config.adam_epsilon)
        self.critic_target = TargetNetwork(self.critics)
        self.num_updates = 0
        self.acts_at_random = True
        """In the warm-up; a run that starts from another's policy acts by that instead."""
        self._moments: dict[str, Tree] = {}
        self._key = key
        self.setup()

    def make_critics(self, generator: torch.Generator | None) -> Critics:
        """New critics, their weights drawn; without a generator on the meta device."""
        return self.policy.make_critics(generator)

    def setup(self) -> None:
        """Makes what only this algorithm has; all else is there already."""

    @abstractmethod
    def learn(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One gradient step on the shards' parts of a batch; metrics [] about it.

        noises: [noise_draws, n, dims] standard normal, for each shard.
        """

    def broadcast(self, clock: Clock) -> Broadcast:
        broadcast = super().broadcast(clock)
        warming_up = self.config.is_warming_up(clock.now.timesteps)
        broadcast.policy["explore"] = torch.tensor(self.acts_at_random and warming_up)
        return broadcast

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Experience goes to the stores, where it can be drawn at once.

        "replay/transitions": those held. "dataset/passes": how often a transition of the dataset
        has been drawn, on average, after this iteration.
        """
        for group, fragment in enumerate(fragments):
            check_finite(fragment, group * len(fragment.rewards))
        per_shard = len(fragments) // len(self.stores)
        for s, store in enumerate(self.stores if fragments else ()):
            store.append(fragments[s * per_shard : (s + 1) * per_shard])
        normalises = self.config.normalise_observations and fragments
        self._moments = merge_all([f.moments for f in fragments]) if normalises else {}
        held = float(sum(store.num_transitions for store in self.stores))
        if self.config.offline:
            updates = clock.now.updates + self.config.train_batches
            return {"dataset/passes": updates * self.config.batch_size / held}
        return {"replay/transitions": held}

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """Gradient steps, once the warm-up is over."""
        config, shards = self.config, range(len(self.stores))
        if config.offline and config.normalise_observations and not clock.now.iterations:
            data: Any = self.stores  # which are views of the dataset then
            fit_normaliser(self.policy, data, config.batch_size, key.child("moments"))
        size = config.batch_size // len(self.stores)
        draws = [key.child("replay", s).generator() for s in shards]
        chances = [key.child("noise", s).generator() for s in shards]
        drawn = (
            [
                self.sample(store, generator, size)
                for store, generator in zip(self.stores, draws, strict=True)
            ]
            for _ in range(config.train_batches)
        )
        # A reward source that draws in its own way may do so by what it has just learned.
        alike = type(self.rewards).sample is RewardSource.sample
        coming = ahead(drawn, config.prefetch and config.offline and alike)
        for b in range(config.train_batches):
            reward_metrics = self.rewards.update(self.stores, key.child("rewards", b))
            samples = next(coming)
            batches = [self.rewards.relabel(Batch.of(sample, self.device)) for sample in samples]
            batches = [self._shifted(*pair) for pair in zip(batches, chances, strict=True)]
            noises = [self._noise(generator, size) for generator in chances]
            try:
                learned = self.learn(batches, noises)
            except NonFinite as error:
                raise _culprit(batches, error) from error
            values = torch.stack(list(learned.values())).tolist()
            metrics = {**reward_metrics, **dict(zip(learned, values, strict=True))}
            yield BatchMetrics({**metrics, "train/learning_rate": config.learning_rate})

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        """So many transitions of a shard's experience to learn from."""
        return self.rewards.sample(store, generator, size)

    def _shifted(self, batch: Batch, generator: np.random.Generator) -> Batch:
        """The batch with each image that the policy reads moved at random (DrQ, Kostrikov et al.
        2020)."""
        names, pixels = self.policy.image_names, self.config.random_shift
        if not names or not pixels:
            return batch

        def moved(obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return obs | {n: random_shift(obs[n], pixels, generator) for n in names}

        return batch._replace(obs=moved(batch.obs), next_obs=moved(batch.next_obs))

    def _noise(self, generator: np.random.Generator, size: int) -> torch.Tensor:
        """[noise_draws, size, dims] standard normal."""
        noise = torch.empty(self.noise_draws, size, self.policy.num_actions)
        generator.standard_normal(dtype=np.float32, out=noise.numpy())
        return noise.to(self.device)

    def critic_gradient(
        self,
        features: Sequence[Features],
        batches: Sequence[Batch],
        targets: Sequence[torch.Tensor],
        weight: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss [] whose gradient the critics' optimizer then holds, and the mean Q value [].

        The loss is `weight` times the sum of all critics' mean squared errors. Per shard:
        features, transitions, and targets [n] of Q.
        """
        values, losses = [], []
        for x, batch, target in zip(features, batches, targets, strict=True):
            estimates = self.critics(x, batch.actions)
            values.append(torch.stack([q.detach() for q in estimates]).mean())
            if batch.weights is None:
                errors = [mse_loss(q, target) for q in estimates]
            else:
                errors = [(batch.weights * (q - target).square()).mean() for q in estimates]
            losses.append(weight * functools.reduce(torch.add, errors))
        return self.critic_optimizer.mean_gradient(losses), torch.stack(values).mean()

    @property
    def _targets_are_due(self) -> bool:
        return self.num_updates % self.config.target_interval == 0

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self._moments)
        self._moments = {}
        return {}

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """With the training state come critics and targets; the warm-up then acts by the policy
        instead of at random."""
        self.load_policy(arrays)
        self.acts_at_random = False
        if training is not None:
            self.critic_optimizer.flat.data.copy_(torch.as_tensor(training["critics"]))
            self.critic_target.data.copy_(torch.as_tensor(training["critic_target"]))

    def check_unchanged(self) -> None:
        """Raise where a file of the replay or of the dataset was changed by anyone else."""
        for store in self.stores:
            store.check_unchanged()

    def state_dict(self) -> Tree:
        """The policy's own arrays are kept beside this, in `policy/`; experience is in the stores'
        files, which this names."""
        return {
            "critics": self.critic_optimizer.flat.data.detach(),
            "critic_target": self.critic_target.data,
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "num_updates": self.num_updates,
            "acts_at_random": self.acts_at_random,
            "rewards": self.rewards.state_dict(),
            "stores": {_shard_name(s): store.state_dict() for s, store in enumerate(self.stores)},
        }

    def load_state_dict(self, state: Tree) -> None:
        self.critic_optimizer.flat.data.copy_(torch.as_tensor(state["critics"]))
        self.critic_target.data.copy_(torch.as_tensor(state["critic_target"]))
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.num_updates = int(state["num_updates"])
        self.acts_at_random = bool(state["acts_at_random"])
        self.rewards.load_state_dict(state["rewards"])
        for s, store in enumerate(self.stores):
            store.load_state_dict(state["stores"][_shard_name(s)])

    def retire(self, states: Sequence[Tree]) -> None:
        """Delete replayed experience that neither this run nor any of these states still needs.

        states: what `state_dict` gave, arrays or not, to every checkpoint that can be resumed.
        """
        for s, store in enumerate(self.stores):
            named = [state["stores"][_shard_name(s)] for state in states]
            if not any("sealed_sha256" in state for state in named):  # A dataset has no garbage.
                store.delete_garbage(named)

    def close(self) -> None:
        """Let go of the stores' files."""
        for store in self.stores:
            store.close()


def _shard_name(shard: int) -> str:
    return f"{shard:06d}"


def _culprit(batches: Sequence[Batch], error: NonFinite) -> NonFinite:
    """A bad number in the batch itself, if there is one; else what the networks made of it."""
    arrays: dict[str, torch.Tensor] = {}
    found = ""
    for s, batch in enumerate(batches):
        named = {f"observation '{name}'": x for name, x in batch.obs.items()}
        named |= {"action": batch.actions, "reward": batch.rewards}
        named |= {f"next observation '{name}'": x for name, x in batch.next_obs.items()}
        for name, x in named.items():
            arrays[f"shard{s}_{name}".replace("'", "").replace(" ", "_")] = x
            bad = x.isfinite().logical_not().nonzero()
            if len(bad) and not found:
                found = f"the {name} of replayed step {int(bad[0][0])} of a batch (shard {s})"
        arrays[f"shard{s}_terminated"] = batch.terminated
    return NonFinite(found or error.where, arrays)
