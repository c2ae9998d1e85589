"""Randomised return decomposition (RRD): rewards per step, learned from returns of episodes.

For an episode of T steps and return R, sample K of its steps (without replacement, unless K > T).
With predictions r_k = r(s_k, a_k, s'_k), their mean m and the target g = R / T:

    biased    (m - g)^2
    unbiased  (m - g)^2 - c s^2 / K      s^2 = sum (r_k - m)^2 / (K - 1)
              c = 1 - K / T for K <= T (0 for T = 1), and 1 for K > T

m estimates the mean prediction mu of the whole episode, and E[m] = mu. Hence
E[(m - g)^2] = (mu - g)^2 + Var[m]: the biased loss also pushes the predictions of an episode
together. Var[m] is v / K (1 - K / T) without replacement, v being the variance of all T
predictions with divisor T - 1, and v (T - 1) / T / K with it; c s^2 / K has exactly that mean, so
the unbiased loss has the mean (mu - g)^2. A single step's s^2 is undefined: `unbiased` needs
K >= 2. The biased loss is the default, as in the reference, which ships with the correction off.

Two metrics are recorded with either loss: "train/R_loss" is the mean of (m - g)^2, which is never
negative, and "train/R_var" the mean of c s^2 / K (omitted if K is 1).

Everything is per step: a prediction is a reward, in the units of R / T. (Scaled to the return,
T m against R, both terms would need a factor T^2.) The reward of a sampled transition is the raw
prediction, as in the reference; over an episode it sums to R, up to errors.

*The input normaliser* is part of the state: whenever a store has new steps, which is once per
iteration online and once per run on a dataset, the first update samples as many steps of finished
episodes as are new (at most `MOST_MOMENTS`) and merges their moments. In between, the normaliser
is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.metrics import Column, Metric, Metrics
from etude.core.trees import Tree
from etude.data.contrast import SAME
from etude.data.store.episodes import Subsets, Transitions
from etude.models.networks import load_arrays, merge_moments, moments, no_moments
from etude.models.reward_networks import RewardNetwork, RewardNetworkConfig, make_reward_network
from etude.planning.recipe import Resolved, RewardsConfig, RewardsSection
from etude.rl.base import Finding, NetworkOptimizer
from etude.rl.rewards import scores as reward_scores
from etude.rl.rewards.given import RewardSource
from etude.rl.sampling import Batch, Experience

MOST_MOMENTS = 4096
"""Steps of a shard that are sampled for the normaliser at a time: the standard error of a mean is
1.6 % of the standard deviation."""

METRICS: Metrics = (
    Metric("train/R_loss", "R loss", ".3g", Column(30, 9, "online"), epoch=2, losses=True),
    Metric("train/R_loss", "R loss", ".3g", Column(30, 10, "offline")),
    *reward_scores.METRICS,
)


class RRDConfig(RewardsConfig):
    """Rewards learned from returns by randomised return decomposition."""

    from_returns: ClassVar[bool] = True
    from_clips: ClassVar[bool] = True
    metrics: ClassVar[Metrics] = METRICS

    kind: Literal["rrd"] = Field("rrd", description="Randomised return decomposition.")
    loss: Literal["unbiased", "biased"] = Field(
        "biased", description="unbiased subtracts the variance of the mean over the sampled steps."
    )
    rrd_batch_size: int = Field(
        256, ge=1, description="Steps in a minibatch of the reward network, over all episodes."
    )
    rrd_sample_size: int = Field(64, ge=1, description="Steps sampled from each episode (K).")
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate of Adam.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    normalise_targets: bool = Field(
        False,
        description="Standardise the targets R/T (return per step) by their spread at the first "
        "update. For datasets: a success spread over many steps is too small otherwise.",
    )
    network: RewardNetworkConfig = Field(RewardNetworkConfig(), description="Reward network.")

    @classmethod
    def vector(cls) -> RRDConfig:
        """The reference's sizes for vectors: 256 steps, which are 4 subsets of 64."""
        return cls(rrd_batch_size=256, rrd_sample_size=64)

    @classmethod
    def image(cls, reads: tuple[str, ...] = ("image", "state")) -> RRDConfig:
        """The reference's sizes for images, one subset of 32; standardised targets."""
        network = RewardNetworkConfig(reads=reads)
        return cls(rrd_batch_size=32, rrd_sample_size=32, normalise_targets=True, network=network)

    def check(self, shards: int) -> None:
        self.subsets_per_shard(shards)

    def reads(self, observations: dict[str, ArraySpec]) -> Collection[str]:
        return self.network.with_reads(observations).reads

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> RRD:
        spec = run.spec
        with torch.device("meta" if key is None else "cpu"):
            config = self.network.with_reads(spec.observations)
            network = make_reward_network(config, spec.observations, spec.action, key)
        return RRD(self, network, run.recipe.learner.shards, device)

    def plan(self, source: RRD) -> RewardsSection:
        subsets = self.rrd_batch_size // self.rrd_sample_size
        line = (
            f"before each, a gradient step of the reward model: {subsets:,} episodes x "
            f"{self.rrd_sample_size:,} of their steps = {self.rrd_batch_size:,}"
        )
        names = ("rrd_batch_size", "rrd_sample_size")
        return RewardsSection([line], {name: getattr(self, name) for name in names}, {}, 0)

    def subsets_per_shard(self, shards: int) -> int:
        """Subsets per shard and gradient step. Raise an error for sizes that do not divide."""
        size, sample = self.rrd_batch_size, self.rrd_sample_size
        if sample == 1 and self.loss == "unbiased":
            raise UsageError(
                "The unbiased loss needs the variance of a subset, which is undefined for one "
                "step: use rrd_sample_size 2 or more, or the biased loss."
            )
        unit = sample * shards
        if size % unit == 0:
            return size // unit
        batches = sorted({max(1, size // unit) * unit, (size // unit + 1) * unit})
        least = 2 if self.loss == "unbiased" else 1
        samples = [k for k in range(least, size + 1) if size % (k * shards) == 0]
        near = sorted(sorted(samples, key=lambda k: abs(math.log(k / sample)))[:2])
        ways = [f"rrd_batch_size {_either(batches)}"]
        ways += [f"rrd_sample_size {_either(near)}"] if near else []
        raise UsageError(
            f"rrd_batch_size {size:,} is not a whole number of subsets of rrd_sample_size "
            f"{sample:,} for each of {shards:,} shards: use {', or '.join(ways)}."
        )


def _either(sizes: list[int]) -> str:
    return " or ".join(f"{size:,}" for size in sizes)


def squared_errors(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(m - g)^2 [subsets], the biased loss.

    predictions: [subsets, K]; targets: [subsets], R / T.
    """
    return (predictions.mean(1) - targets).square()


def variance_terms(predictions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """c s^2 / K [subsets], which the unbiased loss subtracts.

    predictions: [subsets, K], K >= 2; lengths: [subsets], T, as floats.
    """
    num = predictions.shape[1]
    share = torch.where(lengths < num, 1.0, 1.0 - num / lengths)
    share = torch.where(lengths == 1, 0.0, share)
    return share * predictions.var(1, correction=1) / num


class RRD(RewardSource):
    """RRD, as described in the module's docstring."""

    def __init__(
        self, config: RRDConfig, network: RewardNetwork, shards: int, device: torch.device
    ) -> None:
        self.config, self.device = config, device
        self.subsets = config.subsets_per_shard(shards)
        self.network = network.to(device)
        self.optimizer = NetworkOptimizer("reward network", self.network, config.adam_epsilon)
        self.flat = self.optimizer.flat
        self.seen: Array = np.zeros(shards, np.int64)
        """Steps that each shard's store had at the last update of the normaliser."""

    @torch.no_grad()
    def relabel(self, batch: Batch) -> Batch:
        """Replace rewards by the network's predictions."""
        return batch._replace(rewards=self.network(batch.obs, batch.actions, batch.next_obs))

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        """Take one gradient step on `subsets` subsets of each store, summed in shard order.

        Only finished episodes have a return: until every store has one, return {}.
        """
        if not all(store.num_episodes for store in stores):
            return {}
        if self.config.normalise_targets and not self.seen.any():
            self._measure_targets(stores)
        self._update_normaliser(stores, key.child("moments"))
        size = self.config.rrd_sample_size
        drawn = [
            store.sample_subsets(key.child("subsets", s).generator(), self.subsets, size)
            for s, store in enumerate(stores)
        ]
        return self.learn(drawn)

    def learn(self, drawn: Sequence[Subsets]) -> dict[str, float]:
        """Take the gradient step on given subsets, one `Subsets` per shard, if it is finite."""
        total = torch.zeros(4, dtype=torch.float64, device=self.device)
        for subsets in self.optimizer.in_shard_order(drawn, total):
            y = self._outputs(subsets)
            error, variance = self._loss_terms(y, subsets)
            loss = error - variance if self.config.loss == "unbiased" else error
            (loss / len(drawn)).backward()  # type: ignore[no-untyped-call]
            found = y.detach().double()
            terms = (error.detach(), variance.detach(), found.mean(), found.square().mean())
            total += torch.stack([term.double() for term in terms])
        # In the network's units; `mean` and `square` are of all y.
        mean_error, mean_variance, mean, square = (total / len(drawn)).tolist()
        norm = self.optimizer.checked_norm(mean_error - mean_variance, drawn, self._inspect)
        self.optimizer.step(self.config.learning_rate)
        shift, scale = float(self.network.shift), float(self.network.scale)
        metrics = {
            "train/R_loss": mean_error * scale * scale,
            "train/R_var": mean_variance * scale * scale,
            "train/R_mean": shift + scale * mean,
            "train/R_std": scale * math.sqrt(max(0.0, square - mean * mean)),
            "train/R_grad_norm": norm,
        }
        if self.config.rrd_sample_size == 1:  # One step has no variance.
            del metrics["train/R_var"]
        return metrics

    def _outputs(self, subsets: Subsets) -> torch.Tensor:
        """The network's outputs y [subsets, K]."""
        obs, actions, next_obs = self._tensors(subsets.steps)
        return self.network.outputs(obs, actions, next_obs).view(subsets.steps.rewards.shape)

    def _loss_terms(self, y: torch.Tensor, subsets: Subsets) -> tuple[torch.Tensor, torch.Tensor]:
        """Means over subsets of squared errors and variance terms, in the network's units."""
        per_step = torch.from_numpy(subsets.returns / subsets.lengths).to(self.device)
        targets = ((per_step - self.network.shift) / self.network.scale).float()
        error = squared_errors(y, targets).mean()
        if self.config.rrd_sample_size == 1:
            return error, torch.zeros_like(error)
        lengths = torch.from_numpy(subsets.lengths).to(self.device, torch.float32)
        return error, variance_terms(y, lengths).mean()

    def _tensors(
        self, steps: Transitions
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
        """The network's inputs of steps [subsets, K, ...], as [subsets * K, ...]."""
        steps = steps.flat()
        obs, next_obs = (
            {n: torch.from_numpy(o[n]).to(self.device) for n in self.network.observations}
            for o in (steps.obs, steps.next_obs)
        )
        return obs, torch.from_numpy(steps.actions).to(self.device), next_obs

    def _update_normaliser(self, stores: Sequence[Experience], key: Key) -> None:
        """Merge the moments of a sample as large as the number of new steps in the stores."""
        given = [store.time * store.lanes for store in stores]
        if given == self.seen.tolist():
            return
        new = no_moments(self.network.num_vectors)
        for s, store in enumerate(stores):
            left = min(given[s] - int(self.seen[s]), MOST_MOMENTS)
            generator = key.child(s).generator()
            while left > 0 and self.network.num_vectors:
                # Samples include images: limit them to the size of a gradient step's batch.
                num = min(left, self.config.rrd_batch_size)
                steps = store.sample_subsets(generator, num, 1).steps
                new = merge_moments(new, self._moments(steps))
                left -= num
        if float(new["count"]):
            self.network.normaliser.absorb(new)
        self.seen[:] = given

    def _moments(self, steps: Transitions) -> Tree:
        found = moments(self.network.vectors(*self._tensors(steps)).cpu().numpy())
        if not np.isfinite(found["mean"]).all():
            raise NonFinite(_bad_input(steps) or "the change of an observation in one step")
        return found

    def _measure_targets(self, stores: Sequence[Experience]) -> None:
        """Standardise targets by mean and standard deviation of R / T, weighted by length.

        A network that started from another run's weights keeps its units.
        """
        if (float(self.network.shift), float(self.network.scale)) != (0.0, 1.0):
            return
        returns = np.concatenate([store.returns for store in stores])
        lengths = np.concatenate([store.lengths for store in stores])
        per_step = returns / lengths
        mean = returns.sum() / lengths.sum()
        spread = math.sqrt((lengths * (per_step - mean) ** 2).sum() / lengths.sum())
        if spread > SAME * float(np.abs(per_step).max()):
            self.network.shift.fill_(float(mean))
            self.network.scale.fill_(spread)

    def _inspect(self, subsets: Subsets) -> Finding:
        """Find the first non-finite value, from the store to a shard's loss."""
        obs, actions, next_obs = self._tensors(subsets.steps)
        arrays: Tree = {"returns": subsets.returns, "lengths": subsets.lengths, "action": actions}
        arrays |= obs | {f"next_{name}": x for name, x in next_obs.items()}
        if not np.isfinite(subsets.returns).all():
            return "the return of an episode", arrays
        if found := _bad_input(subsets.steps):
            return found, arrays
        with torch.no_grad():
            y = self._outputs(subsets)
            if not bool(y.isfinite().all()):
                return "the predicted reward of a step", arrays
            finite = all(bool(term.isfinite()) for term in self._loss_terms(y, subsets))
        return "" if finite else "the loss of the reward network", arrays

    def learner_state(self) -> Tree:
        """The state without the network."""
        return {"optimizer": self.optimizer.state_dict(), "seen": self.seen.copy()}

    def load_learner_state(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.seen[:] = np.asarray(state["seen"])

    def state_dict(self) -> Tree:
        """Includes the network's contract, so that the reward can be loaded without the run."""
        network = {"network": dict(self.network.state_dict()), "contract": self.network.contract()}
        return {**network, **self.learner_state()}

    def load_state_dict(self, state: Tree) -> None:
        load_arrays(self.network, state["network"])
        self.load_learner_state(state)


def num_bytes(config: RRDConfig, network: RewardNetwork) -> int:
    """Bytes of learning: parameters, gradient and Adam's two moments, and one batch of inputs.

    s and s' are counted as they are stored; images also stacked, and as floats. The network can be
    on the meta device. Activations of the layers are not included.
    """
    step = 0
    for spec in network.observations.values():
        copies = 1 + 1 + 4 if len(spec.shape) == 3 else 1
        step += 2 * copies * spec.num_bytes
    parameters = sum(p.numel() for p in network.parameters())
    return 4 * 4 * parameters + config.rrd_batch_size * step


def _bad_input(steps: Transitions) -> str:
    """Describe the first stored array that is not finite; "" if all are."""
    named = {f"observation '{name}'": array for name, array in steps.obs.items()}
    named |= {f"next observation '{name}'": array for name, array in steps.next_obs.items()}
    for name, array in {**named, "action": steps.actions}.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{name} of a stored step"
    return ""
