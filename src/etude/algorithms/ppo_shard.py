"""One shard of the buffer: its segments as tensors, and PPO's loss on some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch

from etude.core.contracts import Array, Fragment, Observations
from etude.core.keys import Key
from etude.experience.returns import advantages_and_targets, importance_weights, next_values
from etude.experience.sampling import Draw, permuted, prioritised, probabilities
from etude.experience.segments import episode_starts
from etude.models.policies import ActorCritic, Features, Memory


class ShardConfig(Protocol):
    """What of PPO's config a shard reads."""

    @property
    def gamma(self) -> float: ...
    @property
    def gae_lambda(self) -> float: ...
    @property
    def advantages(self) -> Literal["gae", "vtrace"]: ...
    @property
    def sampling(self) -> Literal["uniform", "prioritised"]: ...
    @property
    def priority_alpha(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def value_clip(self) -> float | None: ...
    @property
    def value_coef(self) -> float: ...
    @property
    def entropy_coef(self) -> float: ...
    @property
    def bound_coef(self) -> float: ...


class Minibatch(NamedTuple):
    """A shard's part of one gradient."""

    segments: torch.Tensor
    """[m] int64."""
    weights: torch.Tensor | None
    """[m] what a segment's loss counts; None where all count the same."""


@dataclass
class Shard:
    """Segments [n, horizon, ...], with what was true of them before the update's first step."""

    features: Features
    memory: Memory | None
    """None for a memoryless policy."""
    actions: torch.Tensor
    log_probs: torch.Tensor
    """[n, horizon] under the proximal policy: the weights at the start of the update."""
    importance: torch.Tensor | None
    """[n, horizon] at most 1: how likely the proximal policy takes an action, over how likely
    the older policy was that collected it; None where the two are the same."""
    behaviour_kl: float
    """Mean KL divergence between those two policies."""
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    present: torch.Tensor
    """[n, horizon] bool."""
    all_present: bool
    priorities: Array | None
    """[n] sum of |advantage| over a segment's steps, before advantages are normalised; None where
    segments are drawn uniformly."""
    weights: torch.Tensor | None = None
    """[n, horizon] what a step counts, 1 on average over the buffer; None where all are 1."""
    drawn: Array = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[n] bool: the segments that were in a minibatch of this iteration."""

    METRICS: ClassVar = (
        "train/policy_gradient_loss",
        "train/value_loss",
        "train/entropy_loss",
        "train/approx_kl",
        "train/clip_fraction",
    )

    @classmethod
    def of(
        cls,
        part: Fragment,
        rewards: Array,
        policy: ActorCritic,
        device: torch.device,
        config: ShardConfig,
        horizon: int,
        chunk: int,
        is_stale: bool = False,
    ) -> Shard:
        """Values and advantages of a fragment [rows, steps], cut into segments.

        Networks are asked about `chunk` segments at a time: an iteration may be far larger than
        what its gradients need at once. `is_stale`: an older policy collected the fragment.
        """

        def cut(array: Array) -> torch.Tensor:
            x = torch.from_numpy(array).to(device)
            return x.reshape(-1, horizon, *x.shape[2:])

        with torch.no_grad():
            features = policy.prepare(_put_read(part.obs, policy, device))
            features = _each(features, lambda x: x.reshape(-1, horizon, *x.shape[2:]))
            actions, behaviour, present = cut(part.actions), cut(part.log_probs), cut(part.present)
            memory = None
            if policy.state_specs:
                states = _put_all(part.states, device)
                states = {name: x.flatten(0, 1) for name, x in states.items()}
                memory = Memory(states, torch.from_numpy(episode_starts(part, horizon)).to(device))
            taken = actions if is_stale else None
            values, proximal = _in_chunks(policy, features, memory, taken, chunk)
            importance = None if proximal is None else importance_weights(proximal, behaviour)
            log_probs = behaviour if proximal is None else proximal
            corrections = importance if config.advantages == "vtrace" else None
            advantages, returns = _advantages(
                part, rewards, policy, values, corrections, config, chunk
            )
            shard = cls(
                features=features,
                memory=memory,
                actions=actions,
                log_probs=log_probs,
                importance=importance,
                behaviour_kl=0.0 if proximal is None else float(_kl(proximal - behaviour).mean()),
                advantages=advantages,
                returns=returns,
                values=values,
                present=present,
                all_present=bool(part.present.all()),
                priorities=None,
                drawn=np.zeros(len(values), np.bool_),
            )
            if config.sampling == "prioritised":
                shard.priorities = (advantages.abs() * present).sum(1).cpu().numpy()
            return shard

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """[k]: what of x [n, horizon] stands for an agent, in order."""
        return x.flatten() if self.all_present else x[self.present]

    def draw(self, key: Key, minibatches: int, size: int, config: ShardConfig, beta: float) -> Draw:
        """One pass over this shard in minibatches of `size` segments."""
        generator, n = key.generator(), len(self.advantages)
        if self.priorities is None:
            return permuted(generator, n, minibatches)
        p = probabilities(self.priorities, config.priority_alpha)
        return prioritised(generator, p, minibatches, size, beta)

    def minibatch(self, draw: Draw, index: int) -> Minibatch:
        """One minibatch of a draw, ready for `loss`."""
        segments, device = draw.segments[index], self.advantages.device
        self.drawn[segments] = True
        weights = None if draw.weights is None else torch.from_numpy(draw.weights[index]).to(device)
        return Minibatch(torch.from_numpy(segments).to(device), weights)

    def loss(
        self, policy: ActorCritic, chosen: Minibatch, config: ShardConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """PPO's loss on a minibatch; and the values of `METRICS`.

        The probability ratio is clipped around the proximal policy. Where an older policy
        collected the steps, it enters the policy loss once, as an importance weight (decoupled
        PPO, Hilton et al. 2021).
        """
        order = chosen.segments
        advantages = self.advantages.index_select(0, order)
        weights = self._weights(chosen)

        def mean(x: torch.Tensor) -> torch.Tensor:
            # A number that is the same for every step has no steps to weigh.
            return x.mean() if weights is None or x.ndim == 0 else (x * weights).mean()

        memory = None if self.memory is None else self.memory.at(order)
        features = _each(self.features, lambda x: x.index_select(0, order))
        judged = policy.evaluate(features, self.actions.index_select(0, order), memory)
        log_ratio = judged.log_probs - self.log_probs.index_select(0, order)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        if self.importance is not None:
            surrogate = surrogate * self.importance.index_select(0, order)
        policy_loss = -mean(surrogate)
        value_loss = mean(self._value_errors(judged.values, order, config.value_clip))
        entropy = mean(judged.entropy)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        if config.bound_coef:
            loss = loss + config.bound_coef * mean(judged.excess)
        with torch.no_grad():
            kl = mean(_kl(log_ratio))
            clip_fraction = mean((ratio != clipped).float())
            metrics = torch.stack([policy_loss, value_loss, -entropy, kl, clip_fraction]).detach()
        return loss, metrics

    def _weights(self, chosen: Minibatch) -> torch.Tensor | None:
        """[m, horizon] or [m, 1]: what each step of a minibatch counts."""
        own = None if self.weights is None else self.weights.index_select(0, chosen.segments)
        if chosen.weights is None:
            return own
        drawn = chosen.weights.unsqueeze(1)
        return drawn if own is None else own * drawn

    def _value_errors(
        self, values: torch.Tensor, order: torch.Tensor, value_clip: float | None
    ) -> torch.Tensor:
        """[m, horizon] halves of squared errors; with `value_clip` the larger one of the value's
        and of that of the value kept near the old one."""
        returns = self.returns.index_select(0, order)
        errors = (values - returns).square()
        if value_clip is not None:
            old = self.values.index_select(0, order)
            near = old + (values - old).clamp(-value_clip, value_clip)
            errors = torch.maximum(errors, (near - returns).square())
        return 0.5 * errors

    def minibatch_arrays(self, chosen: Minibatch) -> dict[str, torch.Tensor]:
        """The minibatch itself, to reproduce a failure with."""
        named = {f"features_{name}": x for name, x in self.features.items()}
        if self.memory is not None:
            named |= {f"state_{name}": x for name, x in self.memory.state.items()}
            named["starts"] = self.memory.starts
        named |= {"actions": self.actions, "log_probs": self.log_probs, "values": self.values}
        named |= {"advantages": self.advantages, "returns": self.returns}
        if self.importance is not None:
            named["importance"] = self.importance
        return {name: x[chosen.segments] for name, x in named.items()}


def _put_all(arrays: Observations, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _put_read(
    obs: Observations, policy: ActorCritic, device: torch.device
) -> dict[str, torch.Tensor]:
    """The observations that a policy reads."""
    return _put_all({name: obs[name] for name in policy.observations}, device)


def _advantages(
    part: Fragment,
    rewards: Array,
    policy: ActorCritic,
    values: torch.Tensor,
    corrections: torch.Tensor | None,
    config: ShardConfig,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and value targets [n, horizon], along the rows of a fragment.

    values, corrections: [n, horizon]; the corrections are V-trace's, None for GAE.
    """
    device, by_row, most = values.device, part.rewards.shape, chunk * values.shape[1]

    def put(array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def values_at(obs: Observations, state: Observations) -> torch.Tensor:
        """[k]: the value of single observations, each met with its recurrent state."""
        single = _each(policy.prepare(_put_read(obs, policy, device)), lambda x: x.unsqueeze(1))
        nowhere = torch.zeros(single["actor"].shape[:2], dtype=torch.bool, device=device)
        known = Memory(_put_all(state, device), nowhere) if policy.state_specs else None
        return _in_chunks(policy, single, known, None, most)[0].squeeze(1)

    following = next_values(
        values.reshape(by_row),
        values_at(part.last_obs, part.last_state),
        values_at(part.finals.obs, part.finals.state),
        put(part.finals.rows),
        put(part.finals.steps),
    )
    advantages, targets = advantages_and_targets(
        put(rewards),
        values.reshape(by_row),
        following,
        put(part.terminated),
        put(part.truncated),
        config.gamma,
        config.gae_lambda,
        None if corrections is None else corrections.reshape(by_row),
    )
    return advantages.reshape(values.shape), targets.reshape(values.shape)


def _kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """[...] the estimate (r - 1) - log r of the KL divergence, of log r: never below 0."""
    return log_ratio.exp() - 1.0 - log_ratio


def _each(features: Features, change: Callable[[torch.Tensor], torch.Tensor]) -> Features:
    """Both features changed; one that both networks share, once."""
    actor = change(features["actor"])
    same = features["critic"] is features["actor"]
    return {"actor": actor, "critic": actor if same else change(features["critic"])}


def _in_chunks(
    policy: ActorCritic,
    features: Features,
    memory: Memory | None,
    actions: torch.Tensor | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values and, where actions are given, their log-probabilities now: [n, horizon] each."""
    values = torch.empty(features["actor"].shape[:2], device=features["actor"].device)
    log_probs = None if actions is None else torch.empty_like(values)
    for start in range(0, len(values), chunk):
        some = slice(start, start + chunk)
        part = _each(features, lambda x, some=some: x[some])  # type: ignore[misc]
        known = None if memory is None else memory.at(some)
        if actions is None or log_probs is None:
            values[some] = policy.values(part, known)
        else:
            judged = policy.evaluate(part, actions[some], known)
            values[some], log_probs[some] = judged.values, judged.log_probs
    return values, log_probs
