"""Policies: networks, action distribution and the observation normaliser, as one thing."""

from __future__ import annotations

from abc import abstractmethod

import torch

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.core.registry import Registry
from etude.models.actor_critic import (
    ActorCritic,
    BasePolicy,
    EvaluatedActions,
    Features,
    Memory,
    PolicyConfig,
    map_features,
)
from etude.models.networks import Mlp

__all__ = [
    "ActorCritic",
    "BasePolicy",
    "EvaluatedActions",
    "Features",
    "Memory",
    "MlpPolicy",
    "ModulePolicy",
    "ModulePolicyConfig",
    "PolicyConfig",
    "make_policy",
    "map_features",
]


class MlpPolicy(ActorCritic):
    """Two separate networks over named vector observations."""

    def __init__(
        self,
        config: PolicyConfig,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> None:
        """`generator` is where the initial weights come from; None when they are loaded."""
        super().__init__(config, observations, action)
        hidden, activation = config.hidden, config.activation
        actor = (self._width(config.actor_reads), *hidden, self.num_outputs)
        critic = (self._width(config.critic_reads), *hidden, 1)
        self.actor = Mlp(actor, activation, 0.01, generator)
        self.critic = Mlp(critic, activation, 1.0, generator)

    def _step(
        self, features: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.actor(features), state

    def _forward(
        self, features: Features, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(features["actor"]), self.values(features, memory)

    def values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        """[...]: the value of prepared features [..., n]; there is no memory to consult."""
        return self.critic(features["critic"]).squeeze(-1)  # type: ignore[no-any-return]


class ModulePolicy(MlpPolicy):
    """Actor and critic as ordinary modules, which a `ModulePolicyConfig` makes."""

    def __init__(
        self,
        config: ModulePolicyConfig,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> None:
        ActorCritic.__init__(self, config, observations, action)
        seed = 0 if generator is None else generator.initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = config.network(self._width(config.actor_reads), self.num_outputs)  # type: ignore[assignment]
            self.critic = config.network(self._width(config.critic_reads), 1)  # type: ignore[assignment]


class ModulePolicyConfig(PolicyConfig):
    """A policy for PPO whose networks are one's own: ordinary modules from [..., inputs] to
    [..., outputs]. A subclass defines `network` and may add fields."""

    kind: str = ""  # type: ignore[assignment]

    @abstractmethod
    def network(self, num_inputs: int, num_outputs: int) -> torch.nn.Module:
        """A new network; its initial weights may come from torch's global generator, which is
        seeded for it."""

    def build(
        self,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> ModulePolicy:
        return ModulePolicy(self, observations, action, generator)


POLICIES: Registry[PolicyConfig] = Registry(
    "policy", "etude.models.actor_critic:PolicyConfig", default="mlp"
)


def make_policy(config: PolicyConfig, env: EnvSpec, key: Key | None) -> BasePolicy:
    """A new policy for an environment, its weights drawn from `key`; None when they are loaded."""
    generator = None if key is None else torch.Generator().manual_seed(key.integer())
    return config.build(env.observations, env.action, generator)
