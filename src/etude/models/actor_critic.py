"""Policies of PPO: an action distribution and a value function over shared features."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from etude.core.contracts import Action, Array
from etude.core.trees import Tree
from etude.models.networks import Categoricals, DiagonalGaussian, Mlp, SquashedGaussian
from etude.models.policies import BasePolicy, BasePolicyConfig, Features, PolicyConfig


class EvaluatedActions(NamedTuple):
    """Given actions, evaluated by a policy."""

    log_probs: torch.Tensor
    """[...]"""
    entropy: torch.Tensor
    """[...], or [] if it is the same for every step."""
    values: torch.Tensor
    """[...]"""
    excess: torch.Tensor
    """[...] squared distance of the mean action beyond its bounds; [] if it cannot leave them."""


class Memory(NamedTuple):
    """Recurrent state at the start of each segment, and the starts of episodes."""

    state: dict[str, torch.Tensor]
    """{name: [segments, units]} before the first step, {} for a memoryless policy."""
    starts: torch.Tensor
    """[segments, horizon] bool: an episode begins at this step; the state is zeroed before it."""

    def at(self, segments: torch.Tensor | slice) -> Memory:
        """The memory of these segments."""
        state = {name: x[segments] for name, x in self.state.items()}
        return Memory(state, self.starts[segments])


class ActorCritic(BasePolicy):
    """Base class of a policy with its value function.

    Actor and critic share the encoders of images that both read. A subclass defines `_step`,
    `_forward` and `_values`, whose features are encoded.
    """

    def setup(self, generator: torch.Generator | None) -> None:
        names = tuple(dict.fromkeys((*self.config.actor_reads, *self.config.critic_reads)))
        self.encoders = self.make_encoders(names, generator)
        self._log_std_range: tuple[float, float] | None = None
        self._gaussian, self.std_of_state = DiagonalGaussian, False
        """`std_of_state`: the actor computes the standard deviation for every state."""
        self._noise_decides = self.action.kind == "box"
        """Whether the density of an action depends only on its noise."""
        if self.action.kind != "box":
            return
        if isinstance(config := self.config, PolicyConfig):
            self.std_of_state = config.std == "state"
            self._noise_decides = not (self.std_of_state or config.squash)
            if config.squash:
                self._gaussian = SquashedGaussian
            if config.std_range is not None:
                self._log_std_range = (math.log(config.std_range[0]), math.log(config.std_range[1]))
        start = torch.full((self.num_actions,), float(np.log(config.init_std)))
        # A parameter even without a gradient, which the optimizer skips. A state-dependent standard
        # deviation is this plus the output of the actor.
        self.log_std = nn.Parameter(start, requires_grad=config.learn_std)

    @property
    def num_actions(self) -> int:
        """Dimensions of a box action, or the number of choices of a discrete one."""
        return self.action.array.shape[0]

    @property
    def num_outputs(self) -> int:
        """Outputs of the actor: means, with state-dependent log standard deviations, or logits of
        all choices."""
        if self.action.kind != "box":
            return sum(self.action.sizes)
        return self.num_actions * (2 if self.std_of_state else 1)

    @abstractmethod
    def _step(
        self, features: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(outputs of the actor [num_envs, num_outputs], next state) at features [num_envs, n]."""

    @abstractmethod
    def _forward(
        self, features: Features, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs of the actor [..., num_outputs], values [...]) at encoded features."""

    @abstractmethod
    def _values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        """Values [...] of encoded features [..., n]."""

    def values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        """Values [segments, horizon] of prepared features [segments, horizon, n].

        A memoryless policy accepts any leading shape; its memory is None.
        """
        return self._values(self._encoded(features), memory)

    def _encoded(self, features: Features) -> Features:
        """Replace images in prepared features by their encodings."""
        if self.encoders is None:
            return features
        encoded, beside = self.encoders.encoded(features), self.encoders.beside
        actor = beside(features["actor"], encoded, self.config.actor_reads)
        same = self._critic_names() == self.config.actor_reads
        critic = actor if same else beside(features["critic"], encoded, self._critic_names())
        return {"actor": actor, "critic": critic}

    @staticmethod
    def actor_arrays(arrays: Tree) -> Tree:
        """The arrays of a policy without those of its value function."""
        return {name: x for name, x in arrays.items() if not name.startswith("critic.")}

    def _distribution(
        self, outputs: torch.Tensor, features: Features
    ) -> DiagonalGaussian | Categoricals:
        """The action distribution; features: may hold an action mask [..., choices]."""
        if self.action.kind != "box":
            name = self.config.action_mask
            return Categoricals(
                outputs, self.action.sizes, None if name is None else features[name]
            )
        mean: torch.Tensor = outputs
        log_std: torch.Tensor = self.log_std
        if self.std_of_state:
            mean, change = outputs.chunk(2, dim=-1)
            log_std = log_std + change
        return self._gaussian(mean, self._bounded(log_std))

    def _bounded(self, log_std: torch.Tensor) -> torch.Tensor:
        return log_std if self._log_std_range is None else log_std.clamp(*self._log_std_range)

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        if self.action.kind == "box":
            return DiagonalGaussian.noise(generator, steps, num_envs, self.num_actions)
        return Categoricals.noise(generator, steps, num_envs, self.num_actions)

    def log_probs(self, noise: torch.Tensor) -> torch.Tensor | None:
        if not self._noise_decides:
            return None
        return DiagonalGaussian.log_density(noise, self._bounded(self.log_std))

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        reads = self.config.actor_reads
        features = self._read(reads, obs)
        if self.encoders is not None:
            images = self.encoders.encoded({name: obs[name] for name in reads})
            features = self.encoders.beside(features, images, reads)
        outputs, state = self._step(features, state)
        distribution = self._distribution(outputs, obs)
        if noise is not None and self._noise_decides:
            return Action(distribution.actions(noise), None, state)  # type: ignore[union-attr]
        if noise is not None:
            return Action(*distribution.sample(noise), state)
        actions = distribution.mode()
        return Action(actions, distribution.log_prob(actions), state)

    def evaluate(
        self, features: Features, actions: torch.Tensor, memory: Memory | None
    ) -> EvaluatedActions:
        """Evaluate actions [segments, horizon, n] at prepared features.

        A memoryless policy accepts any leading shape; its memory is None.
        """
        outputs, values = self._forward(self._encoded(features), memory)
        distribution = self._distribution(outputs, features)
        return EvaluatedActions(
            distribution.log_prob(actions), distribution.entropy(), values, distribution.excess()
        )

    @torch.no_grad()
    def mean_std(self, features: Features, memory: Memory | None) -> float:
        """Mean standard deviation of box actions at prepared features."""
        outputs, _ = self._forward(self._encoded(features), memory)
        return float(self._distribution(outputs, features).log_std.exp().mean())  # type: ignore[union-attr]


class MlpPolicy(ActorCritic):
    """Separate networks of actor and critic."""

    config: PolicyConfig

    def setup(self, generator: torch.Generator | None) -> None:
        super().setup(generator)
        config = self.config
        actor = (self._width(config.actor_reads), *config.hidden, self.num_outputs)
        critic = (self._width(self._critic_names()), *config.critic_layers, 1)
        norm, both = config.layer_norm != "off", config.layer_norm == "all"
        self.actor: nn.Module = Mlp(actor, config.activation, 0.01, generator, both)
        self.critic: nn.Module = Mlp(critic, config.activation, 1.0, generator, norm)

    def _step(
        self, features: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.actor(features), state

    def _forward(
        self, features: Features, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(features["actor"]), self._values(features, memory)

    def _values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        return self.critic(features["critic"]).squeeze(-1)  # type: ignore[no-any-return]


class ModulePolicy(MlpPolicy):
    """Actor and critic are modules made by a `ModulePolicyConfig`."""

    config: ModulePolicyConfig  # type: ignore[assignment]

    def setup(self, generator: torch.Generator | None) -> None:
        ActorCritic.setup(self, generator)
        config, seed = self.config, 0 if generator is None else generator.initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = config.network(self._width(config.actor_reads), self.num_outputs)
            self.critic = config.network(self._width(self._critic_names()), 1)


class ModulePolicyConfig(BasePolicyConfig):
    """A policy for PPO with your own networks: modules from [..., inputs] to [..., outputs].

    A subclass defines `network` and may add fields.
    """

    kind: str = ""

    @abstractmethod
    def network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        """A new network; torch's global generator is seeded for its initial weights."""

    def num_activations(self, action_size: int) -> int:
        """Two numbers per output of every layer."""
        with torch.device("meta"):
            networks = nn.ModuleList([self.network(1, action_size), self.network(1, 1)])
        return 2 * sum(p.shape[0] for p in networks.parameters() if p.ndim > 1)

    def policy_class(self) -> type[ModulePolicy]:
        return ModulePolicy
