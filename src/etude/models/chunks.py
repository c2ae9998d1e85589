"""Policies that predict chunks of actions with a transformer: `act` and `flow`.

The last `history` observations are encoded as tokens, one for the vectors and one for each image of
an observation; the next `chunk` actions are decoded from them.

- `act` (Zhao et al. 2023, without its latent style variable): the decoder maps learned queries to
  actions; the loss is their absolute error.
- `flow` (flow matching, Lipman et al. 2022): the decoder maps noisy actions
  x = (1 - t) noise + t actions to the velocity actions - noise; the loss is its squared error. To
  act, noise is integrated along the velocity in `flow_steps` Euler steps. It can represent several
  solutions, of which the noise selects one.

A chunk is predicted at every step, and used as in the papers:

- `act` averages the predictions for a step: the oldest has weight 1, the next exp(-ensemble), and
  so on (temporal ensembling).
- `flow` samples chunks, whose mean may be no solution: left and right of an obstacle average to a
  collision. It executes the first `execute` actions of a chunk, then those of the newest (receding
  horizon, as in Diffusion Policy, Chi et al. 2023).

The remaining actions and the earlier observations are the policy's recurrent state.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from etude.core.contracts import Action, Array, ArraySpec
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.models.imitation import Demonstrations, Window
from etude.models.networks import EncoderConfig
from etude.models.policies import BasePolicy, BasePolicyConfig, Features


class ChunkPolicyConfig(BasePolicyConfig):
    """A transformer that predicts chunks of actions."""

    kind: Literal["act", "flow"] = Field(
        "act", description="act: actions by their absolute error. flow: by flow matching."
    )
    aliases = {**BasePolicyConfig.aliases, "execute": "n_action_steps"}  # noqa: RUF012

    critic_reads: tuple[str, ...] = Field((), description="Nothing: there is no critic.")
    chunk: int = Field(16, ge=1, le=1024, description="Actions of a prediction.")
    history: int = Field(1, ge=1, le=64, description="Observations that a prediction reads.")
    ensemble: float | None = Field(
        0.01,
        ge=0,
        description="Temporal ensembling of act: newer predictions weigh exp(-ensemble) of the one "
        "before; none takes the newest prediction alone. flow never averages.",
    )
    execute: int = Field(
        8,
        ge=1,
        le=1024,
        description="Actions of a prediction of flow, at most all, that are carried out before "
        "the next prediction is used.",
    )
    width: int = Field(128, ge=8, le=4096, description="Size of a token.")
    layers: int = Field(2, ge=1, le=64, description="Layers of the encoder, and of the decoder.")
    heads: int = Field(4, ge=1, le=64, description="Attention heads of a layer.")
    flow_steps: int = Field(8, ge=1, le=1000, description="Euler steps of flow to an action.")
    encoder: EncoderConfig = Field(
        EncoderConfig(features=128), description="Encoder of each image."
    )

    @property
    def family(self) -> str:
        return "chunks"

    @property
    def is_recurrent(self) -> bool:
        return True

    def num_activations(self, action_size: int) -> int:
        tokens = 2 * self.history + self.chunk
        return 16 * self.width * self.layers * tokens + 4 * self.chunk * action_size

    def policy_class(self) -> type[BasePolicy]:
        return ChunkPolicy


class ChunkPolicy(BasePolicy):
    """Policy `act` or `flow`, as described in the module's docstring."""

    config: ChunkPolicyConfig

    def setup(self, generator: torch.Generator | None) -> None:
        config, self.num_actions = self.config, self.num_box_actions()
        if config.width % (2 * config.heads):
            raise UsageError(
                f"policy.width {config.width} must be an even multiple of policy.heads "
                f"{config.heads}."
            )
        self.encoders = self.make_encoders(config.actor_reads, generator)
        seed = 0 if generator is None else generator.initial_seed()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._make_transformer()
        chunk = ArraySpec((config.chunk, self.num_actions))
        self.state_specs = {"plan": chunk, "left": ArraySpec((1,))}
        if config.kind == "act":
            each = ArraySpec((config.chunk,))
            self.state_specs = {"sums": chunk, "weights": each, "predictions": each}
        if config.history > 1:
            self.state_specs["num_seen"] = ArraySpec((1,))
            for name in config.actor_reads:
                spec = self.observations[name]
                shape = (config.history - 1, *spec.shape)
                self.state_specs[_past(name)] = ArraySpec(shape, spec.dtype)

    def _make_transformer(self) -> None:
        config, width = self.config, self.config.width
        vectors = sum(self.vectors.get(name, 0) for name in config.actor_reads)
        self.vector_token = nn.Linear(vectors, width) if vectors else None
        names = [name for name in config.actor_reads if name not in self.vectors]
        self.image_tokens = nn.ModuleDict(
            {name: nn.Linear(config.encoder.features, width) for name in names}
        )
        tokens = config.history * (len(names) + (vectors > 0))
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.queries = nn.Parameter(0.02 * torch.randn(config.chunk, width))
        layers = range(config.layers)
        self.encoder_layers = nn.ModuleList(Layer(width, config.heads, False) for _ in layers)
        self.decoder_layers = nn.ModuleList(Layer(width, config.heads, True) for _ in layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.num_actions)
        if config.kind == "flow":
            self.noisy = nn.Linear(self.num_actions, width)
            self.time = nn.Linear(width, width)

    def _critic_names(self) -> tuple[str, ...]:
        return self.config.actor_reads

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        size = self.config.chunk * self.num_actions if self.config.kind == "flow" else 1
        return generator.standard_normal((steps, num_envs, size), dtype=np.float32)

    def _tokens(self, features: Features) -> torch.Tensor:
        """Encode prepared features [n, history, ...] as tokens [n, tokens, width]."""
        tokens = []
        if self.vector_token is not None:
            tokens.append(self.vector_token(features["actor"]))
        if self.encoders is not None:
            images = {name: features[name] for name in self.image_tokens}
            for name, encoded in self.encoders.encoded(images).items():
                tokens.append(self.image_tokens[name](encoded))
        x = torch.cat(tokens, dim=1) + self.places
        for layer in self.encoder_layers:
            x = layer(x, None)
        return x

    def _decode(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Decode queries x [n, chunk, width] to [n, chunk, dims]."""
        for layer in self.decoder_layers:
            x = layer(x, tokens)
        outputs: torch.Tensor = self.head(self.norm(x))
        return outputs

    def _velocity(
        self, tokens: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        """Velocity [n, chunk, dims] at noisy actions [n, chunk, dims] and times [n] in [0, 1]."""
        embedded = self.time(_embedded(time, self.config.width))[:, None]
        return self._decode(tokens, self.noisy(noisy) + self.queries + embedded)

    def _predict(self, features: Features, noise: torch.Tensor | None) -> torch.Tensor:
        """Predict actions [n, chunk, dims]; noise: [n, chunk * dims], None for zeros."""
        config, tokens = self.config, self._tokens(features)
        num, shape = len(tokens), (len(tokens), config.chunk, self.num_actions)
        if config.kind == "act":
            return self._decode(tokens, self.queries.expand(num, -1, -1))
        x = tokens.new_zeros(shape) if noise is None else noise.view(shape)
        for step in range(config.flow_steps):
            time = tokens.new_full((num,), step / config.flow_steps)
            x = x + self._velocity(tokens, x, time) / config.flow_steps
        return x

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        frames, after = self._remember(obs, state)
        chunk = self._predict(self.prepare(frames), noise).clamp(-1.0, 1.0)
        zeros = chunk.new_zeros(len(chunk))
        if self.config.kind == "flow":
            is_over = state["left"] < 0.5
            plan = torch.where(is_over[..., None], chunk, state["plan"])
            most = min(self.config.execute, self.config.chunk)
            after["plan"] = _shift(plan)
            after["left"] = torch.where(is_over, zeros[:, None] + most, state["left"]) - 1.0
            return Action(plan[:, 0], zeros, after)
        if self.config.ensemble is None:
            return Action(chunk[:, 0], zeros, {**state, **after})
        weight = (-self.config.ensemble * state["predictions"]).exp()
        sums = state["sums"] + weight[..., None] * chunk
        weights = state["weights"] + weight
        actions = sums[:, 0] / weights[:, :1]
        after["sums"] = _shift(sums)
        after["weights"] = _shift(weights)
        after["predictions"] = _shift(state["predictions"] + 1.0)
        return Action(actions, zeros, after)

    def _remember(
        self, obs: dict[str, torch.Tensor], state: Tree
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """({name: [n, history, ...]} with this observation last, next state of the history)."""
        names, after = self.config.actor_reads, {}
        frames = {name: obs[name][:, None] for name in names}
        if self.config.history == 1:
            return frames, {}
        fresh = state["num_seen"][:, 0] == 0
        for name in names:
            # The history of an episode's first observation repeats it.
            here = frames[name].expand_as(state[_past(name)])
            is_fresh = fresh.view(-1, *[1] * (here.ndim - 1))
            past = torch.where(is_fresh, here, state[_past(name)])
            frames[name] = torch.cat([past, frames[name]], dim=1)
            after[_past(name)] = frames[name][:, 1:].contiguous()
        after["num_seen"] = state["num_seen"] + 1.0
        return frames, after

    def imitation_window(self, horizon: int) -> Window:
        return Window(self.config.history - 1, 0, self.config.chunk)

    def imitation_loss(self, shown: Demonstrations, generator: np.random.Generator) -> torch.Tensor:
        """Loss [n, chunk]."""
        features, actions = self.prepare(shown.obs), shown.actions
        if self.config.kind == "act":
            return (self._predict(features, None) - actions).abs().mean(-1)
        noise = torch.from_numpy(generator.standard_normal(actions.shape, dtype=np.float32))
        noise = noise.to(actions.device)
        time = torch.from_numpy(generator.random(len(actions), dtype=np.float32)).to(actions.device)
        between = noise + time[:, None, None] * (actions - noise)
        velocity = self._velocity(self._tokens(features), between, time)
        return (velocity - (actions - noise)).square().mean(-1)


class Layer(nn.Module):
    """A pre-norm transformer layer: self-attention, in decoders cross-attention, and two linear
    layers, each with a residual connection."""

    def __init__(self, width: int, heads: int, is_decoder: bool) -> None:
        super().__init__()
        self.among = Attention(width, heads)
        self.to_others = Attention(width, heads) if is_decoder else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if is_decoder else 2))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        """x: [n, tokens, width]; others: [n, other tokens, width]."""
        normed = self.norms[0](x)
        x = x + self.among(normed, normed)
        if self.to_others is not None and others is not None:
            x = x + self.to_others(self.norms[2](x), others)
        grown = functional.gelu(self.wide(self.norms[1](x)))
        added: torch.Tensor = x + self.narrow(grown)
        return added


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(others)), split(self.value(others))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _embedded(time: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines [n, width] of times [n] at frequencies from 1 to 1000."""
    steps = torch.linspace(0.0, math.log(1000.0), width // 2, device=time.device)
    angles = time[:, None] * steps.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _shift(x: torch.Tensor) -> torch.Tensor:
    """Shift [n, chunk, ...] by one step; the last entry is 0."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _past(name: str) -> str:
    return f"past_{name}"
