"""Proximal policy optimisation over a segment buffer.

An iteration, top to bottom:

1. `ingest`: the reward source says what every step was worth; rewards are scaled, values
   predicted, advantages worked out along each row.
2. `batches`: first the reward source's own gradient steps, if it learns. Then every segment once
   per update epoch, in a fresh permutation (or drawn by priority); each minibatch is one gradient
   step on  policy + value_coef * value - entropy_coef * entropy,  where the value loss is half the
   mean squared error. A run's first iterations only collect: without them the first update would
   train on observations that nothing normalises yet.
3. `end_iteration`: only now the observation normaliser takes in what was collected. It is frozen
   from rollout to last batch, so the first minibatch's probability ratio is 1.

The ratio compares a policy with the proximal one, the weights at the start of the update. With a
collector that lags, an older policy has acted, and enters the policy loss as an importance weight.

The buffer is cut into shards, each owning fixed rows. Every sum over the buffer (moments,
advantage statistics, gradients) is taken in shard order, so one process with all shards and
several ranks that share them agree bit for bit: a rank knows only its own shards and what the
others tell of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from etude.algorithms.on_policy import OnPolicyConfig
from etude.algorithms.ppo_metrics import METRICS
from etude.algorithms.ppo_shard import Minibatch, Shard
from etude.algorithms.rewards import GIVEN, OnPolicyRewards
from etude.core.clock import Clock
from etude.core.contracts import Array, BatchMetrics, Broadcast, Fragment
from etude.core.errors import NonFinite
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks, raise_first
from etude.core.trees import Tree, copy_arrays
from etude.experience.returns import explained_variance, moments_of
from etude.experience.segments import SegmentBuffer, SegmentGeometry, join, non_finite
from etude.learning.adam import Adam
from etude.metrics.declared import Metrics
from etude.models.networks import FlatParameters
from etude.models.normalise import RewardScaler, merge_moments
from etude.models.policies import ActorCritic


class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation."""

    metrics: ClassVar[Metrics] = METRICS

    kind: Literal["ppo"] = Field("ppo", description="Proximal policy optimisation.")
    learning_rate: float = Field(3e-4, gt=0, description="Adam's step size at the start.")
    final_learning_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of it left at the end; linear between, 1 is constant.",
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
    gamma: float = Field(0.99, ge=0, le=1, description="Discount of a step.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of the advantage trace.")
    advantages: Literal["gae", "vtrace"] = Field(
        "vtrace",
        description="vtrace corrects value targets and traces by importance weights where "
        "collector.lag makes experience stale; without lag it equals gae.",
    )
    clip: float = Field(0.2, gt=0, description="How far the probability ratio may move.")
    value_clip: float | None = Field(None, gt=0, description="How far a value may move.")
    value_coef: float = Field(
        1.0,
        ge=0,
        description="Weight of the value loss, which is half the mean squared error: 1 is what "
        "vf_coef .5 is in stable-baselines3.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    bound_coef: float = Field(
        0.0, ge=0, description="Weight of the loss that keeps a box policy's mean inside [-1, 1]."
    )
    anchor_coef: float = Field(
        0.0, ge=0, description="Weight of the squared distance to the run's initial parameters."
    )
    max_grad_norm: float = Field(0.5, gt=0, description="Longest gradient that is applied.")
    target_kl: float | None = Field(
        None, gt=0, description="An update stops before a batch whose KL is 1.5 times this."
    )
    normalise_rewards: bool = Field(True, description="Divide by the spread of the return.")

    def schedules(self, progress: float) -> dict[str, float]:
        """The fields that change over a run, at a progress from 0 (its start) to 1 (its end)."""
        rates = (self.learning_rate, self.learning_rate * self.final_learning_rate)
        beta = {"priority_beta": _between(self.priority_beta, 1.0, progress)}
        drawn = beta if self.sampling == "prioritised" else {}
        return {"learning_rate": _between(*rates, progress), **drawn}

    @property
    def may_stop_early(self) -> str | None:
        return None if self.target_kl is None else "target_kl may end an update early"

    def coverage(self, geometry: SegmentGeometry) -> float:
        """Equal priorities cover most: a minibatch leaves a segment out with 1 - 1/minibatches."""
        if self.sampling == "uniform":
            return 1.0
        draws = geometry.num_minibatches * self.update_epochs
        return 1.0 - (1.0 - 1.0 / geometry.num_minibatches) ** draws

    def make(
        self,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: OnPolicyRewards,
        ranks: Ranks,
    ) -> PPO:
        return PPO(self, policy, geometry, buffers, device, rewards, ranks)


class PPO:
    """See the module's text. Owns policy, optimizer, buffer and reward statistics."""

    def __init__(
        self,
        config: PPOConfig,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: OnPolicyRewards = GIVEN,
        ranks: Ranks = ALONE,
    ) -> None:
        """`buffers` are filled in turn and hold the rows of this rank's shards.

        A second one is filled while this one trains, so its steps are those of an older policy.
        """
        self.config = config
        self.policy = policy.to(device)
        self.geometry = geometry
        self.buffers = buffers
        self.is_stale = len(buffers) > 1
        self.device = device
        self.rewards = rewards
        self.ranks, self.own = ranks, ranks.part(geometry.shards)
        self.flat = FlatParameters(self.policy)
        self.optimizer = Adam(self.flat.data, self.flat.grad, config.adam_epsilon)
        self.initial = self.flat.data.clone()
        self.scaler = RewardScaler(geometry.rows, config.gamma)
        self.shards: list[Shard] = []
        self._moments: dict[str, Tree] = {}

    def broadcast(self, clock: Clock) -> Broadcast:
        state = {name: tensor.cpu() for name, tensor in self.policy.state_dict().items()}
        return Broadcast(clock.now.iterations, copy_arrays(state))

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Experience becomes shards with values, advantages and returns."""
        per_shard = len(fragments) // len(self.own)
        buffer = self.buffers[clock.now.iterations % len(self.buffers)]
        rows = [self.geometry.shard_rows(s) for s in self.own]
        parts = [
            join(fragments[i * per_shard : (i + 1) * per_shard], buffer, some)
            for i, some in enumerate(rows)
        ]
        faults = [non_finite(part, r.start) for part, r in zip(parts, rows, strict=True)]
        raise_first(self.ranks, faults)
        self._moments = reduce(
            lambda left, right: {name: merge_moments(left[name], right[name]) for name in left},
            self.ranks.gather([fragment.moments for fragment in fragments]),
        )
        rewards, metrics = self.rewards.rewards(parts)
        if self.config.normalise_rewards:
            seen = [
                self.scaler.observe(r, x, p.terminated | p.truncated, p.present, p.restarted)
                for r, x, p in zip(rows, rewards, parts, strict=True)
            ]
            for moments in self.ranks.gather(seen):
                self.scaler.absorb(moments)
        self.shards = [self._shard(*known) for known in zip(parts, rewards, strict=True)]
        _normalise_advantages(self.shards, self.geometry.buffer_steps, self.ranks)
        if self.is_stale:
            metrics["train/behaviour_kl"] = self._mean([s.behaviour_kl for s in self.shards])
        return {**metrics, "train/explained_variance": self._explained()}

    def _mean(self, values: list[float]) -> float:
        """The mean of one number per shard, over the shards of all ranks."""
        gathered = self.ranks.gather(values)
        return sum(gathered) / len(gathered)

    def _explained(self) -> float:
        """How much of the returns' variance the values know."""
        spreads = self.ranks.gather(
            [
                [moments_of(s.seen(s.returns - s.values)), moments_of(s.seen(s.returns))]
                for s in self.shards
            ]
        )
        errors, returns = (reduce(merge_moments, parts) for parts in zip(*spreads, strict=True))
        return explained_variance(errors, returns)

    def _shard(self, part: Fragment, rewards: Array) -> Shard:
        config, cut = self.config, self.geometry
        rewards = self.scaler.scale(rewards) if config.normalise_rewards else rewards
        chunk = cut.segments_per_minibatch // cut.shards
        return Shard.of(
            part, rewards, self.policy, self.device, config, cut.horizon, chunk, self.is_stale
        )

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """Gradient steps, one per minibatch, until the update epochs or the KL limit are over."""
        if clock.only_collects:
            return
        yield from self.rewards.update(key.child("rewards"))
        config, count = self.config, self.geometry.num_minibatches
        size = self.geometry.segments_per_minibatch // self.geometry.shards
        schedules = config.schedules(clock.progress)
        learning_rate, beta = schedules["learning_rate"], schedules.get("priority_beta", 1.0)
        for epoch in range(config.update_epochs):
            draws = [
                shard.draw(key.child("permutation", epoch, s), count, size, config, beta)
                for s, shard in zip(self.own, self.shards, strict=True)
            ]
            for b in range(count):
                chosen = [s.minibatch(draw, b) for s, draw in zip(self.shards, draws, strict=True)]
                loss, metrics = self._gradient(chosen)
                if config.target_kl and metrics["train/approx_kl"] > 1.5 * config.target_kl:
                    return
                if not math.isfinite(loss):
                    raise self._culprit(chosen)
                metrics["train/grad_norm"] = self._apply(chosen, learning_rate)
                metrics["train/learning_rate"] = learning_rate
                yield BatchMetrics(metrics)

    def _gradient(self, chosen: list[Minibatch]) -> tuple[float, dict[str, float]]:
        """Sum every shard's gradient of the mean loss into `flat.grad`, in shard order."""
        count = self.geometry.shards
        total = torch.zeros(1 + len(Shard.METRICS), device=self.device)

        def add(shard: Shard, some: Minibatch) -> None:
            loss, metrics = shard.loss(self.policy, some, self.config)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total.add_(torch.cat([loss.detach().reshape(1), metrics]) / count)

        parts = [partial(add, *part) for part in zip(self.shards, chosen, strict=True)]
        self.ranks.ordered_sum((self.flat.grad, total), parts)
        mean_loss, *values = total.tolist()
        return mean_loss, dict(zip(Shard.METRICS, values, strict=True))

    def _apply(self, chosen: list[Minibatch], learning_rate: float) -> float:
        """Clip and take the step, unless the gradient is not finite; its length."""
        config, flat = self.config, self.flat
        if config.anchor_coef:
            distance = flat.data.detach() - self.initial
            flat.grad.add_(distance, alpha=2.0 * config.anchor_coef / flat.num_tensors)
        norm = float(flat.grad.norm())
        if not norm < float("inf"):
            raise self._culprit(chosen)
        if norm > config.max_grad_norm:
            flat.grad.mul_(config.max_grad_norm / (norm + 1e-6))
        self.optimizer.step(learning_rate)
        return norm

    def _culprit(self, chosen: list[Minibatch]) -> NonFinite:
        arrays: dict[str, torch.Tensor] = {}
        name = self.flat.first_bad_gradient()
        found = f"the gradient of '{name}'" if name else "the gradient's norm"
        looks = [self._examined(*part) for part in zip(self.shards, chosen, strict=True)]
        for s, (bad, own) in enumerate(self.ranks.gather(looks)):
            arrays |= {f"shard{s}_{name}": array for name, array in own.items()}
            if bad:
                what = "the loss of a minibatch" if bad == "loss" else found
                shard = f"shard {s}{self.ranks.owner(s, self.geometry.shards)}"
                return NonFinite(f"{what} ({shard})", arrays)
        return NonFinite(found, arrays)

    def _examined(self, shard: Shard, some: Minibatch) -> tuple[str, dict[str, torch.Tensor]]:
        """What of a shard's is not finite, its loss or its gradient, and its minibatch."""
        loss, _ = shard.loss(self.policy, some, self.config)
        arrays = shard.minibatch_arrays(some)
        if not bool(loss.isfinite()):
            return "loss", arrays
        self.flat.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        return ("" if self.flat.first_bad_gradient() is None else "gradient"), arrays

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self._moments)
        metrics = {}
        drawn = [float(shard.drawn.mean()) for shard in self.shards]
        if self.config.sampling == "prioritised" and any(drawn):
            metrics["train/coverage"] = self._mean(drawn)
        if self.policy.action.kind == "box":
            metrics["train/std"] = float(self.policy.log_std.detach().exp().mean())
        self.shards = []
        return metrics

    def policy_parts(self) -> tuple[Tree, Tree]:
        return dict(self.policy.state_dict()), self.policy.contract()

    def state_dict(self) -> Tree:
        """The policy's own arrays are kept beside this, in `policy/`."""
        # Each rank has followed its own rows: here all come together.
        own = [self.scaler.running[self.geometry.shard_rows(s)] for s in self.own]
        self.scaler.running = np.concatenate(self.ranks.gather(own))
        return {
            "optimizer": self.optimizer.state_dict(),
            "initial": self.initial,
            "rewards": self.scaler.state_dict(),
            "reward_source": self.rewards.state_dict(),
        }

    def load_state_dict(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.initial.copy_(torch.as_tensor(state["initial"]))
        self.scaler.load_state_dict(state["rewards"])
        self.rewards.load_state_dict(state["reward_source"])

    def load_policy(self, arrays: Tree) -> None:
        self.policy.load_state_dict({k: torch.as_tensor(v) for k, v in arrays.items()})

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """The value function comes with the scale of the returns it predicts, or not at all."""
        moments = None if training is None else self.scaler.moments_in(training["rewards"])
        was_scaled = moments is not None and bool(moments["count"] > 0)
        if moments is not None and was_scaled == self.config.normalise_rewards:
            self.scaler.moments = moments
        else:
            arrays = {**self.policy.state_dict(), **self.policy.actor_arrays(arrays)}
        self.load_policy(arrays)
        self.initial.copy_(self.flat.data)

    def retire(self, states: list[Tree]) -> None:
        """Nothing of this is in files of its own."""

    def close(self) -> None:
        pass


def _normalise_advantages(shards: list[Shard], size: int, ranks: Ranks) -> None:
    """To mean 0 and spread 1 over the whole buffer; float64 sums, in shard order.

    Once per iteration rather than once per minibatch: an advantage then means the same in every
    minibatch, and learners on several machines need no exchange before each gradient. For the
    same reason steps without an agent are taken out by weights that average 1 over the buffer,
    which holds `size` steps.
    """
    seen = [shard.seen(shard.advantages).double() for shard in shards]
    sums = ranks.gather([(len(x), float(x.sum())) for x in seen])
    count = sum(number for number, _ in sums)
    mean = sum(total for _, total in sums) / max(count, 1)
    square = sum(ranks.gather([float(x.sub_(mean).square_().sum()) for x in seen]))
    spread = (square / max(count, 1)) ** 0.5
    for shard in shards:
        shard.advantages = (shard.advantages - mean).div_(spread + 1e-8)
        if count < size:
            shard.weights = shard.present * (size / max(count, 1))


def _between(start: float, end: float, progress: float) -> float:
    """Linear from `start` at progress 0 to `end` at progress 1."""
    return start + (end - start) * progress
