"""Policies: networks, action distribution and the observation normaliser, as one thing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn

from etude.core.config import Config
from etude.core.contracts import Action, ActionSpec, Array, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.imports import attribute
from etude.core.keys import Key
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.models import CLASSES
from etude.models.distributions import Categoricals, DiagonalGaussian, Distribution
from etude.models.networks import Layers, Mlp, Units, generator_of
from etude.models.normalise import Normaliser

CONTRACT_FORMAT = 1
_RECURRENT = 24
"""float32 numbers a recurrent layer keeps per step and unit: gates, states, their gradients."""


class BasePolicyConfig(Config):
    """What a policy reads, and how much it explores at the start."""

    kind: str
    init_std: float = Field(1.0, gt=0, description="Initial standard deviation of box actions.")
    learn_std: bool = Field(True, description="Learn the standard deviation; off keeps init_std.")
    actor_reads: tuple[str, ...] = Field(
        ("state",), min_length=1, description="Observations that the actor reads."
    )
    critic_reads: tuple[str, ...] = Field(
        ("state",), min_length=1, description="Observations that the critic reads."
    )

    @property
    def family(self) -> str:
        """What it is to a learner: "actor-critic" for PPO, or an actor whose critics the learner
        has, "squashed" for SAC and "deterministic" for TD3."""
        return "actor-critic"

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a state that lasts from step to step."""
        return False

    @abstractmethod
    def num_activations(self, action_size: int) -> int:
        """About how many float32 numbers a gradient keeps per step."""

    @abstractmethod
    def policy_class(self) -> type[BasePolicy]:
        """The class of its policy."""

    def build(
        self,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> BasePolicy:
        """A new policy. Its weights are drawn from the generator; None when they are loaded."""
        return self.policy_class()(self, observations, action, generator)


class PolicyConfig(BasePolicyConfig):
    """Networks of actor and critic."""

    aliases = {"hidden": "net_arch hidden_sizes hidden_dims"}  # noqa: RUF012

    kind: Literal["mlp", "lstm", "gru", "squashed", "deterministic"] = Field(
        "mlp",
        description="For ppo: mlp, or lstm and gru with memory. For sac squashed, for td3 "
        "deterministic.",
    )
    hidden: Layers = Field((64, 64), description="Units of each hidden layer.")
    units: Units = Field(128, description="Units of the LSTM or GRU.")
    activation: Literal["tanh", "relu", "elu", "silu"] = Field(
        "tanh", description="Activation function of the hidden layers."
    )

    @property
    def family(self) -> str:
        return self.kind if self.kind in ("squashed", "deterministic") else "actor-critic"

    @property
    def is_recurrent(self) -> bool:
        return self.kind in ("lstm", "gru")

    def num_activations(self, action_size: int) -> int:
        layers = 2 * sum(self.hidden) + 2 * action_size
        return layers + _RECURRENT * self.units if self.is_recurrent else 2 * layers

    def policy_class(self) -> type[BasePolicy]:
        if self.kind not in CLASSES:
            raise UsageError(
                f"policy.kind {self.kind} does not say what it builds: derive its class from "
                "etude.models.policies.ModulePolicyConfig, or define `policy_class`."
            )
        found: type[BasePolicy] = attribute(CLASSES[self.kind])
        return found


class EvaluatedActions(NamedTuple):
    """Actions that were taken, evaluated by a policy."""

    log_probs: torch.Tensor
    """[...]"""
    entropy: torch.Tensor
    """[...], or [] where it is the same for every step."""
    values: torch.Tensor
    """[...]"""
    excess: torch.Tensor
    """[...] how far the mean action leaves its bounds, or [] where it never does."""


Features = dict[str, torch.Tensor]
"""What the networks read, {"actor": [..., n], "critic": [..., m]}: normalised, concatenated.

One tensor under both names where the critic reads nothing else.
"""


def map_features(features: Features, change: Callable[[torch.Tensor], torch.Tensor]) -> Features:
    """Both features changed; one that both networks share, once."""
    actor = change(features["actor"])
    same = features["critic"] is features["actor"]
    return {"actor": actor, "critic": actor if same else change(features["critic"])}


class Memory(NamedTuple):
    """What a recurrent policy knew at the start of each segment, and where episodes begin."""

    state: dict[str, torch.Tensor]
    """{name: [segments, units]} before the first step, {} for a memoryless policy."""
    starts: torch.Tensor
    """[segments, horizon] bool: an episode begins at this step; the state is zeroed before it."""

    def at(self, segments: torch.Tensor | slice) -> Memory:
        """The memory of these segments."""
        state = {name: x[segments] for name, x in self.state.items()}
        return Memory(state, self.starts[segments])


class BasePolicy(nn.Module, ABC):
    """What is normalised and read, and how a policy is put away and rebuilt."""

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
        names = sorted({*config.actor_reads, *config.critic_reads})
        self.observations = {name: _vector(name, observations) for name in names}
        self.normalisers = nn.ModuleDict(
            {name: self.normaliser(spec.shape[0]) for name, spec in self.observations.items()}
        )
        self.setup(generator)

    @abstractmethod
    def setup(self, generator: torch.Generator | None) -> None:
        """Makes the networks. Weights are drawn from the generator; None when they are loaded."""

    @property
    def actor_observations(self) -> dict[str, ArraySpec]:
        """What it needs to act: a critic may read more."""
        return {name: self.observations[name] for name in self.config.actor_reads}

    @abstractmethod
    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        """All the randomness of a rollout, [steps, num_envs, n] float32."""

    @abstractmethod
    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        """obs: {name: [num_envs, ...]} raw; state: {name: [num_envs, units]}, {} without memory.

        noise: [num_envs, n] or None for the most likely action.
        """

    def log_probs(self, noise: torch.Tensor) -> torch.Tensor | None:
        """[steps, num_envs]: of the actions from noise [steps, num_envs, n], where nothing else
        decides them; else None, and `act` gives them step by step."""
        return None

    def initial_state(self, num_envs: int) -> Tree:
        """Recurrent state at an episode's start, {name: [num_envs, units]} float32 zeros."""
        return {
            name: np.zeros((num_envs, *spec.shape), spec.dtype)
            for name, spec in self.state_specs.items()
        }

    def _critic_names(self) -> tuple[str, ...]:
        """The observations under "critic" in features."""
        return self.config.critic_reads

    def _width(self, names: tuple[str, ...]) -> int:
        return sum(self.observations[name].shape[0] for name in names)

    def _read(self, names: tuple[str, ...], obs: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [self.normalisers[name](obs[name]) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def prepare(self, obs: dict[str, torch.Tensor]) -> Features:
        """Normalise once what the networks will read."""
        actor, names = self._read(self.config.actor_reads, obs), self._critic_names()
        same = names == self.config.actor_reads
        return {"actor": actor, "critic": actor if same else self._read(names, obs)}

    def absorb(self, moments: dict[str, Tree]) -> None:
        """The normaliser takes in the moments of collected observations."""
        for name, normaliser in self.normalisers.items():
            if name in moments:
                normaliser.absorb(moments[name])  # type: ignore[operator]

    def contract(self) -> Tree:
        """All that is needed to rebuild this policy, but for its arrays."""
        return {
            "format": CONTRACT_FORMAT,
            "policy": self.config.model_dump(mode="json"),
            "observations": {name: asdict(spec) for name, spec in self.observations.items()},
            "action": asdict(self.action),
        }


class ActorCritic(BasePolicy):
    """A policy and its value function over named vector observations."""

    def setup(self, generator: torch.Generator | None) -> None:
        if self.action.kind == "box":
            start = torch.full((self.num_outputs,), float(np.log(self.config.init_std)))
            # Without a gradient it stays among the parameters, and the optimizer leaves it alone.
            self.log_std = nn.Parameter(start, requires_grad=self.config.learn_std)

    @property
    def num_outputs(self) -> int:
        """Numbers the actor gives for an observation: means, or logits of all choices."""
        is_box = self.action.kind == "box"
        return self.action.array.shape[0] if is_box else sum(self.action.sizes)

    @abstractmethod
    def _step(
        self, features: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The actor's outputs [num_envs, num_outputs] at features [num_envs, n]; the next state."""

    @abstractmethod
    def _forward(
        self, features: Features, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The actor's outputs [..., num_outputs] and the values [...] of prepared features."""

    @abstractmethod
    def values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        """[segments, horizon]: the value of prepared features [segments, horizon, n].

        A memoryless policy takes any leading shape, and its memory is None.
        """

    @staticmethod
    def actor_arrays(arrays: Tree) -> Tree:
        """Of a policy's arrays, those that it acts by: all but the value function's own."""
        return {name: x for name, x in arrays.items() if not name.startswith("critic.")}

    def _distribution(self, outputs: torch.Tensor) -> Distribution:
        if self.action.kind == "box":
            return DiagonalGaussian(outputs, self.log_std)
        return Categoricals(outputs, self.action.sizes)

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        kind = DiagonalGaussian if self.action.kind == "box" else Categoricals
        return kind.noise(generator, steps, num_envs, self.action.array.shape[0])

    def log_probs(self, noise: torch.Tensor) -> torch.Tensor | None:
        # The spread of a box action is the same for every observation.
        is_box = self.action.kind == "box"
        return DiagonalGaussian.log_density(noise, self.log_std) if is_box else None

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        outputs, state = self._step(self._read(self.config.actor_reads, obs), state)
        distribution = self._distribution(outputs)
        if noise is not None and isinstance(distribution, DiagonalGaussian):
            return Action(distribution.actions(noise), None, state)
        if noise is not None:
            return Action(*distribution.sample(noise), state)
        actions = distribution.mode()
        return Action(actions, distribution.log_prob(actions), state)

    def evaluate(
        self, features: Features, actions: torch.Tensor, memory: Memory | None
    ) -> EvaluatedActions:
        """Evaluates actions [segments, horizon, n] taken at prepared features.

        A memoryless policy takes any leading shape, and its memory is None.
        """
        outputs, values = self._forward(features, memory)
        distribution = self._distribution(outputs)
        return EvaluatedActions(
            distribution.log_prob(actions), distribution.entropy(), values, distribution.excess()
        )


class MlpPolicy(ActorCritic):
    """Two separate networks over named vector observations."""

    config: PolicyConfig

    def setup(self, generator: torch.Generator | None) -> None:
        super().setup(generator)
        config = self.config
        actor = (self._width(config.actor_reads), *config.hidden, self.num_outputs)
        critic = (self._width(config.critic_reads), *config.hidden, 1)
        self.actor: nn.Module = Mlp(actor, config.activation, 0.01, generator)
        self.critic: nn.Module = Mlp(critic, config.activation, 1.0, generator)

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

    config: ModulePolicyConfig  # type: ignore[assignment]

    def setup(self, generator: torch.Generator | None) -> None:
        ActorCritic.setup(self, generator)
        config, seed = self.config, 0 if generator is None else generator.initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = config.network(self._width(config.actor_reads), self.num_outputs)
            self.critic = config.network(self._width(config.critic_reads), 1)


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


POLICIES: Registry[BasePolicyConfig] = Registry(
    "policy", "etude.models.policies:BasePolicyConfig", default="mlp"
)


def make_policy(config: BasePolicyConfig, env: EnvSpec, key: Key | None) -> BasePolicy:
    """A new policy for an environment, its weights drawn from `key`; None when they are loaded."""
    return config.build(env.observations, env.action, generator_of(key))


def _vector(name: str, observations: dict[str, ArraySpec]) -> ArraySpec:
    if name not in observations:
        raise UsageError(
            f"The policy reads the observation '{name}', which this environment does not give; "
            f"it gives {', '.join(sorted(observations))}. Set policy.actor_reads and "
            "policy.critic_reads."
        )
    spec = observations[name]
    if len(spec.shape) != 1 or spec.dtype != "float32":
        raise UsageError(
            f"A policy reads vectors of float32; the observation '{name}' is "
            f"{spec.dtype} of shape {spec.shape}."
        )
    return spec
