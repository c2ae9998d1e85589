"""Policies: networks, action distribution and the observation normaliser, as one thing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import nn

from etude.core.contracts import Action, ActionSpec, Array, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.recipe import Config
from etude.core.trees import Tree
from etude.models.distributions import Categoricals, DiagonalGaussian, Distribution
from etude.models.networks import Mlp
from etude.models.normalise import Normaliser

CONTRACT_FORMAT = 1


class PolicyConfig(Config):
    """Networks of policy and value function."""

    kind: Literal["mlp"] = Field("mlp", description="A memoryless policy.")
    hidden: tuple[PositiveInt, ...] = Field((64, 64), description="Units of each hidden layer.")
    activation: Literal["tanh", "relu", "elu", "silu"] = Field(
        "tanh", description="Between layers."
    )
    init_std: float = Field(1.0, gt=0, description="Standard deviation of a box action at start.")
    actor_reads: tuple[str, ...] = Field(("state",), description="Observations the policy reads.")
    critic_reads: tuple[str, ...] = Field(("state",), description="Observations the value reads.")


class Judgement(NamedTuple):
    """What a policy thinks of actions that were taken."""

    log_probs: torch.Tensor
    """[...]"""
    entropy: torch.Tensor
    """[] mean over the batch."""
    values: torch.Tensor
    """[...]"""
    excess: torch.Tensor
    """[] how far the mean action leaves its bounds."""


Features = dict[str, torch.Tensor]
"""What the networks read, {"actor": [..., n], "critic": [..., m]}: normalised, concatenated."""


class MlpPolicy(nn.Module):
    """Two separate networks over named vector observations."""

    def __init__(
        self,
        config: PolicyConfig,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        key: Key | None,
    ) -> None:
        """`key` is where the initial weights come from; None when they are loaded."""
        super().__init__()
        self.config = config
        self.action = action
        names = sorted({*config.actor_reads, *config.critic_reads})
        self.observations = {name: _vector(name, observations) for name in names}
        self.normalisers = nn.ModuleDict(
            {name: Normaliser(spec.shape[0]) for name, spec in self.observations.items()}
        )
        generator = None if key is None else torch.Generator().manual_seed(key.integer())
        outputs = action.array.shape[0] if action.kind == "box" else sum(action.sizes)
        hidden, activation = config.hidden, config.activation
        self.actor = Mlp(
            (self._width(config.actor_reads), *hidden, outputs), activation, 0.01, generator
        )
        self.critic = Mlp(
            (self._width(config.critic_reads), *hidden, 1), activation, 1.0, generator
        )
        if action.kind == "box":
            self.log_std = nn.Parameter(torch.full((outputs,), float(np.log(config.init_std))))

    def _width(self, names: tuple[str, ...]) -> int:
        return sum(self.observations[name].shape[0] for name in names)

    def _read(self, names: tuple[str, ...], obs: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [self.normalisers[name](obs[name]) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _distribution(self, features: torch.Tensor) -> Distribution:
        outputs = self.actor(features)
        if self.action.kind == "box":
            return DiagonalGaussian(outputs, self.log_std)
        return Categoricals(outputs, self.action.sizes)

    def noise(self, generator: np.random.Generator, steps: int, rows: int) -> Array:
        kind = DiagonalGaussian if self.action.kind == "box" else Categoricals
        return kind.noise(generator, steps, rows, self.action.array.shape[0])

    def initial_state(self, rows: int) -> Tree:
        return {}

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        """obs: {name: [rows, ...]} raw; noise: [rows, n] or None for the most likely action."""
        distribution = self._distribution(self._read(self.config.actor_reads, obs))
        if noise is not None:
            return Action(*distribution.sample(noise), state)
        actions = distribution.mode()
        return Action(actions, distribution.log_prob(actions), state)

    def prepare(self, obs: dict[str, torch.Tensor]) -> Features:
        """Normalise once what every gradient step of an iteration will read."""
        actor = self._read(self.config.actor_reads, obs)
        same = self.config.critic_reads == self.config.actor_reads
        return {"actor": actor, "critic": actor if same else self._read_critic(obs)}

    def _read_critic(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._read(self.config.critic_reads, obs)

    def values(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """[...]: the value of raw observations {name: [..., n]}."""
        return self.critic(self._read_critic(obs)).squeeze(-1)  # type: ignore[no-any-return]

    def evaluate(self, features: Features, actions: torch.Tensor) -> Judgement:
        """Judge actions [..., n] taken at prepared features."""
        distribution = self._distribution(features["actor"])
        return Judgement(
            distribution.log_prob(actions),
            distribution.entropy(),
            self.critic(features["critic"]).squeeze(-1),
            distribution.excess(),
        )

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
            f"An mlp policy reads vectors of float32; the observation '{name}' is "
            f"{spec.dtype} of shape {spec.shape}."
        )
    return spec


def make_policy(config: PolicyConfig, env: EnvSpec, key: Key | None) -> MlpPolicy:
    """A new policy for an environment, its weights drawn from `key`."""
    return MlpPolicy(config, env.observations, env.action, key)


def policy_from_contract(contract: dict[str, Any], arrays: Tree) -> MlpPolicy:
    """The policy a checkpoint's `policy/` holds."""
    if contract.get("format") != CONTRACT_FORMAT:
        raise UsageError(
            f"This policy has format {contract.get('format')}; this version of etude reads "
            f"format {CONTRACT_FORMAT}."
        )
    observations = {
        name: ArraySpec(tuple(spec["shape"]), spec["dtype"])
        for name, spec in contract["observations"].items()
    }
    action: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in contract["action"].items()
    }
    config = PolicyConfig.model_validate(contract["policy"])
    policy = MlpPolicy(config, observations, ActionSpec(**action), None)
    policy.load_state_dict({name: torch.as_tensor(array) for name, array in arrays.items()})
    return policy
