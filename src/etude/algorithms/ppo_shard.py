"""One shard of the buffer: its segments as tensors, and PPO's loss on some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from etude.core.contracts import Array, Fragment, Observations
from etude.core.keys import Key
from etude.experience.returns import generalised_advantages, next_values
from etude.models.policies import Features, MlpPolicy


class LossConfig(Protocol):
    """The coefficients the loss reads."""

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


@dataclass
class Shard:
    """Segments [n, horizon, ...] with what was true of them when they were collected."""

    features: Features
    actions: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor

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
        policy: MlpPolicy,
        device: torch.device,
        gamma: float,
        gae_lambda: float,
        horizon: int,
    ) -> Shard:
        """Values and advantages of a fragment [rows, steps], cut into segments."""

        def put(array: Array) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        def put_all(obs: Observations) -> dict[str, torch.Tensor]:
            return {name: put(array) for name, array in obs.items()}

        with torch.no_grad():
            obs = put_all(part.obs)
            values = policy.values(obs)
            following = next_values(
                values,
                policy.values(put_all(part.last_obs)),
                policy.values(put_all(part.finals.obs)),
                put(part.finals.rows),
                put(part.finals.steps),
            )
            advantages = generalised_advantages(
                put(rewards),
                values,
                following,
                put(part.terminated),
                put(part.truncated),
                gamma,
                gae_lambda,
            )

            def cut(x: torch.Tensor) -> torch.Tensor:
                return x.reshape(-1, horizon, *x.shape[2:])

            features = policy.prepare(obs)
            same = features["critic"] is features["actor"]
            actor = cut(features["actor"])
            return cls(
                features={"actor": actor, "critic": actor if same else cut(features["critic"])},
                actions=cut(put(part.actions)),
                log_probs=cut(put(part.log_probs)),
                advantages=cut(advantages),
                returns=cut(advantages + values),
                values=cut(values),
            )

    def permutation(self, key: Key) -> torch.Tensor:
        """Every segment of this shard exactly once."""
        order = key.generator().permutation(len(self.advantages))
        return torch.from_numpy(order).to(self.advantages.device)

    def loss(
        self, policy: MlpPolicy, order: torch.Tensor, config: LossConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """PPO's loss on the segments `order` [m]; and the values of `METRICS`."""
        advantages = self.advantages[order]
        judged = policy.evaluate(self._features(order), self.actions[order])
        log_ratio = judged.log_probs - self.log_probs[order]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = self._value_loss(judged.values, order, config.value_clip)
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * judged.entropy
        if config.bound_coef:
            loss = loss + config.bound_coef * judged.excess
        with torch.no_grad():
            kl = (ratio - 1.0 - log_ratio).mean()
            clip_fraction = (ratio != clipped).float().mean()
            metrics = torch.stack(
                [policy_loss, value_loss, -judged.entropy, kl, clip_fraction]
            ).detach()
        return loss, metrics

    def _value_loss(
        self, values: torch.Tensor, order: torch.Tensor, value_clip: float | None
    ) -> torch.Tensor:
        returns = self.returns[order]
        loss = (values - returns).square()
        if value_clip is not None:
            old = self.values[order]
            near = old + (values - old).clamp(-value_clip, value_clip)
            loss = torch.maximum(loss, (near - returns).square())
        return loss.mean()

    def _features(self, order: torch.Tensor) -> Features:
        actor = self.features["actor"][order]
        same = self.features["critic"] is self.features["actor"]
        return {"actor": actor, "critic": actor if same else self.features["critic"][order]}

    def minibatch_arrays(self, order: torch.Tensor) -> dict[str, torch.Tensor]:
        """The minibatch itself, to reproduce a failure with."""
        named = {f"features_{name}": x for name, x in self.features.items()}
        named |= {"actions": self.actions, "log_probs": self.log_probs, "values": self.values}
        named |= {"advantages": self.advantages, "returns": self.returns}
        return {name: x[order] for name, x in named.items()}
