"""Proximal policy optimisation over a segment buffer.

An iteration, top to bottom:

1. `ingest`: the reward source relabels the rollout; rewards are scaled, values predicted, and
   advantages computed along the steps of each environment.
2. `batches`: first the reward source's gradient steps, if it learns. Then every segment once per
   update epoch, in a new permutation (or drawn by priority). Each minibatch is one gradient step
   on  policy + value_coef * value - entropy_coef * entropy,  where the value loss is half the mean
   squared error. The first iterations of a run only collect: the normaliser has no statistics yet.
3. `end_iteration`: the observation normaliser is updated with the rollout. It is frozen from the
   rollout to the last minibatch, so the probability ratio of the first minibatch is 1.

The ratio is relative to the proximal policy, that is the policy at the start of the update. With
collector.lag an older policy has collected the steps; it enters the policy loss as an importance
weight.

The buffer is divided into shards of fixed environments. All sums over it (moments, advantage
statistics, gradients) are in shard order, so one process with all shards and several ranks that
share them agree bit for bit. `rl/base.py` sums, checks and applies gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial, reduce
from operator import itemgetter
from statistics import fmean, median
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from etude.core.clock import Clock
from etude.core.contracts import ACTION, Array, BatchMetrics, Fragment, Observations
from etude.core.keys import Key
from etude.core.metrics import (
    RECENT,
    Column,
    Curve,
    Health,
    Metric,
    Metrics,
    Warning,
    is_doing_well,
)
from etude.core.ranks import ALONE, Ranks, raise_first
from etude.core.trees import Tree
from etude.data import returns
from etude.data.segments import SegmentBuffer, SegmentGeometry, join, non_finite
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.networks import RewardScaler, merge_all, merge_moments
from etude.models.policies import Features, map_features
from etude.rl.base import AdaptiveRate, Finding, NetworkOptimizer, PolicyAlgorithm
from etude.rl.on_policy import Minibatch, OnPolicyConfig, Shard, policy_inputs, to_segments
from etude.rl.rewards.given import GIVEN, RewardSource


def kl_high(health: Health) -> Warning | None:
    values = health.recent("train/approx_kl")
    if not values or min(values) < 0.06 or is_doing_well(health):
        return None
    return Warning(
        "KL too high",
        f"the policy moves by {values[-1]:.3f} in KL per update: lower algorithm.learning_rate or "
        "algorithm.update_epochs, or set algorithm.target_kl",
    )


def entropy_collapsed(health: Health) -> Warning | None:
    """Needs a success rate: without one, learning the task looks the same."""
    std, success = health.series("train/std"), health.recent("rollout/success_rate")
    if not std or not success or std[-1] > 0.1 * std[0] or fmean(success) > 0.8:
        return None
    return Warning(
        "entropy collapsed",
        f"the action spread fell from {std[0]:.2f} to {std[-1]:.3f} before the task was "
        "learned: raise algorithm.entropy_coef",
    )


def value_blind(health: Health) -> Warning | None:
    """Low explained variance counts only while returns vary: once all returns are about the same,
    the value loss is low, too."""
    rows = health.rows[-max(RECENT, len(health.rows) // 4) :]
    explained = health.series("train/explained_variance", rows)
    losses = health.series("train/value_loss")
    if health.progress < 0.4 or len(explained) < RECENT or fmean(explained) > 0.25:
        return None
    small = losses and median(health.series("train/value_loss", rows)) < 0.3 * max(losses)
    if small or is_doing_well(health):
        return None
    return Warning(
        "value function explains nothing",
        f"explained variance is {fmean(explained):.2f}: check algorithm.value_coef and the "
        "reward's scale, give the critic more observations, or lower algorithm.gamma",
    )


METRICS: Metrics = (
    Metric(
        "train/approx_kl",
        "kl",
        ".4f",
        Column(20, 8),
        Curve(61, "magenta", (0, None), "KL"),
        check=kl_high,
    ),
    Metric("train/clip_fraction", "clip", ".0%", Column(21, 7)),
    Metric("train/value_loss", "value loss", curve=Curve(63, "cyan", (0, None))),
    Metric(
        "train/std",
        "std",
        ".2f",
        Column(23, 6),
        Curve(64, "yellow", (0, None)),
        check=entropy_collapsed,
        reduce="last",
        explored_by="policy.init_std, algorithm.entropy_coef",
    ),
    Metric(
        "train/explained_variance",
        "explained",
        ".2f",
        Column(22, 10),
        Curve(62, "cyan", (-1, 1), "explained var."),
        check=value_blind,
    ),
)


class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation."""

    metrics: ClassVar[Metrics] = METRICS
    aliases = {  # noqa: RUF012
        "learning_rate": "lr",
        "rollout_steps": "n_steps num_steps num_steps_per_env",
        "minibatch_size": "batch_size mini_batch_size",
        "update_epochs": "n_epochs num_epochs epochs num_learning_epochs",
        "gae_lambda": "lam lambda",
        "clip": "clip_range clip_coef clip_param",
        "value_clip": "clip_range_vf",
        "value_coef": "vf_coef value_loss_coef",
        "entropy_coef": "ent_coef",
        "horizon": "seq_len sequence_length",
    }

    kind: Literal["ppo"] = Field("ppo", description="Proximal policy optimisation.")
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate of Adam at the start.")
    final_learning_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Learning rate at the end as a fraction of learning_rate; linear in between.",
    )
    sampling: Literal["uniform", "prioritised"] = Field(
        "uniform",
        description="uniform: every segment once per update epoch. prioritised: drawn with "
        "probability proportional to (sum of |advantage|)^priority_alpha.",
    )
    priority_alpha: float = Field(
        0.8, ge=0, le=1, description="Exponent of the priorities; 0 draws uniformly."
    )
    priority_beta: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Exponent of the importance weights that correct for prioritised draws, at "
        "the start; it rises linearly to 1 at the end.",
    )
    adam_epsilon: float = Field(1e-5, gt=0, description="Adam's epsilon.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of GAE.")
    advantages: Literal["gae", "vtrace"] = Field(
        "vtrace",
        description="vtrace corrects value targets and traces by importance weights where "
        "collector.lag makes experience stale; without lag it equals gae.",
    )
    clip: float = Field(0.2, gt=0, description="Clip range of the probability ratio around 1.")
    value_clip: float | None = Field(None, gt=0, description="Clip range of value changes, if any.")
    value_coef: float = Field(
        1.0,
        ge=0,
        description="Weight of the value loss, which is half the mean squared error: 1 here is "
        "vf_coef .5 in stable-baselines3.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    bound_coef: float = Field(
        0.0, ge=0, description="Weight of the loss that keeps a box policy's mean inside [-1, 1]."
    )
    anchor_coef: float = Field(
        0.0, ge=0, description="Weight of the squared distance to the run's initial parameters."
    )
    max_grad_norm: float = Field(0.5, gt=0, description="Norm that gradients are clipped to.")
    target_kl: float | None = Field(
        None,
        gt=0,
        description="An update ends before a minibatch whose approximate KL is 1.5 times this.",
    )
    desired_kl: float | None = Field(
        None,
        gt=0,
        description="Adapt the learning rate after every minibatch to an approximate KL of about "
        "this (rsl_rl's adaptive schedule); none follows final_learning_rate.",
    )
    mirror: bool = Field(
        False,
        description="Replace a random half of the segments by their mirror images, left for right, "
        "in every update epoch: for symmetric robots.",
    )
    normalise_rewards: bool = Field(True, description="Divide rewards by the std of returns.")

    def read_at_start(self) -> Collection[str]:
        return () if self.desired_kl is None else ("learning_rate",)

    def schedules(self, progress: float) -> dict[str, float]:
        """Values of the fields that change over a run, at a progress from 0 to 1."""
        rates = (self.learning_rate, self.learning_rate * self.final_learning_rate)
        ends = {"learning_rate": rates}
        if self.sampling == "prioritised":
            ends["priority_beta"] = (self.priority_beta, 1.0)
        return {name: start + (end - start) * progress for name, (start, end) in ends.items()}

    @property
    def may_stop_early(self) -> str | None:
        return None if self.target_kl is None else "target_kl may end an update early"

    def coverage(self, geometry: SegmentGeometry) -> float:
        """With equal priorities, the maximum, a minibatch omits a segment with probability
        1 - 1 / minibatches."""
        if self.sampling == "uniform":
            return 1.0
        draws = geometry.num_minibatches * self.update_epochs
        return 1.0 - (1.0 - 1.0 / geometry.num_minibatches) ** draws

    def make(self, *parts: Any, **named: Any) -> PPO:
        return PPO(self, *parts, **named)


LOSS_METRICS = (
    "train/policy_gradient_loss",
    "train/value_loss",
    "train/entropy_loss",
    "train/approx_kl",
    "train/clip_fraction",
)


class PPO(PolicyAlgorithm):
    """PPO, as described in the module's docstring."""

    policy: ActorCritic

    def __init__(
        self,
        config: PPOConfig,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: RewardSource = GIVEN,
        ranks: Ranks = ALONE,
    ) -> None:
        """buffers: filled in turn; they hold the environments of this rank's shards. A second one
        is filled while the first is trained on, so its steps are those of an older policy."""
        self.config, self.geometry, self.buffers, self.rewards = config, geometry, buffers, rewards
        self.policy, self.device = policy.to(device), device
        if config.mirror:
            policy.require_mirror()
        self.is_stale = len(buffers) > 1
        self.ranks, self.local_shards = ranks, ranks.part(geometry.shards)
        self.optimizer = NetworkOptimizer("policy", self.policy, config.adam_epsilon, ranks)
        self.flat = self.optimizer.flat
        self.initial = self.flat.data.clone()
        self.scaler = RewardScaler(geometry.num_envs, config.gamma)
        self.adaptive_rate = AdaptiveRate(config.learning_rate, config.desired_kl)
        self.shards: list[Shard] = []
        self._moments: dict[str, Tree] = {}

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Turn the fragments into shards with values, advantages and returns."""
        buffer = self.buffers[clock.now.iterations % len(self.buffers)]
        envs = [self.geometry.shard_envs(s) for s in self.local_shards]
        size = len(fragments) // len(envs)
        rollouts = [join(fragments[i * size :][:size], buffer, e) for i, e in enumerate(envs)]
        faults = [non_finite(part, e.start) for part, e in zip(rollouts, envs, strict=True)]
        raise_first(self.ranks, faults)
        self._moments = merge_all(self.ranks.gather([fragment.moments for fragment in fragments]))
        rewards, metrics = self.rewards.relabel_rollouts(rollouts)
        if self.config.normalise_rewards:
            moments = [
                self.scaler.observe(e, x, p.terminated | p.truncated, p.present, p.restarted)
                for e, x, p in zip(envs, rewards, rollouts, strict=True)
            ]
            for of_shard in self.ranks.gather(moments):
                self.scaler.absorb(of_shard)
            rewards = [self.scaler.scale(x) for x in rewards]
        self.shards = [self.make_shard(*part) for part in zip(rollouts, rewards, strict=True)]
        self._normalise_advantages()
        if self.is_stale:
            metrics["train/behaviour_kl"] = self._mean([s.behaviour_kl for s in self.shards])
        return {**metrics, "train/explained_variance": self._explained_variance()}

    @torch.no_grad()
    def make_shard(self, rollout: Fragment, rewards: Array) -> Shard:
        """The segments of a rollout with their values and advantages.

        rewards: [num_envs, steps], scaled: the rewards whose returns the values predict.
        """
        config, horizon = self.config, self.geometry.horizon
        segments = partial(to_segments, horizon=horizon)
        features, memory = policy_inputs(self, rollout, horizon)
        actions, log_probs = (segments(self.put(x)) for x in (rollout.actions, rollout.log_probs))
        importance, weights, behaviour_kl = None, None, 0.0
        if self.is_stale:
            behaviour = log_probs
            values, log_probs = self._evaluate(features, memory, actions)
            importance = returns.importance_weights(log_probs, behaviour)
            behaviour_kl = float(_kl(log_probs - behaviour).mean())
            if config.advantages == "vtrace":
                weights = importance.reshape(rewards.shape)
        else:
            values, _ = self._evaluate(features, memory)
        advantages, targets = returns.rollout_advantages(
            rollout,
            rewards,
            values.reshape(rewards.shape),
            self._value_of,
            config.gamma,
            config.gae_lambda,
            weights,
        )
        advantages, targets = segments(advantages), segments(targets)
        present = segments(self.put(rollout.present))
        priorities = None
        if config.sampling == "prioritised":
            priorities = (advantages.abs() * present).sum(1).cpu().numpy()
        shard = Shard(
            features=features,
            memory=memory,
            actions=actions,
            log_probs=log_probs,
            importance=importance,
            behaviour_kl=behaviour_kl,
            advantages=advantages,
            returns=targets,
            values=values,
            present=present,
            all_present=bool(rollout.present.all()),
            priorities=priorities,
        )
        return self._with_images(shard, rollout) if config.mirror else shard

    def _with_images(self, shard: Shard, rollout: Fragment) -> Shard:
        """The shard with the mirror images of its segments.

        The mirror image of the policy has collected them: it enters the loss as an older policy
        does, by an importance weight.
        """
        horizon, policy = self.geometry.horizon, self.policy
        seen = {name: self.put(rollout.obs[name]) for name in policy.observations}
        features = map_features(
            policy.prepare(policy.mirrored(seen)), lambda x: to_segments(x, horizon)
        )
        actions = policy.mirror[ACTION].of(shard.actions)
        _, log_probs = self._evaluate(features, None, actions)
        behaviour = to_segments(self.put(rollout.log_probs), horizon)
        importance = returns.importance_weights(log_probs, behaviour)
        # Copies, because features that are not normalised are the buffer's own.
        shard.features = map_features(shard.features, torch.clone)
        shard.actions, shard.log_probs = shard.actions.clone(), shard.log_probs.clone()
        if shard.importance is None:
            shard.importance = torch.ones_like(importance)
        shard.images = [
            (shard.actions, actions),
            (shard.log_probs, log_probs),
            (shard.importance, importance),
            *((shard.features[name], features[name]) for name in _distinct(features)),
        ]
        return shard

    def _value_of(self, obs: Observations, state: Observations) -> torch.Tensor:
        """[k]: the values of single observations, each with its recurrent state."""
        features = map_features(self.prepare(obs), lambda x: x.unsqueeze(1))
        starts = torch.zeros(features["actor"].shape[:2], dtype=torch.bool, device=self.device)
        memory = None
        if self.policy.state_specs:
            memory = Memory({name: self.put(x) for name, x in state.items()}, starts)
        return self._evaluate(features, memory)[0].squeeze(1)

    def _evaluate(
        self, features: Features, memory: Memory | None, actions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and, if actions are given, their log-probabilities: [n, steps] each.

        Computed in parts of the size of a minibatch, since the buffer may be much larger.
        """
        num, steps = features["actor"].shape[:2]
        values, log_probs = torch.empty(2, num, steps, device=self.device)
        size = self.geometry.minibatch // self.geometry.shards // steps
        for start in range(0, num, size):
            part = slice(start, start + size)
            chunk, known = map_features(features, itemgetter(part)), memory and memory.at(part)
            if actions is None:
                values[part] = self.policy.values(chunk, known)
            else:
                evaluated = self.policy.evaluate(chunk, actions[part], known)
                values[part], log_probs[part] = evaluated.values, evaluated.log_probs
        return values, log_probs

    def _normalise_advantages(self) -> None:
        """Normalise advantages to mean 0 and standard deviation 1 over the whole buffer.

        Once per iteration instead of once per minibatch: an advantage then means the same in every
        minibatch, and ranks exchange nothing before each gradient. For the same reason, steps
        without an agent are masked by weights that average 1 over the buffer.
        """
        size, advantages = self.geometry.buffer_steps, [s.masked(s.advantages) for s in self.shards]
        count, mean, spread = returns.mean_and_spread(advantages, self.ranks)
        for shard in self.shards:
            shard.advantages = (shard.advantages - mean).div_(spread + 1e-8)
            if count < size:
                shard.weights = shard.present * (size / count)

    def _mean(self, values: list[float]) -> float:
        """The mean of one number per shard, over the shards of all ranks."""
        gathered = self.ranks.gather(values)
        return sum(gathered) / len(gathered)

    def _explained_variance(self) -> float:
        """The fraction of the variance of returns that the values explain."""
        pairs = [(s.masked(s.returns), s.masked(s.values)) for s in self.shards]
        moments = [[returns.moments_of(r - v), returns.moments_of(r)] for r, v in pairs]
        columns = zip(*self.ranks.gather(moments), strict=True)
        return returns.explained_variance(*(reduce(merge_moments, parts) for parts in columns))

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """One gradient step per minibatch, until the last update epoch or the KL limit."""
        yield from self.rewards.batches(key.child("rewards"))
        config, count = self.config, self.geometry.num_minibatches
        size = self.geometry.segments_per_minibatch // self.geometry.shards
        schedules = config.schedules(clock.progress)
        learning_rate, beta = schedules["learning_rate"], schedules.get("priority_beta", 1.0)
        options = (count, size, config.priority_alpha, beta)
        for epoch in range(config.update_epochs):
            for s, shard in zip(self.local_shards, self.shards, strict=True):
                shard.swap_images(key.child("mirror", epoch, s))
            draws = [
                shard.draw(key.child("permutation", epoch, s), *options)
                for s, shard in zip(self.local_shards, self.shards, strict=True)
            ]
            for b in range(count):
                pairs = zip(self.shards, draws, strict=True)
                minibatches = [shard.minibatch(draw, b) for shard, draw in pairs]
                loss, metrics = self._gradient(minibatches)
                if config.target_kl and metrics["train/approx_kl"] > 1.5 * config.target_kl:
                    return
                if config.desired_kl:
                    learning_rate = self.adaptive_rate.after(metrics["train/approx_kl"])
                metrics["train/grad_norm"] = self._apply(minibatches, loss, learning_rate)
                metrics["train/learning_rate"] = learning_rate
                yield BatchMetrics(metrics)

    def _gradient(self, minibatches: list[Minibatch]) -> tuple[float, dict[str, float]]:
        """The mean loss and its metrics; the gradient, summed in shard order, is in `flat.grad`."""
        count = self.geometry.shards
        total = torch.zeros(1 + len(LOSS_METRICS), device=self.device)
        parts = list(zip(self.shards, minibatches, strict=True))
        for shard, minibatch in self.optimizer.in_shard_order(parts, total):
            loss, metrics = self.loss(shard, minibatch)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += torch.cat([loss.detach().reshape(1), metrics]) / count
        mean_loss, *values = total.tolist()
        return mean_loss, dict(zip(LOSS_METRICS, values, strict=True))

    def loss(self, shard: Shard, minibatch: Minibatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss [] on a minibatch, and the values of `LOSS_METRICS`.

        The probability ratio, relative to the proximal policy, is clipped. If an older policy
        collected the steps, it enters the policy loss as an importance weight (decoupled PPO,
        Hilton et al. 2021).
        """
        config, segments, weights = self.config, minibatch.segments, shard.step_weights(minibatch)

        def at(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, segments)

        def mean(x: torch.Tensor) -> torch.Tensor:
            # A scalar is the same for every step: there is nothing to weigh.
            return x.mean() if weights is None or x.ndim == 0 else (x * weights).mean()

        memory, features = shard.memory and shard.memory.at(segments), shard.features
        evaluated = self.policy.evaluate(map_features(features, at), at(shard.actions), memory)

        log_ratio, advantages = evaluated.log_probs - at(shard.log_probs), at(shard.advantages)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        if shard.importance is not None:
            surrogate = surrogate * at(shard.importance)
        policy_loss = -mean(surrogate)

        values, targets = evaluated.values, at(shard.returns)
        errors = (values - targets).square()
        if config.value_clip is not None:
            old = at(shard.values)
            near = old + (values - old).clamp(-config.value_clip, config.value_clip)
            errors = torch.maximum(errors, (near - targets).square())
        value_loss = mean(0.5 * errors)

        entropy = mean(evaluated.entropy)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        if config.bound_coef:
            loss = loss + config.bound_coef * mean(evaluated.excess)
        with torch.no_grad():
            kl, clip_fraction = mean(_kl(log_ratio)), mean((ratio != clipped).float())
            metrics = torch.stack([policy_loss, value_loss, -entropy, kl, clip_fraction]).detach()
        return loss, metrics

    def _apply(self, minibatches: list[Minibatch], loss: float, learning_rate: float) -> float:
        """Check and clip the gradient and take the step; returns the norm of the gradient."""
        config, flat = self.config, self.flat
        if config.anchor_coef:
            distance = flat.data.detach() - self.initial
            flat.grad.add_(distance, alpha=2.0 * config.anchor_coef / flat.num_tensors)
        parts = list(zip(self.shards, minibatches, strict=True))
        norm = self.optimizer.checked_norm(loss, parts, self._inspect)
        self.optimizer.clip(norm, config.max_grad_norm)
        self.optimizer.step(learning_rate)
        return norm

    def _inspect(self, part: tuple[Shard, Minibatch]) -> Finding:
        """Find whether a shard's loss or gradient is not finite; with its minibatch."""
        shard, minibatch = part
        loss, _ = self.loss(shard, minibatch)
        arrays = shard.arrays(minibatch)
        if not bool(loss.isfinite()):
            return "the loss of a minibatch", arrays
        self.flat.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        return self.optimizer.bad_gradient(), arrays

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self._moments)
        metrics = {}
        drawn = [float(shard.drawn.mean()) for shard in self.shards]
        if self.config.sampling == "prioritised" and any(drawn):
            metrics["train/coverage"] = self._mean(drawn)
        if self.policy.action.kind == "box":
            metrics["train/std"] = self._mean_std()
        self.shards = []
        return metrics

    def _mean_std(self) -> float:
        """Mean std of actions; if it depends on the state, over a part of each shard as large as
        its part of a minibatch."""
        if not self.policy.std_of_state:
            return float(self.policy.log_std.detach().exp().mean())
        at = slice(self.geometry.segments_per_minibatch // self.geometry.shards)
        parts = [(map_features(s.features, itemgetter(at)), s.memory) for s in self.shards]
        return self._mean([self.policy.mean_std(x, m and m.at(at)) for x, m in parts])

    def gather(self) -> None:
        """Gather the running returns, which each rank has for its own environments only."""
        envs = [self.geometry.shard_envs(s) for s in self.local_shards]
        running = self.ranks.gather([self.scaler.running[e] for e in envs])
        self.scaler.running = np.concatenate(running)
        self.rewards.gather()

    def state_dict(self) -> Tree:
        """All but the policy's arrays, which are saved in `policy/`. "rewards": reward scaling."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "initial": self.initial,
            "rewards": self.scaler.state_dict(),
            "reward_source": self.rewards.state_dict(),
            **self.adaptive_rate.state_dict(),
        }

    def load_state_dict(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.initial.copy_(torch.as_tensor(state["initial"]))
        self.scaler.load_state_dict(state["rewards"])
        self.rewards.load_state_dict(state["reward_source"])
        self.adaptive_rate.load_state_dict(state)

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """Take over the value function only together with the scale of the returns it predicts."""
        moments = None if training is None else self.scaler.moments_in(training["rewards"])
        was_scaled = moments is not None and bool(moments["count"] > 0)
        if moments is not None and was_scaled == self.config.normalise_rewards:
            self.scaler.moments = moments
        else:
            arrays = {**self.policy.state_dict(), **self.policy.actor_arrays(arrays)}
        self.load_policy(arrays)
        self.initial.copy_(self.flat.data)


def _distinct(features: Features) -> list[str]:
    """The names of the features, without the critic's if they are the actor's."""
    same = features["critic"] is features["actor"]
    return [name for name in features if not (same and name == "critic")]


def _kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """The estimate (r - 1) - log r of the KL divergence from log r [...]; never negative."""
    return log_ratio.exp() - 1.0 - log_ratio
