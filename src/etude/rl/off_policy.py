"""The base of off-policy algorithms (SAC, TD3, IQL, RLPD): replay, warm-up, shards, gradient steps.

An iteration, top to bottom:

1. `ingest`: the rollout is appended to the replay buffers (episode stores), one per shard.
2. `batches`: no gradient steps during the warm-up, in which actions are uniformly random; then
   `train_batches` of them. Before each, the reward source takes a gradient step of its own. Then
   each shard's part of the minibatch is sampled from its store and relabelled by the reward source;
   `step`, the algorithm's, computes targets and losses from tensors and takes the step. Its metrics
   and the norms of its gradients are read once: if one is not finite, `learn` undoes the step and
   repeats it with a check of every part, which names network, parameter and shard.
3. `end_iteration`: the observation normaliser, if any, is updated with the rollout.

With a dataset in place of the replay, nothing is collected and there is no warm-up: the first
iteration fits the normaliser to a sample of the dataset, and it is frozen from then on.

Gradients are summed in shard order. All random numbers are drawn from the given key, so a run that
is killed and resumed takes the same steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
from pydantic import Field

from etude.core.clock import Clock, Interval, Loops
from etude.core.contracts import ACTION, Array, BatchMetrics, Broadcast, EnvSpec, Fragment
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.metrics import Column, Curve, Health, Metric, Metrics, Warning
from etude.core.ranks import Ranks
from etude.core.trees import Tree, num_bytes
from etude.data.returns import td_targets
from etude.data.segments import BufferSpec, Ratio, SegmentBuffer, check_division, check_finite
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import LANES, store_specs
from etude.models.actors import Actor, Critics
from etude.models.encoders import random_shift
from etude.models.networks import merge_all
from etude.models.policies import make_policy
from etude.planning import memory
from etude.planning.recipe import (
    Inputs,
    Learner,
    PlanSection,
    Recipe,
    Resolved,
    RewardsSection,
    array_shapes,
)
from etude.planning.resolve import check_policy
from etude.rl import offline
from etude.rl.base import Adam, NetworkOptimizer, PolicyAlgorithm, TargetNetwork
from etude.rl.compiled import CompiledStep
from etude.rl.offline import Data, DatasetConfig, dataset_section, imitation_notes
from etude.rl.rewards.given import RewardSource
from etude.rl.rewards.rrd import RRD
from etude.rl.rewards.scores import EVAL_LOSS, constant_reward, evaluate
from etude.rl.sampling import (
    Batch,
    Experience,
    Sample,
    Sampler,
    ahead,
    fit_normaliser,
    multi_step,
    uniform,
)
from etude.runs import files
from etude.runs.folder import RunFolder


@dataclass(frozen=True)
class ReplayGeometry:
    """Sizes of environments, groups, minibatches and shards; they must divide each other."""

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
        """The geometry of one shard's store, when all of them together hold `capacity`."""
        lanes, share = self.num_envs // self.shards, capacity // self.shards
        if lanes > LANES:
            raise UsageError(
                f"collector.num_envs {self.num_envs:,} over learner.shards {self.shards} is more "
                f"than the maximum of {LANES:,} environments per replay: use at most "
                f"--collector.num-envs {LANES * self.shards}."
            )
        # Without a limit of episodes, the longest that a store of this capacity can hold.
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
    """Base of off-policy algorithms, as described in the module's docstring.

    It owns policy, critics, target critics, their optimizers and the replay.
    """

    policy: Actor
    noise_draws: ClassVar[int]
    """Standard normal numbers per transition and action dimension in a gradient step."""

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
        if config.mirror:
            policy.require_mirror()
        generator = torch.Generator().manual_seed(key.integer()) if device.type != "meta" else None
        self.critics = self.make_critics(generator).to(device)
        self.actor_optimizer = NetworkOptimizer("actor", self.policy, config.adam_epsilon)
        self.critic_optimizer = NetworkOptimizer("critics", self.critics, config.adam_epsilon)
        self.critic_target = TargetNetwork(self.critics)
        self.targets: list[tuple[TargetNetwork[Any], NetworkOptimizer]] = [
            (self.critic_target, self.critic_optimizer)
        ]
        self.optimizers: list[Adam] = [self.actor_optimizer, self.critic_optimizer]
        self.num_updates = 0
        self.drawn: dict[str, torch.Tensor] = {}
        """Tensors that `begin_step` draws."""
        self.checks, self._norms = False, dict[str, torch.Tensor]()
        self._before: list[torch.Tensor] = []
        self.compiled: CompiledStep | None = None
        self._was_compiled = False
        self.acts_at_random = True
        """Whether actions of the warm-up are random; a run that starts from another run's policy
        uses that policy instead."""
        self._moments: dict[str, Tree] = {}
        self._key = key
        self.setup()

    def make_critics(self, generator: torch.Generator | None) -> Critics:
        """Construct critics with random weights; without a generator on the meta device."""
        return self.policy.make_critics(generator)

    def setup(self) -> None:
        """Construct the additional parts of a subclass, at the end of `__init__`."""

    def begin_step(self) -> None:
        """Draw what a step needs besides minibatch and noise into `drawn`; by default nothing."""

    @property
    def intervals(self) -> tuple[int, ...]:
        """Gradient steps between two times that a part of `step` is due."""
        return (self.config.target_interval,)

    @property
    def due(self) -> tuple[bool, ...]:
        """Whether each part with an interval is due in this step."""
        return tuple(self.num_updates % interval == 0 for interval in self.intervals)

    @abstractmethod
    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Take one gradient step, a function of tensors alone; returns metrics [].

        batches: the shards' parts of a minibatch, whose observations are prepared features.
        noises: standard normal [noise_draws, n, dims] for each shard.
        """

    def learn(self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]) -> dict[str, float]:
        """Take one gradient step on the shards' parts of a minibatch; returns metrics.

        Raises `NonFinite` with the first part of the step that is not finite; no step is taken
        then. noises: standard normal [noise_draws, n, dims] for each shard.
        """
        prepare = self.policy.prepare
        features = [
            batch._replace(obs=prepare(batch.obs), next_obs=prepare(batch.next_obs), returns=None)
            for batch in batches
        ]
        self.begin_step()
        self.num_updates += 1
        if self.compiled is not None and not self.compiled.ready(self, features, noises):
            if self._was_compiled:
                raise self.compiled.unavailable()
            self.compiled = None
        if self.compiled is not None:
            values = self.compiled(self, features, noises)
        else:
            values = self._eager_step(features, noises)
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            self._name_fault(features, noises, bad[0])
        return {name: value for name, value in values.items() if not name.startswith(_NORM)}

    def read_step(
        self, features: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Take a step; returns its metrics and the norms of its gradients, []."""
        self._norms = {}
        return {**self.step(features, noises), **self._norms}

    def _eager_step(
        self, features: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Take a step and read its values; without a step if one is not finite."""
        changing = self.changing()
        self._before = self._before or [torch.empty_like(x) for x in changing]
        torch._foreach_copy_(self._before, changing)
        read = self.read_step(features, noises)
        values = torch.stack(list(read.values())).tolist()
        if not all(map(math.isfinite, values)):
            torch._foreach_copy_(changing, self._before)
        return dict(zip(read, values, strict=True))

    def bind(self, state: Sequence[torch.Tensor]) -> None:
        """Let `step` change these tensors, in the order of `changing`; for tracing."""
        rest = iter(state)
        for optimizer in self.optimizers:
            optimizer.bind(*(next(rest) for _ in optimizer.tensors()))
        for target, _ in self.targets:
            target.flat.bind(next(rest))

    def changing(self) -> list[torch.Tensor]:
        """The tensors that a gradient step changes."""
        followers = [target.data for target, _ in self.targets]
        return [x for optimizer in self.optimizers for x in optimizer.tensors()] + followers

    def _name_fault(
        self, features: Sequence[Batch], noises: Sequence[torch.Tensor], metric: str
    ) -> NoReturn:
        """Repeat a step with checks, which raise an error where it is not finite, and undo it."""
        before = [x.clone() for x in self.changing()]
        self.checks = True
        try:
            self.step(features, noises)
            raise NonFinite(metric)
        finally:
            self.checks = False
            self.num_updates -= 1
            torch._foreach_copy_(self.changing(), before)

    def minimise(self, optimizer: NetworkOptimizer, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Step a network along the gradient of the mean [] of the shards' losses []; returns it."""
        loss = optimizer.mean_gradient(losses) if self.checks else optimizer.gradient(losses)
        self._norms[_NORM + optimizer.name] = optimizer.flat.grad.norm()
        optimizer.step(self.config.learning_rate)
        return loss

    def broadcast(self, clock: Clock) -> Broadcast:
        broadcast = super().broadcast(clock)
        warming_up = self.config.is_warming_up(clock.now.timesteps)
        broadcast.policy["explore"] = torch.tensor(self.acts_at_random and warming_up)
        return broadcast

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Append the rollout to the stores.

        Returns "replay/transitions", their number in the stores; or "dataset/passes", the mean
        number of times a transition of the dataset has been sampled after this iteration.
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
        # A reward source with its own sampling may depend on what it has just learned.
        is_uniform = type(self.rewards).sample is RewardSource.sample
        coming = ahead(drawn, config.prefetch and config.offline and is_uniform)
        for b in range(config.train_batches):
            reward_metrics = self.rewards.update(self.stores, key.child("rewards", b))
            samples = next(coming)
            batches = [self.rewards.relabel(Batch.of(sample, self.device)) for sample in samples]
            batches = [self._augmented(*pair) for pair in zip(batches, chances, strict=True)]
            noises = [self._noise(generator, size) for generator in chances]
            try:
                learned = self.learn(batches, noises)
            except NonFinite as error:
                raise _locate_fault(batches, error) from error
            rate = {"train/learning_rate": config.learning_rate}
            yield BatchMetrics({**reward_metrics, **learned, **rate})

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        """Sample `size` transitions of a shard's experience."""
        own = self.rewards.sample if self.config.return_steps == 1 else self.uniform
        return own(store, generator, size)

    @property
    def uniform(self) -> Sampler:
        """Samples transitions uniformly, over `return_steps` steps."""
        steps, gamma = self.config.return_steps, self.config.gamma
        return uniform if steps == 1 else multi_step(steps, gamma)

    def td_targets(self, batch: Batch, next_values: torch.Tensor) -> torch.Tensor:
        """TD targets [n] of Q for the values [n] of the next states."""
        discounts = self.config.gamma if batch.discounts is None else batch.discounts
        return td_targets(batch.rewards, next_values, batch.terminated, discounts)

    def _augmented(self, batch: Batch, generator: np.random.Generator) -> Batch:
        """Shift the images that the policy reads at random (DrQ, Kostrikov et al. 2020); with
        `mirror`, replace a random half of the transitions by their mirror images."""
        if self.config.mirror:
            batch = self._mirrored(batch, generator.random(len(batch.rewards)) < 0.5)
        names, pixels = self.policy.image_names, self.config.random_shift
        if not names or not pixels:
            return batch

        def moved(obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return obs | {n: random_shift(obs[n], pixels, generator) for n in names}

        return batch._replace(obs=moved(batch.obs), next_obs=moved(batch.next_obs))

    def _mirrored(self, batch: Batch, chosen: Array) -> Batch:
        """Replace the chosen [n] transitions by their mirror images."""
        policy = self.policy
        at = torch.from_numpy(chosen.nonzero()[0]).to(self.device)

        def replaced(x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            return x.index_copy(0, at, image[at])

        def obs(seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            images = policy.mirrored(seen)
            return seen | {name: replaced(seen[name], images[name]) for name in images}

        actions = replaced(batch.actions, policy.mirror[ACTION].of(batch.actions))
        return batch._replace(obs=obs(batch.obs), next_obs=obs(batch.next_obs), actions=actions)

    def _noise(self, generator: np.random.Generator, size: int) -> torch.Tensor:
        """[noise_draws, size, dims] standard normal."""
        noise = torch.empty(self.noise_draws, size, self.policy.num_actions)
        generator.standard_normal(dtype=np.float32, out=noise.numpy())
        return noise.to(self.device)

    def regress(
        self, batches: Sequence[Batch], targets: Sequence[torch.Tensor], weight: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Step the critics towards their targets; returns metrics: their loss and mean Q.

        The loss is `weight` times the sum of all critics' mean squared errors. batches and targets
        [n] are per shard.
        """
        values, losses = [], []
        for batch, target in zip(batches, targets, strict=True):
            q = self.critics(batch.obs, batch.actions)
            values.append(q.detach().mean())
            errors = (q - target).square()
            errors = errors if batch.weights is None else batch.weights * errors
            losses.append(weight * errors.mean(-1).sum())
        loss = self.minimise(self.critic_optimizer, losses)
        return {"train/critic_loss": loss, "train/q_mean": torch.stack(values).mean()}

    def update_targets(self) -> None:
        """Every `target_interval` gradient steps, move the target networks by Polyak averaging."""
        if self.num_updates % self.config.target_interval == 0:
            for target, optimizer in self.targets:
                target.follow(optimizer.flat.data, 1.0 - self.config.polyak)

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self._moments)
        self._moments = {}
        return {}

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """Also take over critics and target critics from the training state, if there is one; the
        warm-up uses the policy instead of random actions."""
        self.load_policy(arrays)
        self.acts_at_random = False
        if training is not None:
            self._load_critics(self.critic_optimizer.flat.data, training["critics"])
            self._load_critics(self.critic_target.data, training["critic_target"])

    def check_unchanged(self) -> None:
        """Raise an error if a file of the replay or of the dataset was changed from outside."""
        for store in self.stores:
            store.check_unchanged()

    def state_dict(self) -> Tree:
        """All but the policy's arrays, which are saved in `policy/`, and experience, which is in
        the stores' files; this has their names."""
        optimizer, saved = self.critic_optimizer, self._saved_critics
        moments = {"mean": saved(optimizer.mean), "square": saved(optimizer.square)}
        return {
            "critics": saved(optimizer.flat.data.detach()),
            "critic_target": saved(self.critic_target.data),
            "critic_optimizer": {**optimizer.state_dict(), **moments},
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "num_updates": self.num_updates,
            "step": "eager" if self.compiled is None else "compiled",
            "acts_at_random": self.acts_at_random,
            "rewards": self.rewards.state_dict(),
            "stores": {_shard_name(s): store.state_dict() for s, store in enumerate(self.stores)},
        }

    def load_state_dict(self, state: Tree) -> None:
        optimizer, moments = self.critic_optimizer, state["critic_optimizer"]
        self._load_critics(optimizer.flat.data, state["critics"])
        self._load_critics(self.critic_target.data, state["critic_target"])
        self._load_critics(optimizer.mean, moments["mean"])
        self._load_critics(optimizer.square, moments["square"])
        optimizer.count.copy_(torch.as_tensor(moments["count"]))
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.num_updates = int(state["num_updates"])
        self._was_compiled = state.get("step") == "compiled" and self.num_updates > 0
        if self.num_updates and not self._was_compiled:
            self.compiled = None  # A run that could not be compiled stays eager.
        self.acts_at_random = bool(state["acts_at_random"])
        self.rewards.load_state_dict(state["rewards"])
        for s, store in enumerate(self.stores):
            store.load_state_dict(state["stores"][_shard_name(s)])

    def _saved_critics(self, vector: torch.Tensor) -> torch.Tensor:
        """A flat vector of the critics, [n], in the order of checkpoints."""
        return vector if vector.is_meta else vector[self.critics.saved_order()]

    def _load_critics(self, vector: torch.Tensor, saved: Any) -> None:
        """Load a flat vector of the critics, [n], from a checkpoint."""
        vector[self.critics.saved_order()] = torch.as_tensor(saved, device=vector.device)

    def retire(self, states: Sequence[Tree]) -> None:
        """Delete files of the replay that neither this run nor any of these states needs.

        states: `state_dict`, with or without arrays, of every checkpoint that can be resumed.
        """
        for s, store in enumerate(self.stores):
            named = [state["stores"][_shard_name(s)] for state in states]
            if not any("sealed_sha256" in state for state in named):  # Not for a dataset.
                store.delete_garbage(named)

    def close(self) -> None:
        """Close the files of the stores."""
        for store in self.stores:
            store.close()


def example_batch(policy: Actor, size: int, multi_step: bool) -> Batch:
    """A minibatch of zeros with features, of the shapes that a uniform sampler gives."""
    obs = {
        name: torch.zeros((size, *spec.shape), dtype=getattr(torch, spec.dtype))
        for name, spec in policy.observations.items()
    }
    features = policy.prepare(obs)
    ended = torch.zeros(size, dtype=torch.bool)
    actions = torch.zeros(size, policy.num_actions)
    discounts = torch.zeros(size) if multi_step else None
    return Batch(features, actions, torch.zeros(size), ended, features, discounts=discounts)


def _shard_name(shard: int) -> str:
    return f"{shard:06d}"


def _locate_fault(batches: Sequence[Batch], error: NonFinite) -> NonFinite:
    """Name the first non-finite number in the minibatch itself, if any; otherwise as in `error`."""
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


_NORM = "the norm of the gradient of the "
_MOST_BLOCKS = 1 << 17
"""The largest number of files of a replay, of up to 1 GiB each: a checkpoint lists their hashes."""


def _q_diverges(health: Health) -> Warning | None:
    """Truncated episodes make Q values several times the returns; more than that is divergence."""
    values = [abs(value) for value in health.recent("train/q_mean")]
    returns = max(map(abs, health.series("rollout/ep_rew_mean")), default=math.inf)
    if not values or min(values) < 10 * returns:
        return None
    grows = values == sorted(values) and values[-1] > 1.05 * values[0]
    if not grows and min(values) < 30 * returns:
        return None
    return Warning(
        "Q values diverge",
        f"they are at {health.recent('train/q_mean')[-1]:.3g}, and no return was above "
        f"{returns:.3g}: lower algorithm.learning_rate or algorithm.gamma, or raise "
        "algorithm.polyak",
    )


METRICS: Metrics = (
    Metric(
        "train/q_mean", "Q", ".2f", Column(20, 8, "online"), Curve(61, "magenta"), check=_q_diverges
    ),
    Metric("train/q_mean", "Q", ".3g", Column(20, 9, "offline")),
    Metric(
        "train/critic_loss", "Q loss", ".3g", Column(21, 9, "online"), Curve(62, "cyan", (0, None))
    ),
    Metric("train/critic_loss", "Q loss", ".3g", Column(21, 10, "offline")),
    Metric(
        "eval/action_error",
        "eval actions",
        ".3g",
        Column(40, 13, "offline"),
        about="squared error of actions, per dimension",
        summary="squared error of actions {value:.3g}",
    ),
    Metric("eval/q_mean", "eval Q", about="Q of the policy's actions, by its critics"),
    Metric("eval/q_data", "data Q", about="Q of the dataset's actions, by the same critics"),
)


class OffPolicyConfig(DatasetConfig):
    """Base config of off-policy algorithms. A subclass defines `make` and `policies`."""

    metrics: ClassVar[Metrics] = METRICS
    aliases = {  # noqa: RUF012
        "learning_rate": "lr",
        "capacity": "buffer_size replay_size",
        "warmup_steps": "learning_starts start_steps",
        "train_batches": "gradient_steps",
        "rollout_steps": "train_freq",
        "return_steps": "n_steps n_step num_steps estimation_step",
        "polyak": "tau",
        "batch_size": "minibatch_size",
        "target_interval": "target_update_interval",
    }
    rewards_from: ClassVar[str] = "replay"
    compiles: ClassVar[bool] = True

    rollout_steps: int = Field(100, ge=1, description="Steps of every environment in an iteration.")
    train_batches: int = Field(100, ge=1, description="Gradient steps of an iteration.")
    batch_size: int = Field(256, ge=1, description="Transitions of one minibatch, over all shards.")
    warmup_steps: int = Field(
        10_000, ge=0, description="Environment steps of random actions before the first gradient."
    )
    capacity: int = Field(
        1_000_000,
        ge=1,
        le=1 << 50,
        description="Observations in the replay buffer; the oldest episodes are evicted.",
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")
    return_steps: int = Field(
        1,
        ge=1,
        le=1_000,
        description="Steps of the n-step return in a target; more spread rewards faster, but later "
        "actions are those of earlier policies.",
    )
    polyak: float = Field(0.995, ge=0, le=1, description="1 - tau of the target networks' updates.")
    target_interval: int = Field(
        1, ge=1, description="Gradient steps between updates of the target networks."
    )
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate of Adam.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    random_shift: int = Field(
        4,
        ge=0,
        description="Images that the policy reads are shifted at random by up to this number of "
        "pixels, before each gradient step; 0: not shifted.",
    )
    mirror: bool = Field(
        False,
        description="Replace a random half of every minibatch by its mirror image, left for right: "
        "for symmetric robots.",
    )
    normalise_observations: bool = Field(
        False, description="Normalise observations by their running mean and standard deviation."
    )

    @abstractmethod
    def make(
        self,
        policy: Any,
        stores: Sequence[Experience],
        rewards: RewardSource,
        key: Key,
        device: torch.device,
    ) -> OffPolicy:
        """Construct the algorithm; for a plan on the meta device."""

    def learns_from(self, recipe: Recipe) -> str:
        return "dataset" if recipe.env is None else ""

    @property
    def offline(self) -> bool:
        """Whether a dataset replaces the replay."""
        return bool(self.dataset)

    @property
    def replayed(self) -> int:
        """Transitions of a minibatch that are sampled from the replay."""
        return self.batch_size

    @property
    def imitates(self) -> bool:
        """Whether the policy is trained to imitate the actions of a dataset."""
        return False

    def idle_iterations(self, steps_per_iteration: int) -> int:
        """The number of first iterations, whose steps do not yet complete the warm-up."""
        return max(-(-self.warmup_steps // steps_per_iteration) - 1, 0)

    def is_warming_up(self, timesteps: int) -> bool:
        """Whether the warm-up goes on after `timesteps` steps; a dataset needs none."""
        return not self.offline and timesteps < self.warmup_steps

    def geometry(self, recipe: Recipe) -> ReplayGeometry | None:
        """The geometry of the replay, None for a dataset. Raise an error for sizes that do not
        divide and for settings that do not fit."""
        check_policy(recipe, self.policies)
        if recipe.learner.reduce != "exact":
            raise UsageError(
                f"{self.kind} learns in one process, without ranks whose gradients learner.reduce "
                f"{recipe.learner.reduce} would sum: leave it at exact."
            )
        if self.return_steps > 1 and not recipe.rewards.uses_stored:
            raise UsageError(
                f"rewards.kind {recipe.rewards.kind} gives rewards to single transitions, which "
                f"algorithm.return_steps {self.return_steps} would sum: use "
                "--algorithm.return-steps 1."
            )
        shards = recipe.learner.shards
        if self.offline or recipe.env is None:
            offline.check(recipe, self.batch_size)
            return None
        recipe.rewards.require_replay(self.kind)
        recipe.rewards.check(shards)
        geometry = ReplayGeometry(
            num_envs=recipe.collector.num_envs,
            steps=self.rollout_steps,
            batch_size=self.batch_size,
            shards=shards,
            envs_per_group=recipe.collector.envs_per_group,
        )
        if self.imitates:
            raise UsageError(
                "algorithm.behaviour_coef imitates the actions of a dataset, and none is given: "
                "give one with --algorithm.dataset FOLDER, or set behaviour_coef to None."
            )
        return geometry

    def loops(self, recipe: Recipe, geometry: ReplayGeometry | None) -> Loops:
        if geometry is None:
            return Loops.of(recipe.clock, 0, self.train_batches)
        steps = geometry.steps_per_iteration
        return Loops.of(recipe.clock, steps, self.train_batches, self.idle_iterations(steps))

    def inputs(self, recipe: Recipe) -> Inputs | None:
        return offline.inputs(self, recipe) if self.offline or recipe.env is None else None

    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        policy = make_policy(run.recipe.policy, run.spec, key.child("policy"))
        shards = run.recipe.learner.shards
        if run.data is not None:
            algorithm = self._made(run, policy, run.data.shards(shards), key, run.device)
            return dataset_learner(run, algorithm)
        geometry, place = run.geometry, folder.path / "replay"
        files.make_folder(place)
        shape = geometry.store(run.spec, self.capacity)
        stores = [
            EpisodeStore.create(place / f"shard-{s}", shape, files.current()) for s in range(shards)
        ]
        algorithm = self._made(run, policy, stores, key, run.device)
        staging = BufferSpec(run.spec, {}, geometry.num_envs, geometry.steps, geometry.steps)
        buffers = [SegmentBuffer(staging) for _ in range(1 + run.recipe.collector.lag)]
        return Learner(algorithm, buffers)

    def _made(
        self,
        run: Resolved,
        policy: Any,
        stores: Sequence[Experience],
        key: Key | None,
        device: torch.device,
    ) -> OffPolicy:
        """Construct the algorithm and its reward source; without a key on the meta device."""
        rewards_key = None if key is None else key.child("rewards")
        rewards = run.recipe.rewards.for_replay(run, rewards_key, device)
        made = self.make(policy, stores, rewards, (key or Key(0)).child("critics"), device)
        if run.recipe.learner.step == "compiled" and key is not None:
            size = self.batch_size // len(stores)
            example = example_batch(made.policy, size, multi_step=self.return_steps > 1)
            noise = torch.zeros(made.noise_draws, size, made.policy.num_actions)
            made.compiled = CompiledStep(made, [example] * len(stores), [noise] * len(stores))
        return made

    def plan(self, run: Resolved) -> PlanSection:
        if run.data is not None:
            return dataset_plan(self, run)
        geometry, total, env = run.geometry, run.loops.total, run.spec
        if run.spec.agents > 1:
            raise UsageError(
                f"{self.kind} stores whole episodes, and agents of this environment come and go: "
                "use algorithm ppo."
            )
        shape = geometry.store(env, self.capacity)
        steps = total.timesteps // geometry.shards
        planned = [PlannedStore(shape, steps) for _ in range(geometry.shards)]
        training, rewards = self.planned(run, cast(list[EpisodeStore], planned))
        staging = BufferSpec(env, {}, geometry.num_envs, geometry.steps, geometry.steps).num_bytes
        arrays = {f"obs/{name}": spec for name, spec in env.observations.items()}
        arrays["actions"] = env.action.array
        samples = self.train_batches * self.replayed / geometry.steps_per_iteration
        return PlanSection(
            geometry={
                "rollout_steps": geometry.steps,
                "batch_size": geometry.batch_size,
                "train_batches": self.train_batches,
                "warmup_steps": self.warmup_steps,
                "capacity": self.capacity,
                **rewards.geometry,
            },
            lines=self.update_lines(rewards),
            shapes=array_shapes(arrays, [self.capacity], [self.batch_size]),
            title="Replay: [transitions, ...]",
            usage=f"every step is used {samples:g} times, on average; {geometry.shards} shard(s)",
            data={
                "gradient_samples_per_step": samples,
                "gradient_samples": float(total.updates * self.batch_size),
            },
            memory={
                "buffer": staging * (1 + run.recipe.collector.lag),
                **self.learner_bytes(run, training),
            },
            estimates={
                **memory.collection(run, geometry.steps_per_iteration),
                **self.estimates(run, training),
            },
            training=training,
            disk=self._disk(run, shape),
            notes=self._notes(run),
        )

    def _disk(self, run: Resolved, shape: StoreGeometry) -> dict[str, int]:
        """Bytes of the replay on disk: live data, and evicted data that checkpoints still need.

        Just before a save, the oldest checkpoint is `keep_last` saves old, and everything collected
        since then is on disk. Blocks are sparse files: unwritten parts take no space.
        """
        recipe, loops, shards = run.recipe, run.loops, run.geometry.shards
        waited = loops.longest_wait(Interval.parse(recipe.checkpoint.every))
        since = min(waited * recipe.checkpoint.keep_last, loops.iterations)
        steps = [n * loops.steps_per_iteration // shards for n in (since, loops.iterations)]
        held, everything = map(shape.bytes_of, steps)
        everything += shape.lanes * shape.step_record.itemsize  # the observations ahead
        live = min(shape.num_bytes, everything)
        return {
            "replay": live * shards,
            "replay_held": min(held, everything - live) * shards,
        }

    def planned(self, run: Resolved, stores: Sequence[Experience]) -> tuple[Tree, RewardsSection]:
        """The shapes of the algorithm's state in a checkpoint, and the reward source's section."""
        algorithm = self._made(run, run.deployed, stores, None, torch.device("meta"))
        return algorithm.state_dict(), run.recipe.rewards.plan(algorithm.rewards)

    def update_lines(self, rewards: RewardsSection) -> list[str]:
        """Lines of the plan about the update."""
        batches = f"{self.train_batches:,} batches of {self.batch_size:,} transitions"
        return [f"update: {', '.join([batches, *self._update_details()])}", *rewards.lines]

    def _update_details(self) -> list[str]:
        """Parts of the line of the plan about an update, after its size."""
        steps = self.return_steps
        return [f"with {steps}-step returns"] if steps > 1 else []

    def learner_bytes(self, run: Resolved, training: Tree) -> dict[str, int]:
        """Bytes in memory of the learner, by part."""
        learned = {k: v for k, v in training.items() if k not in ("stores", "rewards")}
        model = {k: v for k, v in training["rewards"].items() if k != "best"}
        policy = sum(p.nbytes for p in run.deployed.parameters())
        stepped = {k: v for k, v in learned.items() if k != "returns"}  # XQC's, of rollouts.
        return {
            "model": policy,
            "learner_state": num_bytes(learned),
            "learner_undo": num_bytes(stepped) + policy,
            "reward_model": 2 * num_bytes(model),
        }

    def estimates(self, run: Resolved, training: Tree) -> dict[str, int]:
        """Estimated bytes of activations in a gradient step, and the maximum of IRCR's best
        episodes."""
        layers = 32 * self.batch_size * sum(run.deployed.config.hidden) * 4  # type: ignore[attr-defined]
        # For images: activations of the actor's gradient, the critics' gradient and the targets.
        layers += 3 * self.batch_size * memory.image_activations(run) * 4
        best = num_bytes(training["rewards"].get("best", {}))
        return {"workspace": layers, **({"best_episodes": best} if best else {})}

    def _notes(self, run: Resolved) -> list[str]:
        notes = [
            "The replay is on disk and memory-mapped. The checkpoints that are kept (--checkpoint."
            "keep-last, --checkpoint.every) need data that was evicted since the oldest of them: "
            "replay held."
        ]
        if not run.recipe.task.exactness().exact:
            notes.append(
                "A resume truncates the episodes in progress, with the sums of their rewards so "
                "far as returns, and begins new ones: the environment cannot be restored."
            )
        if idle := run.loops.idle_iterations:
            started = run.recipe.start_from is not None
            by = "with the policy it starts from" if started else "with random actions"
            notes.append(
                f"The first {idle:,} iterations only collect, {by}: the warm-up is "
                f"{self.warmup_steps:,} steps."
            )
        return notes


@dataclass(frozen=True)
class PlannedStore:
    """Stands for a store in a plan: the shapes of its state at the end of a run."""

    shape: StoreGeometry
    steps: int

    def state_dict(self) -> Tree:
        held = min(self.steps, self.shape.capacity or self.steps)
        episodes = held // self.shape.max_episode_steps
        return {
            "steps": _log_state(self.steps, held, self.shape.block_slots),
            "finals": _log_state(episodes, episodes, self.shape.block_episodes),
            "episodes": _log_state(episodes, episodes, self.shape.block_episodes),
            "open_starts": torch.zeros(self.shape.lanes, dtype=torch.int64),
            "open_returns": torch.zeros(self.shape.lanes, dtype=torch.float64),
            "ahead": {
                name: np.empty((self.shape.lanes, *spec.shape), spec.dtype)
                for name, spec in self.shape.observations.items()
            },
        }


def _log_state(count: int, held: int, block: int) -> Tree:
    blocks = held // block + 1
    if blocks > _MOST_BLOCKS:
        raise UsageError(
            f"The replay would be {blocks:,} files, and a checkpoint can name at most "
            f"{_MOST_BLOCKS:,}: lower algorithm.capacity."
        )
    return {"first": count - held, "count": count, "sha256": ["0" * 64] * blocks}


def dataset_learner(run: Resolved, algorithm: OffPolicy) -> Learner:

    return offline.make_learner(
        run, algorithm, lambda: evaluate_offline(algorithm, run.data), EVAL_LOSS
    )


def dataset_plan(config: OffPolicyConfig, run: Resolved) -> PlanSection:
    """The plan of a learner that learns from a dataset."""
    data: Data = run.data
    training, rewards = config.planned(run, data.shards(run.recipe.learner.shards))
    sizes = {"batch_size": config.batch_size, "train_batches": config.train_batches}
    return dataset_section(
        run,
        data.store,
        data.reads,
        (data.training, data.held_out),
        config.batch_size,
        {**sizes, **rewards.geometry},
        _notes(config, run.recipe, data),
        lines=config.update_lines(rewards),
        memory=config.learner_bytes(run, training),
        estimates=config.estimates(run, training),
        training=training,
    )


def _notes(config: OffPolicyConfig, recipe: Recipe, data: Data) -> list[str]:
    notes = []
    unknown = data.store.labels.num_unrewarded
    if unknown and recipe.rewards.uses_stored:
        notes.append(
            f"{unknown:,} of {data.store.num_episodes:,} episodes have no rewards and count as 0: "
            "the policy can only imitate them."
        )
    if not config.imitates:
        notes.append(
            "Critics overestimate actions that are not in the dataset, and nothing keeps the "
            "policy close to it: algorithm td3 with --algorithm.behaviour-coef 0.4 imitates it."
        )
    return notes + imitation_notes(recipe, data)


def evaluate_offline(learner: OffPolicy, data: Data) -> dict[str, float]:
    """Metrics on held-out whole episodes; {} if there are none.

    "eval/action_error": mean squared error of the policy's most likely actions, per dimension in
    [-1, 1]. "eval/q_mean": mean Q value of the policy's actions, "eval/q_data" of the dataset's
    actions; if the former is far above the latter and above any return, the critics overestimate
    actions that are not in the dataset. If a reward is learned at the same time, also its scores.
    """
    held_out = data.held_out
    if not held_out.num_episodes:
        return {}
    errors, chosen, taken = [], [], []
    policy, device = learner.policy, learner.device
    with torch.no_grad():
        for number in range(held_out.num_whole):  # clips, which come after, repeat their steps
            steps, _ = held_out.episode(number)
            obs = {n: torch.from_numpy(steps.obs[n]).to(device) for n in policy.observations}
            taken_actions = torch.from_numpy(steps.actions).to(device)
            actions = policy.act(obs, {}, None).actions
            features = policy.prepare(obs)
            errors.append((actions - taken_actions).square().mean(1).cpu().numpy())
            chosen.append(learner.critics.min_q(features, actions).cpu().numpy())
            taken.append(learner.critics.min_q(features, taken_actions).cpu().numpy())
    metrics = {
        "eval/action_error": float(np.concatenate(errors).mean(dtype=np.float64)),
        "eval/q_mean": float(np.concatenate(chosen).mean(dtype=np.float64)),
        "eval/q_data": float(np.concatenate(taken).mean(dtype=np.float64)),
    }
    if isinstance(learner.rewards, RRD):
        constant = constant_reward(data.training)
        metrics |= evaluate(learner.rewards.network, held_out, None, constant)
    return metrics
