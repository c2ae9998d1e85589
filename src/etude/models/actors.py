"""Policies of SAC and TD3: actors with box actions, and critics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from etude.core.contracts import Action, Array
from etude.core.trees import Tree
from etude.models.encoders import ImageEncoders
from etude.models.networks import ACTIVATIONS, DiagonalGaussian, Mlp, Normaliser
from etude.models.policies import BasePolicy, Features, PolicyConfig

LOG_STD_RANGE = (-20.0, 2.0)
SQUASH_EPSILON = 1e-6
"""Keeps the logarithm of saturated actions finite, as in the original implementation of SAC."""
EVERY = slice(None)
"""All networks of an ensemble."""


class DeferredNormaliser(Normaliser):
    """A normaliser that leaves observations unchanged until its first statistics."""

    has_seen = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] float32, raw."""
        return super().forward(x) if self.has_seen else x

    def _refresh(self) -> None:
        super()._refresh()
        self.has_seen = float(self.count) > 0.0


class Actor(BasePolicy):
    """Base class of actors with actions in [-1, 1] per dimension."""

    normaliser = DeferredNormaliser
    explore: torch.Tensor
    """[] bool: with noise, act uniformly at random. Set by the learner in broadcasts until its
    first update."""

    config: PolicyConfig
    outputs_per_action: ClassVar[int] = 1

    def setup(self, generator: torch.Generator | None) -> None:
        config, self.num_actions = self.config, self.num_box_actions()
        outputs = self.num_actions * self.outputs_per_action
        sizes = (self._width(config.actor_reads), *config.hidden, outputs)
        self.actor = self._network("actor", sizes, config.layer_norm == "all", generator)
        self.register_buffer("explore", torch.zeros((), dtype=torch.bool))

    def _network(
        self,
        reader: str,
        sizes: tuple[int, ...],
        layer_norm: bool,
        generator: torch.Generator | None,
    ) -> FeatureNetwork:
        network = FeatureNetwork(sizes, self.config.activation, 1.0, None, layer_norm)
        init_by_fan_in(network, sizes, generator)
        network.reader = reader
        network.reads = self.config.actor_reads if reader == "actor" else self._critic_names()
        network.encoders = self.make_encoders(network.reads, generator)
        return network

    def make_values(self, generator: torch.Generator | None) -> FeatureNetwork:
        """A new value network: prepared features to values [n, 1]."""
        config = self.config
        sizes = (self._width(self._critic_names()), *config.critic_layers, 1)
        return self._network("critic", sizes, config.layer_norm != "off", generator)

    def make_critics(self, generator: torch.Generator | None, num: int = 2) -> Critics:
        """New critics of this policy's actions, which read the features "critic"."""
        config, names = self.config, self._critic_names()
        sizes = (self._width(names) + self.num_actions, *config.critic_layers, 1)
        norm, encoders = config.layer_norm != "off", self.make_encoders(names, generator)
        return Critics(num, sizes, config.activation, generator, norm, names, encoders)

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        return DiagonalGaussian.noise(generator, steps, num_envs, self.num_actions)

    @abstractmethod
    def _choose(
        self, features: Features, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(actions [num_envs, dims], log-probabilities [num_envs]) at prepared features."""

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        if noise is not None and bool(self.explore):
            # The error function maps normal numbers to uniform ones.
            actions = torch.erf(noise * math.sqrt(0.5))
            log_prob = -math.log(2.0) * self.num_actions
            return Action(actions, actions.new_full(actions.shape[:-1], log_prob), state)
        features = {**obs, "actor": self._read(self.config.actor_reads, obs)}
        return Action(*self._choose(features, noise), state)


class SquashedPolicy(Actor):
    """For SAC: Gaussian actions with a state-dependent standard deviation, squashed by tanh."""

    outputs_per_action = 2

    def sample(self, features: Features, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(actions [..., dims], log-probabilities [...]) at features and standard normal noise.

        Differentiable (reparametrised). The density is divided by the derivative of tanh,
        1 - tanh^2.
        """
        mean, log_std = self.actor(features).chunk(2, dim=-1)
        raw, density = DiagonalGaussian(mean, log_std.clamp(*LOG_STD_RANGE)).sample(noise)
        actions = raw.tanh()
        stretch = (1.0 - actions.square() + SQUASH_EPSILON).log().sum(-1)
        return actions, density - stretch

    def _choose(
        self, features: Features, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if noise is None:
            vector = features["actor"]
            noise = vector.new_zeros((*vector.shape[:-1], self.num_actions))
        return self.sample(features, noise)


class DeterministicPolicy(Actor):
    """For TD3: deterministic actions, with Gaussian noise for exploration."""

    exploration: torch.Tensor
    """[] standard deviation of that noise; the learner sets it in broadcasts, otherwise 0."""

    def setup(self, generator: torch.Generator | None) -> None:
        super().setup(generator)
        self.register_buffer("exploration", torch.zeros(()))

    def actions(self, features: Features) -> torch.Tensor:
        """[..., dims] in [-1, 1] at prepared features."""
        actions: torch.Tensor = self.actor(features).tanh()
        return actions

    def _choose(
        self, features: Features, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        actions = self.actions(features)
        if noise is not None:
            actions = torch.addcmul(actions, self.exploration, noise).clamp(-1.0, 1.0)
        # Deterministic actions have no density; it is not used.
        return actions, actions.new_zeros(actions.shape[:-1])


def _joined(
    features: Features, reader: str, encoders: ImageEncoders | None, names: tuple[str, ...]
) -> torch.Tensor:
    """Inputs [..., n] of the actor or the critic, with images encoded."""
    if encoders is None:
        return features[reader]
    images = {name: features[name] for name in names if name in encoders}
    return encoders.beside(features[reader], encoders.encoded(images), names)


class FeatureNetwork(Mlp):
    """A perceptron over the features of the actor or the critic, with encoders of images."""

    reader: str
    """ "actor" or "critic"."""
    reads: tuple[str, ...]
    encoders: ImageEncoders | None

    def forward(self, features: Features) -> torch.Tensor:  # type: ignore[override]
        """Outputs [..., sizes[-1]] at prepared features."""
        return super().forward(_joined(features, self.reader, self.encoders, self.reads))


def init_by_fan_in(network: Mlp, sizes: tuple[int, ...], generator: torch.Generator | None) -> None:
    """Draw weights and biases uniformly from +-1/sqrt(inputs) of their layer.

    SAC and TD3 were tuned with it: initial outputs are near zero for any input.
    """
    if generator is None:
        return
    with torch.no_grad():
        for i, inputs in enumerate(sizes[:-1]):
            bound = 1.0 / math.sqrt(inputs)
            for part in ("weight", "bias"):
                network.get_parameter(f"{part}{i}").uniform_(-bound, bound, generator=generator)


class Critics(nn.Module):
    """Q networks over features and actions, two for SAC and TD3, which use the smaller estimate.

    Layers of all networks are computed by one batched product, from weights
    [networks, inputs, outputs]. They share the encoders of images.
    """

    def __init__(
        self,
        num: int,
        sizes: tuple[int, ...],
        activation: str,
        generator: torch.Generator | None,
        layer_norm: bool,
        reads: tuple[str, ...],
        encoders: ImageEncoders | None,
    ) -> None:
        """sizes: features plus actions, units of the hidden layers, 1.

        generator: None if the weights are loaded afterwards (or on the meta device).
        """
        super().__init__()
        self.num, self._activation, self._layer_norm = num, ACTIVATIONS[activation], layer_norm
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(num, inputs, outputs)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(num, 1, outputs)))
            if layer_norm and i < len(sizes) - 2:
                scale, shift = torch.ones(num, 1, outputs), torch.zeros(num, 1, outputs)
                self.register_parameter(f"norm_weight{i}", nn.Parameter(scale))
                self.register_parameter(f"norm_bias{i}", nn.Parameter(shift))
        for k in range(0 if generator is None else num):
            network = Mlp(sizes, activation, 1.0, None, layer_norm)
            init_by_fan_in(network, sizes, generator)
            with torch.no_grad():
                for name, p in network.named_parameters():
                    self.get_parameter(name)[k] = p.t()
        self.reads, self.encoders = reads, encoders

    def _inputs(self, features: Features, actions: torch.Tensor) -> torch.Tensor:
        read = _joined(features, "critic", self.encoders, self.reads)
        return torch.cat([read, actions], dim=-1)

    def forward(
        self,
        features: Features,
        actions: torch.Tensor,
        among: slice | torch.Tensor = EVERY,
    ) -> torch.Tensor:
        """Estimates [networks, n] of actions [n, dims] at prepared features, by all or by `among`
        the networks."""
        layers = [p[among] for p in cast(Iterable[torch.Tensor], self._parameters.values())]
        *hidden, weight, bias = layers
        x = self._inputs(features, actions).expand(len(weight), -1, -1)
        for i in range(0, len(hidden), 4 if self._layer_norm else 2):
            x = torch.baddbmm(hidden[i + 1], x, hidden[i])
            if self._layer_norm:
                normal = functional.layer_norm(x, x.shape[-1:])
                x = torch.addcmul(hidden[i + 3], normal, hidden[i + 2])
            x = self._activation(x)
        return torch.baddbmm(bias, x, weight).squeeze(-1)

    def first_q(self, features: Features, actions: torch.Tensor) -> torch.Tensor:
        """The estimate of the first network, [n]."""
        return self(features, actions, slice(1))[0]

    def min_q(
        self, features: Features, actions: torch.Tensor, among: slice | torch.Tensor = EVERY
    ) -> torch.Tensor:
        """The smallest estimate, [n], of all or of `among` the networks."""
        smallest: torch.Tensor = self(features, actions, among).amin(0)
        return smallest

    def saved_order(self) -> torch.Tensor:
        """[parameters] indices of a flat vector of the parameters, as a checkpoint has them.

        Network after network, weights [outputs, inputs].
        """
        sizes = [p.numel() for p in self.parameters()]
        places = torch.arange(sum(sizes), device=next(self.parameters()).device).split(sizes)
        own = [
            x.view(p.shape)
            for x, p in zip(places, self._parameters.values(), strict=False)
            if p is not None
        ]
        networks = [x[k].t().reshape(-1) for k in range(self.num) for x in own]
        return torch.cat([*networks, *places[len(own) :]])
