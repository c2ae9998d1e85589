"""Recurrent policies and their cores: single steps in rollouts, whole segments in training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from etude.core.contracts import ArraySpec
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.networks import ACTIVATIONS, Mlp
from etude.models.policies import Features, PolicyConfig

State = dict[str, torch.Tensor]

_SHUT = -1e9
"""Added to a gate's input, it shuts the gate: its sigmoid is 0 for any weights."""


class Core(nn.Module, ABC):
    """A recurrent layer with torch's parameter layout, [gates * units, inputs] etc."""

    names: ClassVar[tuple[str, ...]]
    """Names of the state's arrays, [num_envs, units] each; the first is the output."""
    resets: ClassVar[tuple[float, ...]]
    """Inputs of the gates, in torch's order, that zero the state in one step."""

    def __init__(self, inputs: int, units: int, generator: torch.Generator | None) -> None:
        """generator: None if the weights are loaded afterwards (or on the meta device)."""
        super().__init__()
        width = len(self.resets) * units
        self.weight_ih = nn.Parameter(torch.zeros(width, inputs))
        self.weight_hh = nn.Parameter(torch.zeros(width, units))
        self.bias_ih = nn.Parameter(torch.zeros(width))
        self.bias_hh = nn.Parameter(torch.zeros(width))
        if generator is not None:
            with torch.no_grad():
                for weight in (self.weight_ih, self.weight_hh):
                    for gate in weight.chunk(len(self.resets)):
                        nn.init.orthogonal_(gate, generator=generator)

    def _weights(self) -> list[torch.Tensor]:
        """Input, hidden, input bias and hidden bias weights.

        Read at every call: a stored list, as in nn.LSTM, would become stale when the learner moves
        their data.
        """
        return [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]

    @abstractmethod
    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step: x [num_envs, inputs] -> (out [num_envs, units], next state)."""

    @abstractmethod
    def _run(self, x: torch.Tensor, state: State, weights: list[torch.Tensor]) -> torch.Tensor:
        """torch's fused loop over time: x [steps, m, n] -> out [steps, m, units]."""

    def unroll(self, x: torch.Tensor, state: State, starts: torch.Tensor) -> torch.Tensor:
        """Run m segments: x [m, horizon, inputs] -> out [m, horizon, units].

        state: [m, units] before the first step; set to zero before steps with `starts`
        [m, horizon]. For an episode's start inside a segment, an extra step is inserted whose shut
        gates make the state exactly zero and stop gradients. So all segments are one batch with the
        length of the longest; splitting segments at starts takes more calls or padding.
        """
        state = {name: state[name].masked_fill(starts[:, :1], 0.0) for name in self.names}
        weights = self._weights()
        if not bool(starts[:, 1:].any()):
            return self._run(x.transpose(0, 1), state, weights).transpose(0, 1)
        segments, horizon, _ = x.shape
        place, steps = _places(starts)
        # Two more input columns: the input bias, without which extra steps run, and the resets.
        reset = x.new_tensor(self.resets).repeat_interleave(self.weight_hh.shape[1])
        weights[0] = torch.cat([self.weight_ih, self.bias_ih[:, None], reset[:, None]], dim=1)
        weights[2] = torch.zeros_like(self.bias_ih)
        real = torch.cat([x, x.new_tensor([1.0, 0.0]).expand(segments, horizon, 2)], dim=2)
        blank = x.new_zeros(steps * segments, real.shape[2])
        blank[:, -1] = 1.0
        spaced = blank.index_copy(0, place, real.flatten(0, 1))
        out = self._run(spaced.view(steps, segments, -1), state, weights)
        picked: torch.Tensor = _Pick.apply(out.flatten(0, 1), place)  # type: ignore[no-untyped-call]
        return picked.view(segments, horizon, -1)


class LstmCore(Core):
    """Long short-term memory; gates in, forget, cell, out."""

    names = ("h", "c")
    resets = (_SHUT, _SHUT, 0.0, 0.0)

    def __init__(self, inputs: int, units: int, generator: torch.Generator | None) -> None:
        super().__init__(inputs, units, generator)
        if generator is not None:
            with torch.no_grad():  # Initial forget bias of 1.
                self.bias_ih[units : 2 * units] = 1.0

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        h, c = torch.lstm_cell(x, (state["h"], state["c"]), *self._weights())
        return h, {"h": h, "c": c}

    def _run(self, x: torch.Tensor, state: State, weights: list[torch.Tensor]) -> torch.Tensor:
        before = (state["h"][None], state["c"][None])
        train = torch.is_grad_enabled()
        return torch.lstm(x, before, weights, True, 1, 0.0, train, False, False)[0]


class GruCore(Core):
    """Gated recurrent unit; gates reset, update, new."""

    names = ("h",)
    resets = (_SHUT, _SHUT, 0.0)

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        h = torch.gru_cell(x, state["h"], *self._weights())
        return h, {"h": h}

    def _run(self, x: torch.Tensor, state: State, weights: list[torch.Tensor]) -> torch.Tensor:
        train = torch.is_grad_enabled()
        return torch.gru(x, state["h"][None], weights, True, 1, 0.0, train, False, False)[0]


CORES: dict[str, type[Core]] = {"lstm": LstmCore, "gru": GruCore}


def _places(starts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Index of each step [m * horizon] in [steps, m] with the extra steps, and `steps`.

    Each step is delayed by the number of starts inside its segment before it.
    """
    segments, horizon = starts.shape
    delay = starts[:, 1:].cumsum(1)
    steps = horizon + int(delay[:, -1].max())
    when = torch.arange(horizon, device=starts.device).repeat(segments, 1)
    when[:, 1:] += delay
    rows = torch.arange(segments, device=starts.device)
    return torch.addcmul(rows[:, None], when, when.new_tensor(segments)).flatten(), steps


class _Pick(torch.autograd.Function):
    """rows[index] for unique indices, whose gradient is a copy.

    torch's gradient adds rows one after another, for indices that may repeat.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        zeros = grads[0].new_zeros(ctx.num_rows, *grads[0].shape[1:])
        return zeros.index_copy_(0, index, grads[0]), None


class RecurrentPolicy(ActorCritic):
    """A recurrent core shared by actor and critic.

    Observations that only the critic reads bypass the core: they are concatenated to its output in
    the critic's network, so that the policy acts without them.
    """

    config: PolicyConfig

    def setup(self, generator: torch.Generator | None) -> None:
        super().setup(generator)
        config = self.config
        hidden, activation, units = config.hidden, config.activation, config.units
        self._activation = ACTIVATIONS[activation]
        norm, both = config.layer_norm != "off", config.layer_norm == "all"
        sizes, gain = (self._width(config.actor_reads), *hidden), math.sqrt(2.0)
        self.encoder = Mlp(sizes, activation, gain, generator, both) if hidden else None
        self.core = CORES[config.kind](sizes[-1], units, generator)
        self.actor = Mlp((units, self.num_outputs), activation, 0.01, generator)
        self._extra = tuple(n for n in config.critic_reads if n not in config.actor_reads)
        critic_hidden = config.critic_layers if self._extra else (config.critic_hidden or ())
        critic = (units + self._width(self._extra), *critic_hidden, 1)
        self.critic = Mlp(critic, activation, 1.0, generator, norm)
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
        """Outputs of the core, [segments, horizon, units]."""
        if memory is None:
            raise ValueError("a recurrent policy is evaluated from the memory it acted with")
        return self.core.unroll(self._encode(features["actor"]), memory.state, memory.starts)

    def _head(self, out: torch.Tensor, features: Features) -> torch.Tensor:
        """Values [segments, horizon] at the outputs of the core."""
        if self._extra:
            out = torch.cat([out, features["critic"]], dim=-1)
        return self.critic(out).squeeze(-1)  # type: ignore[no-any-return]

    def _forward(
        self, features: Features, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._unroll(features, memory)
        return self.actor(out), self._head(out, features)

    def _values(self, features: Features, memory: Memory | None) -> torch.Tensor:
        return self._head(self._unroll(features, memory), features)
