"""Policies for PPO whose networks are one's own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from etude.models.actor_critic import ActorCritic, MlpPolicy
from etude.models.policies import BasePolicyConfig


class ModulePolicy(MlpPolicy):
    """Actor and critic as ordinary modules, which a `ModulePolicyConfig` makes."""

    config: ModulePolicyConfig  # type: ignore[assignment]

    def setup(self, generator: torch.Generator | None) -> None:
        ActorCritic.setup(self, generator)
        config, seed = self.config, 0 if generator is None else generator.initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = config.network(self._width(config.actor_reads), self.num_outputs)
            self.critic = config.network(self._width(self._critic_names()), 1)


class ModulePolicyConfig(BasePolicyConfig):
    """A policy for PPO whose networks are one's own: ordinary modules from [..., inputs] to
    [..., outputs]. A subclass defines `network` and may add fields."""

    kind: str = ""

    @abstractmethod
    def network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        """A new network; its initial weights may come from torch's global generator, which is
        seeded for it."""

    def num_activations(self, action_size: int) -> int:
        """Two per output of every layer."""
        with torch.device("meta"):
            networks = nn.ModuleList([self.network(1, action_size), self.network(1, 1)])
        return 2 * sum(p.shape[0] for p in networks.parameters() if p.ndim > 1)

    def policy_class(self) -> type[ModulePolicy]:
        return ModulePolicy
