"""Policies of SAC and TD3: an actor of continuous actions, and the twin critics of a learner."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from etude.core.contracts import Action, Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.models.distributions import DiagonalGaussian
from etude.models.networks import Mlp
from etude.models.normalise import Normaliser
from etude.models.policies import BasePolicy, PolicyConfig

LOG_STD_RANGE = (-20.0, 2.0)
SQUASH_EPSILON = 1e-6
"""Keeps the logarithm of a saturated action finite, as in the method's first implementation."""


class WillingNormaliser(Normaliser):
    """Leaves observations as they are, unclipped, until it has absorbed any."""

    has_seen = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] float32, raw."""
        return super().forward(x) if self.has_seen else x

    def _refresh(self) -> None:
        super()._refresh()
        self.has_seen = float(self.count) > 0.0


class Actor(BasePolicy):
    """A network over named vector observations that acts in [-1, 1] per dimension."""

    normaliser = WillingNormaliser
    explore: torch.Tensor
    """[] bool: with noise, act uniformly at random. Off but in what a learner broadcasts while its
    store is still filling."""

    config: PolicyConfig
    outputs_per_action: ClassVar[int] = 1

    def setup(self, generator: torch.Generator | None) -> None:
        config, action = self.config, self.action
        if action.kind != "box":
            raise UsageError(
                f"A {config.kind} policy acts in a box, and this environment's actions are "
                f"{action.kind}: use algorithm ppo with policy.kind mlp, lstm or gru."
            )
        self.num_actions = action.array.shape[0]
        outputs = self.num_actions * self.outputs_per_action
        sizes = (self._width(config.actor_reads), *config.hidden, outputs)
        self.actor = fan_in_mlp(sizes, config.activation, generator)
        self.register_buffer("explore", torch.zeros((), dtype=torch.bool))

    def make_critics(self, generator: torch.Generator | None) -> TwinCritics:
        """New critics of this policy's actions, reading what `prepare` gives under "critic"."""
        width, config = self._width(self._critic_names()), self.config
        return TwinCritics(width, self.num_actions, config.hidden, config.activation, generator)

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        return DiagonalGaussian.noise(generator, steps, num_envs, self.num_actions)

    @abstractmethod
    def _choose(
        self, features: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [num_envs, dims] and log-probabilities [num_envs] at features [num_envs, n]."""

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        if noise is not None and bool(self.explore):
            # A normal number's place in its distribution is uniform.
            actions = torch.erf(noise * math.sqrt(0.5))
            log_prob = -math.log(2.0) * self.num_actions
            return Action(actions, actions.new_full(actions.shape[:-1], log_prob), state)
        return Action(*self._choose(self._read(self.config.actor_reads, obs), noise), state)


class SquashedPolicy(Actor):
    """For SAC: a normal action with a spread for every state, squashed into the box by tanh."""

    outputs_per_action = 2

    def sample(
        self, features: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [..., dims] as a differentiable function of features and standard normal noise.

        And their log-probabilities [...]: tanh stretches space by 1 - tanh^2, so a density
        shrinks by it.
        """
        mean, log_std = self.actor(features).chunk(2, dim=-1)
        raw, density = DiagonalGaussian(mean, log_std.clamp(*LOG_STD_RANGE)).sample(noise)
        actions = raw.tanh()
        stretch = (1.0 - actions.square() + SQUASH_EPSILON).log().sum(-1)
        return actions, density - stretch

    def _choose(
        self, features: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if noise is None:
            noise = features.new_zeros((*features.shape[:-1], self.num_actions))
        return self.sample(features, noise)


class DeterministicPolicy(Actor):
    """For TD3: one action for every state, and noise of a given size around it to explore."""

    exploration: torch.Tensor
    """[] standard deviation of that noise; zero but in what a learner broadcasts."""

    def setup(self, generator: torch.Generator | None) -> None:
        super().setup(generator)
        self.register_buffer("exploration", torch.zeros(()))

    def actions(self, features: torch.Tensor) -> torch.Tensor:
        """[..., dims] in [-1, 1] at features [..., n]."""
        actions: torch.Tensor = self.actor(features).tanh()
        return actions

    def _choose(
        self, features: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        actions = self.actions(features)
        if noise is not None:
            actions = torch.addcmul(actions, self.exploration, noise).clamp(-1.0, 1.0)
        # What is certain has no density; nothing asks for one.
        return actions, actions.new_zeros(actions.shape[:-1])


def fan_in_mlp(sizes: tuple[int, ...], activation: str, generator: torch.Generator | None) -> Mlp:
    """Weights and biases uniform in +-1/sqrt(inputs) of their layer.

    What SAC and TD3 were tuned with: outputs near zero at the start, whatever the input.
    """
    network = Mlp(sizes, activation, 1.0, None)
    if generator is not None:
        with torch.no_grad():
            for i, inputs in enumerate(sizes[:-1]):
                bound = 1.0 / math.sqrt(inputs)
                for part in ("weight", "bias"):
                    network.get_parameter(f"{part}{i}").uniform_(-bound, bound, generator=generator)
    return network


class TwinCritics(nn.Module):
    """Two networks over features and action; the smaller estimate is the one to believe.

    Two plain networks and not one batched product: on a processor the latter is slower.
    """

    def __init__(
        self,
        num_features: int,
        num_actions: int,
        hidden: tuple[int, ...],
        activation: str,
        generator: torch.Generator | None,
    ) -> None:
        """Without a generator the weights are about to be loaded (or on the meta device)."""
        super().__init__()
        sizes = (num_features + num_actions, *hidden, 1)
        self.first = fan_in_mlp(sizes, activation, generator)
        self.second = fan_in_mlp(sizes, activation, generator)

    def forward(
        self, features: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both estimates [n] of actions [n, dims] at features [n, num_features]."""
        x = torch.cat([features, actions], dim=-1)
        return self.first(x).squeeze(-1), self.second(x).squeeze(-1)

    def first_q(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The first estimate alone, [n]."""
        estimate: torch.Tensor = self.first(torch.cat([features, actions], dim=-1)).squeeze(-1)
        return estimate

    def min_q(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The smaller of both estimates, [n]."""
        return torch.minimum(*self(features, actions))
