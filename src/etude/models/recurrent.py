"""Policies with a memory: an encoder, a recurrent core and two heads."""

from __future__ import annotations

import math

import torch

from etude.core.contracts import ActionSpec, ArraySpec
from etude.models.actor_critic import ActorCritic, Features, Memory, PolicyConfig
from etude.models.cores import CORES
from etude.models.networks import ACTIVATIONS, Mlp


class RecurrentPolicy(ActorCritic):
    """One core that actor and critic share.

    Observations that the critic alone reads do not pass the core: they join its output in a
    network of the critic's own, so the policy acts without them.
    """

    def __init__(
        self,
        config: PolicyConfig,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> None:
        """`generator` is where the initial weights come from; None when they are loaded."""
        super().__init__(config, observations, action)
        hidden, activation, units = config.hidden, config.activation, config.units
        self._activation = ACTIVATIONS[activation]
        sizes = (self._width(config.actor_reads), *hidden)
        self.encoder = Mlp(sizes, activation, math.sqrt(2.0), generator) if hidden else None
        self.core = CORES[config.kind](sizes[-1], units, generator)
        self.actor = Mlp((units, self.num_outputs), activation, 0.01, generator)
        self._extra = tuple(n for n in config.critic_reads if n not in config.actor_reads)
        critic_hidden = hidden if self._extra else ()
        critic = (units + self._width(self._extra), *critic_hidden, 1)
        self.critic = Mlp(critic, activation, 1.0, generator)
        self.state_specs = {name: ArraySpec((units,)) for name in self.core.names}

    def _critic_names(self) -> tuple[str, ...]:
        return self._extra or self.config.actor_reads

    def _encode(self, features: torch.Tensor) -> torch.Tensor:
        return features if self.encoder is None else self._activation(self.encoder(features))

    def _step(
        self, features: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out, state = self.core.step(self._encode(features), state)
        return self.actor(out), state

    def _unroll(self, features: Features, memory: Memory | None) -> torch.Tensor:
        """The core's output [segments, horizon, units]."""
        if memory is None:
            raise ValueError("a recurrent policy is judged from the memory it acted with")
        return self.core.unroll(self._encode(features["actor"]), memory.state, memory.starts)

    def _values(self, out: torch.Tensor, features: Features) -> torch.Tensor:
        if self._extra:
            out = torch.cat([out, features["critic"]], dim=-1)
        return self.critic(out).squeeze(-1)  # type: ignore[no-any-return]

    def _forward(
        self, features: Features, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._unroll(features, memory)
        return self.actor(out), self._values(out, features)

    def values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        """[segments, horizon]: the value of prepared features [segments, horizon, n]."""
        return self._values(self._unroll(features, memory), features)
