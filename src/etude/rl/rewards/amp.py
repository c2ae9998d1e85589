"""Adversarial motion prior (AMP): a reward for moving like a reference.

A discriminator D reads short windows of motion features and learns to distinguish the reference's
windows from the policy's. A step is rewarded if D takes the window after it for the reference's:

    style reward   -log(max(1 - sigmoid(D), 1e-4)) = min(log(1 + e^D), -log 1e-4)
    reward         task_weight * task + style_weight * style

    loss of D      (BCE(D(policy and replay), 0) + BCE(D(reference), 1)) / 2
                   + gradient_penalty * mean ||dD/dx||^2     x: normalised windows of the reference
                   + logit_penalty * sum of squares of the last layer's weights
                   + weight_decay * sum of squares of all weights

Without the gradient penalty D saturates: style rewards vanish, and with them any gradient towards
the reference.

*Several motions.* If the reference has several motions, which a curriculum practises unevenly,
windows of the reference are sampled by the motions of random steps of this iteration. Otherwise D
would recognise a motion by how rarely the policy practises it.

*An iteration.* Style rewards are computed with D of the last update, before rewards are scaled and
advantages computed. Then D takes its gradient steps: half of the policy's windows in each minibatch
are of this iteration, half are older ones from a ring buffer per shard, so that D does not forget
earlier behaviour of the policy.

*The input normaliser* has running moments of the policy's windows and, in equal parts, of the
reference's. With those of the reference alone, a feature that hardly varies in it would be scaled
up until it alone identifies the policy. Moments are merged at the start of an update and then
frozen, so D computes rewards with the normaliser of its training.

Every shard has its own windows, ring buffer and random streams; sums are taken in shard order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from statistics import fmean
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch.nn import functional

from etude.core.contracts import (
    Array,
    BatchMetrics,
    EnvSpec,
    Fragment,
    StyleMotions,
    StyleReference,
    ability,
)
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.metrics import Column, Curve, Health, Metric, Metrics, Warning
from etude.core.ranks import ALONE, Ranks, raise_first
from etude.core.trees import Tree, digest, num_bytes
from etude.data.returns import values_after
from etude.data.segments import StepWindows, WindowRing
from etude.envs.config import EnvConfig
from etude.models.networks import load_arrays, make_generator, merge_moments, moments, no_moments
from etude.models.reward_networks import Discriminator
from etude.planning.recipe import Resolved, RewardsConfig, RewardsSection
from etude.rl.base import Finding, NetworkOptimizer
from etude.rl.rewards.given import RewardSource

STYLE = "style"
"""The observation that the discriminator sees, [frames, features] float32, newest frame last."""
MOTION = "motion"
"""The observation with the number of the practised motion, [1] float32."""
LARGEST = -math.log(1e-4)
"""The largest style reward."""
WINDOWS_AT_ONCE = 4096
"""Windows that the discriminator evaluates at a time for rewards."""


_KEPT_PER_UNIT = 6
"""float32 numbers per window and unit in the gradient of the discriminator: activations, their
derivatives for the penalty, and the backward pass through both."""


def _saturated(health: Health) -> Warning | None:
    agent, demo = health.recent("amp/agent_accuracy"), health.recent("amp/demo_accuracy")
    style = health.recent("amp/style_reward")
    if not (agent and demo and style) or min(*agent, *demo) < 0.97 or max(style) > 0.1:
        return None
    return Warning(
        "discriminator saturated",
        f"it classifies {fmean([agent[-1], demo[-1]]):.0%} of all windows correctly and the style "
        f"reward is {style[-1]:.3f}, so no motion is rewarded more than another: raise "
        "rewards.gradient_penalty, or lower rewards.learning_rate or rewards.updates",
    )


METRICS: Metrics = (
    Metric(
        "amp/style_reward",
        "style",
        ".3f",
        Column(10, 7),
        Curve(50, "green", (0, None), "style reward"),
        check=_saturated,
    ),
    Metric(
        "amp/agent_accuracy",
        "agent acc.",
        ".0%",
        Column(11, 11),
        Curve(51, "magenta", (0, 1), "accuracy"),
    ),
    Metric("amp/demo_accuracy", "demo", ".0%", Column(12, 6)),
)


class AMPConfig(RewardsConfig):
    """A reward for moving like the environment's reference, in addition to the task's reward."""

    metrics: ClassVar[Metrics] = METRICS

    kind: Literal["amp"] = Field("amp", description="Adversarial motion prior; for ppo.")
    task_weight: float = Field(0.5, ge=0, description="Weight of the environment's reward.")
    style_weight: float = Field(1.0, ge=0, description="Weight of the style reward.")
    gradient_penalty: float = Field(
        5.0, ge=0, description="Weight of the gradient penalty, at windows of the reference."
    )
    logit_penalty: float = Field(0.01, ge=0, description="L2 penalty on the last layer's weights.")
    weight_decay: float = Field(1e-4, ge=0, description="L2 penalty on all weights.")
    learning_rate: float = Field(1e-4, gt=0, description="Learning rate of Adam.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    hidden: tuple[PositiveInt, ...] = Field((256, 128), description="Units of each hidden layer.")
    updates: int = Field(4, ge=1, description="Gradient steps of the discriminator per iteration.")
    batch_size: int = Field(
        512,
        ge=2,
        description="Windows of the policy in a minibatch, half of them replayed, and of the "
        "reference.",
    )
    replay_capacity: int = Field(16_384, ge=1, description="Older windows kept for replay.")
    replay_per_iteration: int = Field(
        1_024, ge=1, description="Windows of an iteration that enter the replay."
    )

    def check(self, shards: int) -> None:
        """Raise an error for sizes that do not divide over the shards."""
        sizes = ("batch_size", "replay_capacity", "replay_per_iteration")
        for name in sizes:
            size = getattr(self, name)
            if size % shards:
                near = sorted({max(1, size // shards) * shards, (size // shards + 1) * shards})
                raise UsageError(
                    f"rewards.{name} {size:,} does not divide over {shards:,} shards: use "
                    f"{' or '.join(f'{n:,}' for n in near)}."
                )
        if self.replay_per_iteration > self.replay_capacity:
            raise UsageError(
                f"rewards.replay_per_iteration {self.replay_per_iteration:,} is more than "
                f"rewards.replay_capacity {self.replay_capacity:,} holds: use at most that."
            )

    @property
    def num_updates(self) -> int:
        return self.updates

    def for_rollouts(
        self, run: Resolved, key: Key | None, device: torch.device, ranks: Ranks = ALONE
    ) -> AMP:
        windows, motions = reference_windows(run.recipe.task, run.spec)
        with torch.device("meta" if key is None else "cpu"):
            network = Discriminator(windows.shape[1:], self.hidden, make_generator(key))
        return AMP(self, network, windows, run.recipe.learner.shards, device, ranks, motions)

    def plan(self, source: AMP) -> RewardsSection:
        frames, features = source.reference.shape[1:]
        line = (
            f"before it, {self.updates:,} gradient steps of the discriminator: {self.batch_size:,} "
            f"windows of the policy, half of them replayed, against {self.batch_size:,} of the "
            f"reference's {len(source.reference):,}; a window is {frames:,} frames x "
            f"{features:,} features"
        )
        sizes = {
            "discriminator_batches": self.updates,
            "discriminator_batch_size": self.batch_size,
            "replay_capacity": self.replay_capacity,
            "window_frames": frames,
            "window_features": features,
        }
        units = frames * features + sum(self.hidden)
        workspace = 4 * _KEPT_PER_UNIT * units * 2 * self.batch_size // source.shards
        state = num_bytes(source.optimizer.state_dict())
        learned = source.flat.data.nbytes + source.flat.grad.nbytes + state
        memory = {
            "discriminator": learned + sum(buffer.nbytes for buffer in source.network.buffers()),
            "replay_windows": sum(ring.windows.nbytes for ring in source.rings),
            "reference_windows": source.reference.nbytes,
        }
        return RewardsSection([line], sizes, memory, workspace)


class Drawn(NamedTuple):
    """A shard's part of a minibatch: raw windows [n, frames, features] each."""

    agent: torch.Tensor
    demo: torch.Tensor


def style_rewards(logits: torch.Tensor) -> torch.Tensor:
    """-log(max(1 - sigmoid(D), 1e-4)), in a numerically stable form."""
    return functional.softplus(logits).clamp(max=LARGEST)


def discriminator_loss(
    network: Discriminator, drawn: Drawn, config: AMPConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [] of the module's docstring, and the values of `AMP.METRICS`."""
    agent = network(drawn.agent)
    demo, slopes = network.slopes(network.inputs(drawn.demo))
    # BCE(D, 0) = log(1 + e^D) and BCE(D, 1) = log(1 + e^-D).
    error = 0.5 * (functional.softplus(agent).mean() + functional.softplus(-demo).mean())
    squares = [weight.square().sum() for weight in network.weights()]
    steepness = slopes.mean()
    loss = (
        error
        + config.gradient_penalty * steepness
        + config.logit_penalty * squares[-1]
        + config.weight_decay * torch.stack(squares).sum()
    )
    with torch.no_grad():
        right = [(agent < 0).float().mean(), (demo > 0).float().mean()]
        metrics = torch.stack([loss, steepness, *right, agent.mean(), demo.mean()])
    return loss, metrics


class Demonstrations:
    """Windows of the reference, sampled in proportion to the practice of their motions."""

    def __init__(self, windows: Array, motions: Array | None) -> None:
        """windows: [n, frames, features]; motions: [n] int64, or None for one motion."""
        self._windows = windows
        self._num = None if motions is None else np.bincount(motions)
        if motions is not None and self._num is not None:
            self._by_motion = np.argsort(motions, kind="stable")
            self._first = np.cumsum(self._num) - self._num

    def draw(self, generator: np.random.Generator, size: int, part: Fragment) -> Array:
        """Sample windows [size, frames, features] with replacement, by the motions in `part`."""
        if self._num is None:
            return self._windows[generator.integers(0, len(self._windows), size)]
        practised = part.obs[MOTION].reshape(-1)
        motions = practised[generator.integers(0, len(practised), size)].astype(np.int64)
        inside = (generator.random(size) * self._num[motions]).astype(np.int64)
        chosen: Array = self._windows[self._by_motion[self._first[motions] + inside]]
        return chosen


class AMP(RewardSource):
    """AMP, as described in the module's docstring."""

    METRICS = (
        "amp/loss",
        "amp/gradient_penalty",
        "amp/agent_accuracy",
        "amp/demo_accuracy",
        "amp/agent_logit",
        "amp/demo_logit",
    )

    def __init__(
        self,
        config: AMPConfig,
        network: Discriminator,
        reference: Array,
        shards: int,
        device: torch.device,
        ranks: Ranks = ALONE,
        motions: Array | None = None,
    ) -> None:
        """reference: [n, frames, features] float32, every window of the reference.

        shards: of all ranks; this rank has windows and ring buffers of its own shards. motions: [n]
        int64, the motion of each window; None for a single motion.
        """
        config.check(shards)
        self.config, self.device, self.shards = config, device, shards
        self.ranks, self.local_shards = ranks, ranks.part(shards)
        self.network = network.to(device)
        epsilon = config.adam_epsilon
        self.optimizer = NetworkOptimizer("discriminator", self.network, epsilon, ranks)
        self.flat = self.optimizer.flat
        self.reference = reference
        meta = device if device.type == "meta" else None
        sizes = (config.replay_capacity // shards, reference.shape[1:])
        self.rings = [WindowRing(*sizes, meta) for _ in self.local_shards]
        self._other_rings: dict[int, Tree] = {}
        self._windows: list[StepWindows] = []
        self._rollouts: Sequence[Fragment] = []
        self._demonstrations = Demonstrations(reference, motions)
        self._of_reference = moments(reference)
        self._digest = digest({"reference": reference})
        if meta is None:
            self.network.normaliser.absorb(self._reference_moments(config.replay_per_iteration))

    def relabel_rollouts(
        self, rollouts: Sequence[Fragment]
    ) -> tuple[list[Array], dict[str, float]]:
        """Combine task and style rewards; the windows are kept for `batches`."""
        for part in rollouts:
            if not part.present.all():
                raise UsageError(
                    "rewards.kind amp needs agents that are always present, and in this "
                    "environment some come and go: use rewards.kind given."
                )
        self._windows = [StepWindows(part, STYLE) for part in rollouts]
        self._rollouts = rollouts
        styles = [self.style(part) for part in rollouts]
        faults = [_fault(s, style) for s, style in zip(self.local_shards, styles, strict=True)]
        raise_first(self.ranks, faults)
        config = self.config
        mixed = [
            (config.task_weight * part.rewards + config.style_weight * style).astype(np.float32)
            for part, style in zip(rollouts, styles, strict=True)
        ]
        means = self.ranks.gather([float(style.mean(dtype=np.float64)) for style in styles])
        return mixed, {"amp/style_reward": sum(means) / len(means)}

    def style(self, part: Fragment) -> Array:
        """Style rewards [num_envs, steps] float32, of the window after each step."""
        logits = values_after(
            part, self._logits(part.obs[STYLE]), lambda obs, _: self._logits(obs[STYLE])
        )
        rewards: Array = style_rewards(logits).cpu().numpy()
        return rewards

    def _logits(self, windows: Array) -> torch.Tensor:
        """The discriminator's logits [...] of raw windows [..., frames, features]."""
        flat = windows.reshape(-1, *windows.shape[-2:])
        logits = torch.empty(len(flat), device=self.device)
        with torch.no_grad():
            for start in range(0, len(flat), WINDOWS_AT_ONCE):
                part = slice(start, start + WINDOWS_AT_ONCE)
                logits[part] = self.network(torch.from_numpy(flat[part]).to(self.device))
        return logits.reshape(windows.shape[:-2])

    def batches(self, key: Key) -> Iterator[BatchMetrics]:
        """Take the discriminator's gradient steps on the rollouts that were last relabelled."""
        config = self.config
        kept = [
            windows.draw(
                key.child("replay", s).generator(), config.replay_per_iteration // self.shards
            )
            for s, windows in zip(self.local_shards, self._windows, strict=True)
        ]
        self._update_normaliser(kept)
        for i in range(config.updates):
            keys = [key.child("batch", i, s) for s in self.local_shards]
            yield BatchMetrics(self.learn([self._draw(at, k) for at, k in enumerate(keys)]))
        for ring, windows in zip(self.rings, kept, strict=True):
            ring.add(windows)
        self._windows, self._rollouts = [], []

    def _update_normaliser(self, windows: Sequence[Array]) -> None:
        """Update the normaliser with windows of the policy, and the reference with equal weight."""
        parts = self.ranks.gather([(len(x), moments(x)) for x in windows])
        merged = reduce(
            merge_moments, [part for _, part in parts], no_moments(self.reference.shape[-1])
        )
        reference = self._reference_moments(sum(number for number, _ in parts))
        self.network.normaliser.absorb(merge_moments(merged, reference))

    def _reference_moments(self, num_windows: int) -> Tree:
        """The reference's moments with the weight of `num_windows` windows."""
        count = float(num_windows * self.reference.shape[1])
        whole = self._of_reference
        share = count / whole["count"]
        return {"count": np.asarray(count), "mean": whole["mean"], "m2": whole["m2"] * share}

    def _draw(self, at: int, key: Key) -> Drawn:
        """Sample the part of one of this rank's shards; half of the policy's windows are from the
        ring buffer, once it has any."""
        generator, size, ring = key.generator(), self.config.batch_size // self.shards, self.rings
        old = size // 2 if len(ring[at]) else 0
        agent = self._windows[at].draw(generator, size - old)
        if old:
            agent = np.concatenate([agent, ring[at].draw(generator, old)])
        demo = self._demonstrations.draw(generator, size, self._rollouts[at])
        return Drawn(*(torch.from_numpy(x).to(self.device) for x in (agent, demo)))

    def learn(self, drawn: Sequence[Drawn]) -> dict[str, float]:
        """Take one gradient step on given windows, one `Drawn` per shard, if it is finite."""
        total = torch.zeros(len(self.METRICS), dtype=torch.float64, device=self.device)
        for part in self.optimizer.in_shard_order(drawn, total):
            loss, metrics = discriminator_loss(self.network, part, self.config)
            (loss / self.shards).backward()  # type: ignore[no-untyped-call]
            total += metrics.double()
        values = dict(zip(self.METRICS, (total / self.shards).tolist(), strict=True))
        self.optimizer.checked_norm(values["amp/loss"], drawn, self._inspect)
        self.optimizer.step(self.config.learning_rate)
        return values

    def _inspect(self, drawn: Drawn) -> Finding:
        """Find the first non-finite value, from a shard's windows to its loss."""
        arrays = drawn._asdict()
        for name, windows in (("the policy", drawn.agent), ("the reference", drawn.demo)):
            if not bool(windows.isfinite().all()):
                return f"a window of {name}", arrays
            with torch.no_grad():
                logits = self.network(windows)
            if not bool(logits.isfinite().all()):
                return f"the logit of a window of {name}", arrays
        loss, _ = discriminator_loss(self.network, drawn, self.config)
        return "" if bool(loss.isfinite()) else "the loss of the discriminator", arrays

    def gather(self) -> None:
        """Gather the ring buffers of all ranks."""
        rings = self.ranks.gather([ring.state_dict() for ring in self.rings])
        self._other_rings = {s: ring for s, ring in enumerate(rings) if s not in self.local_shards}

    def state_dict(self) -> Tree:
        """The reference is the environment's: the state has its hash only."""
        pairs = zip(self.local_shards, self.rings, strict=True)
        rings = self._other_rings | {s: ring.state_dict() for s, ring in pairs}
        return {
            "network": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "rings": {f"{s:06d}": ring for s, ring in rings.items()},
            "reference_sha256": self._digest,
        }

    def load_state_dict(self, state: Tree) -> None:
        if state["reference_sha256"] != self._digest:
            raise UsageError(
                "The reference motion is not the one this run began with: restore the clips, or "
                "start a new run."
            )
        load_arrays(self.network, state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for s, ring in zip(self.local_shards, self.rings, strict=True):
            ring.load_state_dict(state["rings"][f"{s:06d}"])


def _fault(shard: int, style: Array) -> NonFinite | None:
    """The error for style rewards [num_envs, steps] of a shard; None if all are finite."""
    if np.isfinite(style.sum(dtype=np.float64)):
        return None
    env, step = np.argwhere(~np.isfinite(style))[0].tolist()
    return NonFinite(f"the style reward of environment {env}, step {step} (shard {shard})")


def reference_windows(config: EnvConfig, env: EnvSpec) -> tuple[Array, Array | None]:
    """The environment's reference [n, frames, features], checked; and the motion [n] int64 of each
    window, None for a single motion."""
    windows, motions = _reference(config) if STYLE in env.observations else (None, None)
    if windows is None or env.agents > 1:
        raise UsageError(
            "rewards.kind amp compares motion with a reference, and this environment has none: it "
            f"needs an observation '{STYLE}' and the method style_windows(). Use rewards.kind "
            "given."
        )
    spec = env.observations[STYLE]
    if windows.shape[1:] != spec.shape or len(windows) == 0 or len(spec.shape) != 2:
        raise UsageError(
            f"style_windows() gives {list(windows.shape)}, and the observation '{STYLE}' is "
            f"{list(spec.shape)}: they must be [n, frames, features] and [frames, features]."
        )
    if (windows.dtype, spec.dtype) != (np.float32, "float32") or not np.isfinite(windows).all():
        raise UsageError(
            f"style_windows() and the observation '{STYLE}' must be finite numbers of float32."
        )
    if MOTION not in env.observations or motions is None:
        return windows, None
    known, shape = set(range(max(len(env.motions), 1))), env.observations[MOTION].shape
    if motions.shape != windows.shape[:1] or set(motions.tolist()) != known or shape != (1,):
        raise UsageError(
            f"style_motions() must give the motion (0, 1, ...) of each of the {len(windows):,} "
            f"windows, with at least one window for each of the environment's {len(known):,} "
            f"motions; and the observation '{MOTION}' must be one number."
        )
    return windows, motions.astype(np.int64)


def _reference(config: EnvConfig) -> tuple[Array | None, Array | None]:
    """All windows [n, frames, features] of the environment's reference, and the motion [n] int64 of
    each; None for what the environment does not have."""
    env = config.build_unchecked(config.num_agents)
    try:
        reference, motions = ability(env, StyleReference), ability(env, StyleMotions)
        return (
            None if reference is None else reference.style_windows(),
            None if motions is None else motions.style_motions(),
        )
    finally:
        env.close()
