"""Base classes of policies: networks, action distribution and observation normaliser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import nn

from etude.core.catalogue import load_attribute
from etude.core.config import Config
from etude.core.contracts import (
    ACTION,
    Action,
    ActionSpec,
    Array,
    ArraySpec,
    EnvSpec,
    Reflection,
)
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.models import CLASSES
from etude.models.networks import EncoderConfig, Layers, Normaliser, Units, is_image, make_generator

if TYPE_CHECKING:
    from etude.models.encoders import ImageEncoders

CONTRACT_FORMAT = 1
_RECURRENT = 24
"""Activations of a recurrent layer per step and unit: gates, states, their gradients."""


class BasePolicyConfig(Config):
    """Observations and initial exploration of a policy."""

    kind: str
    init_std: float = Field(1.0, gt=0, description="Initial standard deviation of box actions.")
    learn_std: bool = Field(True, description="Learn the standard deviation; off keeps init_std.")
    actor_reads: tuple[str, ...] = Field(
        ("state",),
        description="Observations of the actor; none: the images and proprioceptive vectors of "
        "a dataset.",
    )
    critic_reads: tuple[str, ...] = Field(
        ("state",), description="Observations that the critic reads; none: as the actor."
    )
    raw: tuple[str, ...] = Field(
        (), description="Vector observations that are read as they are, without normalisation."
    )
    encoder: EncoderConfig = Field(EncoderConfig(), description="Encoder of each image.")
    action_mask: str | None = Field(
        None,
        description="Observation that says which of all choices are allowed (not 0), for discrete "
        "actions.",
    )

    @property
    def family(self) -> str:
        """The family that an algorithm needs: "actor-critic" for PPO, or actors without critics,
        "squashed" for SAC and "deterministic" for TD3."""
        return "actor-critic"

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has recurrent state."""
        return False

    @abstractmethod
    def num_activations(self, action_size: int) -> int:
        """Approximate number of float32 activations per step in a gradient step."""

    def image_encoder(self, shape: tuple[int, ...], generator: torch.Generator | None) -> nn.Module:
        """A new encoder of images uint8 [n, h, w, c] to float32 [n, encoder.features], which a
        subclass may override; shape: (h, w, c)."""
        from etude.models.encoders import make_encoder

        return make_encoder(shape, self.encoder, generator)

    @abstractmethod
    def policy_class(self) -> type[BasePolicy]:
        """The class of the policy."""

    def build(
        self,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> BasePolicy:
        """A new policy with weights from the generator; None if they are loaded."""
        return self.policy_class()(self, observations, action, generator)


class PolicyConfig(BasePolicyConfig):
    """Config of the built-in networks of actor and critic."""

    aliases = {  # noqa: RUF012
        "hidden": "net_arch hidden_sizes hidden_dims actor_hidden_dims",
        "critic_hidden": "critic_hidden_dims",
        "squash": "squash_output",
    }

    kind: Literal["mlp", "lstm", "gru", "squashed", "deterministic"] = Field(
        "mlp",
        description="For ppo: mlp, or lstm and gru with memory. For sac squashed, for td3 "
        "deterministic.",
    )
    hidden: Layers = Field((64, 64), description="Units of each hidden layer.")
    critic_hidden: Layers | None = Field(
        None, description="Units of each hidden layer of the critic; none: as many as the actor's."
    )
    units: Units = Field(128, description="Units of the LSTM or GRU.")
    activation: Literal["tanh", "relu", "elu", "silu"] = Field(
        "tanh", description="Activation function of the hidden layers."
    )
    layer_norm: Literal["off", "critic", "all"] = Field(
        "off", description="Layer norm in the hidden layers of the critic, or of all networks."
    )
    std: Literal["shared", "state"] = Field(
        "shared",
        description="For ppo with box actions. shared: one standard deviation per action. state: "
        "the actor gives it for every state.",
    )
    std_range: tuple[float, float] | None = Field(
        None, description="The standard deviation stays within these bounds, such as 0.05,2."
    )
    squash: bool = Field(
        False, description="For ppo with box actions: squash them into [-1, 1] by tanh."
    )

    @field_validator("std_range")
    @classmethod
    def _check_std_range(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and not 0 < given[0] < given[1]:
            raise ValueError("std_range is two numbers above 0, the smaller first, such as 0.05,2.")
        return given

    @property
    def critic_layers(self) -> tuple[int, ...]:
        """Units of each hidden layer of the critic."""
        return self.hidden if self.critic_hidden is None else self.critic_hidden

    @property
    def family(self) -> str:
        return self.kind if self.kind in ("squashed", "deterministic") else "actor-critic"

    @property
    def is_recurrent(self) -> bool:
        return self.kind in ("lstm", "gru")

    def num_activations(self, action_size: int) -> int:
        norm = 2 if self.layer_norm == "off" else 4
        actor, critic = (norm * sum(n) + 2 * action_size for n in (self.hidden, self.critic_layers))
        return actor + (_RECURRENT * self.units if self.is_recurrent else critic)

    def policy_class(self) -> type[BasePolicy]:
        if self.kind not in CLASSES:
            raise UsageError(
                f"policy.kind {self.kind} does not say what it builds: derive its class from "
                "ModulePolicyConfig, or define `policy_class`."
            )
        found: type[BasePolicy] = load_attribute(CLASSES[self.kind])
        return found


Features = dict[str, torch.Tensor]
"""Inputs of the networks: {"actor": [..., n], "critic": [..., m]}, normalised and concatenated
vectors, the same tensor if both read the same. Images uint8 [..., h, w, c] and the action mask keep
their own names.
"""


def map_features(features: Features, change: Callable[[torch.Tensor], torch.Tensor]) -> Features:
    """Apply `change` to all features, once to a tensor that both networks share."""
    mapped = {name: change(x) for name, x in features.items() if name != "critic"}
    same = features["critic"] is features["actor"]
    return {**mapped, "critic": mapped["actor"] if same else change(features["critic"])}


class BasePolicy(nn.Module, ABC):
    """Base class of policies: reads and normalises observations, and writes its contract."""

    normaliser: ClassVar[type[Normaliser]] = Normaliser
    state_specs: dict[str, ArraySpec]
    """Recurrent state of one environment, {} for a memoryless policy."""

    def __init__(
        self,
        config: BasePolicyConfig,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.action = action
        self.state_specs = {}
        self.sentences: dict[str, tuple[float, ...]] = {}
        """{sentence: vector} of the observation "task"."""
        self.mirror: Mapping[str, Reflection] = {}
        """Reflections of observations and actions left for right, of the environment."""
        if not config.actor_reads:
            raise UsageError(
                "policy.actor_reads is empty; the observations of this environment are "
                f"{', '.join(sorted(observations))}."
            )
        names = sorted({*config.actor_reads, *config.critic_reads})
        self.observations = {name: _readable(name, observations) for name in names}
        self.vectors = {n: s.shape[0] for n, s in self.observations.items() if not is_image(s)}
        """{name: size} of vector observations; the others are images."""
        self.normalisers = nn.ModuleDict(
            {name: self.normaliser(n) for name, n in self.vectors.items() if name not in config.raw}
        )
        _check_raw(config.raw, self.vectors)
        if config.action_mask is not None:
            from etude.models.networks import mask_spec

            self.observations[config.action_mask] = mask_spec(
                config.action_mask, observations, action
            )
        self.setup(generator)

    @abstractmethod
    def setup(self, generator: torch.Generator | None) -> None:
        """Make the networks with weights from the generator; None if they are loaded."""

    def num_box_actions(self) -> int:
        """Dimensions of box actions; raises for discrete ones."""
        if self.action.kind != "box":
            raise UsageError(
                f"A {self.config.kind} policy acts in a box, and this environment's actions are "
                f"{self.action.kind}: use policy.kind mlp, lstm or gru, with ppo or bc."
            )
        return self.action.array.shape[0]

    @property
    def image_names(self) -> tuple[str, ...]:
        """Names of the images among the observations."""
        return tuple(name for name, spec in self.observations.items() if is_image(spec))

    @property
    def actor_observations(self) -> dict[str, ArraySpec]:
        """Observations that it reads to act, without those of the critic."""
        masks = () if self.config.action_mask is None else (self.config.action_mask,)
        return {name: self.observations[name] for name in (*self.config.actor_reads, *masks)}

    @abstractmethod
    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        """Draw the random numbers of a whole rollout, [steps, num_envs, n] float32."""

    @abstractmethod
    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        """Actions for raw observations {name: [num_envs, ...]}.

        state: {name: [num_envs, units]}, {} without memory. noise: [num_envs, n], or None for the
        most likely actions.
        """

    def log_probs(self, noise: torch.Tensor) -> torch.Tensor | None:
        """Log-probabilities [steps, num_envs] of the actions from noise [steps, num_envs, n].

        None if they also depend on the observations; `act` then returns them for each step.
        """
        return None

    def initial_state(self, num_envs: int) -> Tree:
        """Recurrent state at the start of an episode, {name: [num_envs, units]} zeros."""
        return {
            name: np.zeros((num_envs, *spec.shape), spec.dtype)
            for name, spec in self.state_specs.items()
        }

    def _critic_names(self) -> tuple[str, ...]:
        """Observations that the critic reads."""
        return self.config.critic_reads or self.config.actor_reads

    def _width(self, names: tuple[str, ...]) -> int:
        """Number of inputs of a network: vectors and features of images."""
        return sum(self.vectors.get(name, self.config.encoder.features) for name in names)

    def make_encoders(
        self, names: tuple[str, ...], generator: torch.Generator | None
    ) -> ImageEncoders | None:
        """New encoders of the images among `names`; None without images."""
        images = {name: self.observations[name].shape for name in names if name not in self.vectors}
        if not images:
            return None
        from etude.models.encoders import ImageEncoders

        return ImageEncoders(
            {name: self.config.image_encoder(shape, generator) for name, shape in images.items()}
        )

    def _read(self, names: tuple[str, ...], obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Normalise and concatenate the vectors among `names`, [..., n]."""
        parts = [self._normalised(name, obs[name]) for name in names if name in self.vectors]
        if not parts:
            images = obs[names[0]]
            return torch.zeros((*images.shape[:-3], 0), device=images.device)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _normalised(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name in self.config.raw else self.normalisers[name](x)

    def prepare(self, obs: dict[str, torch.Tensor]) -> Features:
        """Compute the features of the networks from raw observations."""
        actor, names = self._read(self.config.actor_reads, obs), self._critic_names()
        same = names == self.config.actor_reads
        beside = {name: obs[name] for name in self.observations if name not in self.vectors}
        return {"actor": actor, **beside, "critic": actor if same else self._read(names, obs)}

    def require_mirror(self) -> None:
        """Refuse a policy or an environment that cannot be trained with mirror images."""
        if self.state_specs:
            raise UsageError(
                f"algorithm.mirror needs a policy without memory, and policy.kind is "
                f"{self.config.kind}: its recurrent state has no mirror image."
            )
        if unknown := {*self.observations, ACTION} - self.mirror.keys():
            names = ", ".join(sorted(name.strip("/") for name in unknown))
            raise UsageError(
                f"algorithm.mirror needs a symmetric robot, and the mirror image of {names} is not "
                "known: give each of its terms one, Observation(term, mirror=...)."
            )

    def mirrored(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The mirror images of raw observations {name: [..., n]} that the policy reads."""
        return {name: self.mirror[name].of(obs[name]) for name in self.observations}

    def absorb(self, moments: dict[str, Tree]) -> None:
        """Update the normalisers by the moments of collected observations."""
        for name, normaliser in self.normalisers.items():
            if name in moments:
                normaliser.absorb(moments[name])  # type: ignore[operator]

    def contract(self) -> Tree:
        """Description of this policy, enough to rebuild it with its arrays."""
        return {
            "format": CONTRACT_FORMAT,
            "policy": self.config.model_dump(mode="json"),
            "observations": {name: asdict(spec) for name, spec in self.observations.items()},
            "action": asdict(self.action),
            **({"sentences": self.sentences} if self.sentences else {}),
        }


POLICIES: Registry[BasePolicyConfig] = Registry(
    "policy", "etude.models.policies:BasePolicyConfig", default="mlp"
)


def make_policy(config: BasePolicyConfig, env: EnvSpec, key: Key | None) -> BasePolicy:
    """A new policy for an environment, with weights from `key`; None if they are loaded."""
    policy = config.build(env.observations, env.action, make_generator(key))
    policy.sentences = env.sentences if "task" in policy.observations else {}
    policy.mirror = env.mirror
    return policy


def _readable(name: str, observations: dict[str, ArraySpec]) -> ArraySpec:
    if name not in observations:
        raise UsageError(
            f"The policy reads the observation '{name}', which this environment does not have; "
            f"it has {', '.join(sorted(observations))}. Set policy.actor_reads and "
            "policy.critic_reads."
        )
    spec = observations[name]
    if not is_image(spec) and (len(spec.shape) != 1 or spec.dtype != "float32"):
        raise UsageError(
            f"A policy reads vectors of float32 and images of uint8 [height, width, channels]; the "
            f"observation '{name}' is {spec.dtype} of shape {spec.shape}."
        )
    return spec


def _check_raw(names: tuple[str, ...], vectors: dict[str, int]) -> None:
    for name in names:
        if name not in vectors:
            raise UsageError(
                f"policy.raw names '{name}', which is not a vector that the policy reads; it reads "
                f"{', '.join(vectors) or 'only images, which are never normalised'}."
            )
