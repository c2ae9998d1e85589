"""Networks of the reward of a step: r(s, a, s') from vectors and images, and a discriminator of
motion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Self

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from etude.core.config import Config
from etude.core.contracts import ActionSpec, Array, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.models.encoders import default_observations, make_encoder, stack_channels
from etude.models.networks import EncoderConfig, Layers, Mlp, is_image, make_generator
from etude.models.normalise import Normaliser
from etude.models.rebuilding import Contract, rebuild

CONTRACT_FORMAT, CONTRACT_KIND = 2, "reward"
"""Format 1 left columns unscaled whose spread was below 1e-4."""
RESOLUTION = 1e-6
"""Spreads below this part of the numbers they come from are taken for rounding of float32."""
Named = dict[str, torch.Tensor]
_CHUNK = 64
"""Steps of one forward pass."""


class RewardNetworkConfig(Config):
    """A network for r(s, a, s')."""

    reads: tuple[str, ...] = Field(
        ("state",),
        description="Observations that the network reads; uint8 [h, w, c] are images. Empty: all "
        "images and all proprioceptive vectors.",
    )
    hidden: Layers = Field((256, 256), description="Units of each hidden layer.")
    encoder: EncoderConfig = Field(EncoderConfig(), description="Encoder of each image.")

    def with_reads(self, observations: Mapping[str, ArraySpec], but: str | None = None) -> Self:
        """With `reads` chosen from what there is, all but one, where none are given."""
        if self.reads:
            return self
        reads = default_observations(observations, self.encoder, but)
        return self.model_copy(update={"reads": reads})


class StepNormaliser(Normaliser):
    """Scales each column of [s, s - s', a] by its own spread, however small that is.

    The change of a step may be a millionth of the state and still decide its reward; a
    spread that counts as none in an observation of about unit size is then all there is to see. A
    column is left unscaled only where its spread is within the rounding of the numbers it was
    computed from. For s - s' these are the numbers of s.
    """

    def __init__(self, size: int, width: int) -> None:
        """width: columns of s, and of s - s'."""
        super().__init__(size)
        self._width = width

    def _refresh(self) -> None:
        super()._refresh()
        if float(self.count) == 0.0:
            return
        variance = self.m2 / self.count
        square = variance + self.mean.square()
        change = slice(self._width, 2 * self._width)
        square[change] = torch.maximum(square[change], square[: self._width])
        moves = variance > RESOLUTION**2 * square
        scale = torch.where(moves, variance, 1.0).rsqrt()
        self.scale.copy_(scale)
        self.shift.copy_(-self.mean * scale)


class RewardNetwork(nn.Module):
    """r(s, a, s') from normalised [s, s - s', a], the features of each image, and ReLU layers.

    *Vectors* (every rank-1 observation, and box actions) are joined to [s, s - s', a] and
    normalised column by column, each by its own spread: `StepNormaliser`. Discrete actions are
    one-hot and not normalised.

    *Images* go through one encoder as the channels [s, s'] of a single picture, so its first
    filters can take the difference of pixels. A difference of two encodings would be the small
    rest of two nearly equal vectors, at more than twice the time.

    The layers give y; the reward is `shift + scale * y`. Both are 0 and 1 unless whoever trains
    it learns in other units; they are buffers, so that the arrays of the network are all there
    is. At the start y is about 0: an untrained network gives no reward.
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        config: RewardNetworkConfig,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        generator: torch.Generator | None,
    ) -> None:
        """Without a generator the weights are about to be loaded (or on the meta device)."""
        super().__init__()
        config = config.with_reads(observations)
        self.config, self.action = config, action
        self.observations = {name: _readable(name, observations) for name in config.reads}
        self._vectors = [n for n, spec in self.observations.items() if not is_image(spec)]
        self._images = [n for n, spec in self.observations.items() if is_image(spec)]
        width = sum(self.observations[name].shape[0] for name in self._vectors)
        boxes = action.array.shape[0] if action.kind == "box" else 0
        self.num_vectors = 2 * width + boxes
        """Columns of `vectors`, 0 when nothing is normalised."""
        self.normaliser = StepNormaliser(self.num_vectors, width)
        self.encoders = nn.ModuleList()
        for name in self._images:
            height, wide, channels = self.observations[name].shape
            shape = (height, wide, 2 * channels)
            self.encoders.append(make_encoder(shape, config.encoder, generator))
        inputs = self.num_vectors + len(self._images) * config.encoder.features + sum(action.sizes)
        self.layers = Mlp((inputs, *config.hidden, 1), "relu", 0.01, generator)
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def vectors(self, obs: Named, actions: torch.Tensor, next_obs: Named) -> torch.Tensor:
        """Raw [s, s - s', a], [n, num_vectors] float32: what the normaliser needs moments of."""
        here = [obs[name].float() for name in self._vectors]
        change = [x - next_obs[n].float() for n, x in zip(self._vectors, here, strict=True)]
        boxes = [actions.float()] if self.action.kind == "box" else []
        return torch.cat([*here, *change, *boxes], dim=-1)

    def outputs(self, obs: Named, actions: torch.Tensor, next_obs: Named) -> torch.Tensor:
        """y [n] of steps as they are stored: obs {name: [n, ...]}, actions [n, dims]."""
        parts = []
        if self.num_vectors:
            parts.append(self.normaliser(self.vectors(obs, actions, next_obs)))
        for name, encoder in zip(self._images, self.encoders, strict=True):
            parts.append(encoder(stack_channels((obs[name], next_obs[name]))))
        for i, size in enumerate(self.action.sizes):
            parts.append(functional.one_hot(actions[:, i], size).float())
        y: torch.Tensor = self.layers(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))
        return y.squeeze(-1)

    def forward(self, obs: Named, actions: torch.Tensor, next_obs: Named) -> torch.Tensor:
        """r(s, a, s') [n]: reward per step, in the environment's units."""
        return torch.addcmul(self.shift, self.outputs(obs, actions, next_obs), self.scale)

    def contract(self) -> Tree:
        """All that is needed to rebuild this network, but for its arrays."""
        return {
            "format": CONTRACT_FORMAT,
            "kind": CONTRACT_KIND,
            "network": self.config.model_dump(mode="json"),
            "observations": {name: asdict(spec) for name, spec in self.observations.items()},
            "action": asdict(self.action),
        }


def make_reward_network(
    config: RewardNetworkConfig,
    observations: dict[str, ArraySpec],
    action: ActionSpec,
    key: Key | None,
) -> RewardNetwork:
    """A new network, its weights drawn from `key`; None when they are loaded, or only counted."""
    return RewardNetwork(config, observations, action, make_generator(key))


class RewardContract(Contract):
    """What `RewardNetwork.contract` gives."""

    kind: str
    network: RewardNetworkConfig


def reward_network_from_contract(contract: Tree, arrays: Tree) -> RewardNetwork:
    """The reward network that a checkpoint's `policy/` holds."""
    found = [str(contract.get(name))[:60] for name in ("kind", "format")]
    if found != [CONTRACT_KIND, str(CONTRACT_FORMAT)]:
        raise UsageError(
            f"This is not a reward network of format {CONTRACT_FORMAT}, but "
            f"{found[0] if 'kind' in contract else 'policy'} of format {found[1]}: name a run that "
            "learned a reward, or train it again if it is older than this version."
        )

    def make(contract: RewardContract) -> RewardNetwork:
        return RewardNetwork(contract.network, contract.observations, contract.action, None)

    return rebuild(RewardContract, contract, arrays, make)


def compute_rewards(
    network: RewardNetwork, obs: dict[str, Array], actions: Array, next_obs: dict[str, Array]
) -> Array:
    """r(s, a, s') of steps as they are stored, [n] float64; obs may hold more than is read.

    In pieces, which bounds the floats of images.
    """
    device, parts = network.shift.device, []
    with torch.no_grad():
        for start in range(0, len(actions), _CHUNK):
            part = slice(start, start + _CHUNK)
            here, after = (
                {n: torch.from_numpy(o[n][part]).to(device) for n in network.observations}
                for o in (obs, next_obs)
            )
            taken = torch.from_numpy(actions[part]).to(device)
            parts.append(network(here, taken, after).double().cpu().numpy())
    return np.concatenate(parts) if parts else np.empty(0)


class Discriminator(nn.Module):
    """A logit for a window [frames, features]: above 0 it is taken for the reference's.

    A feature is normalised in the same way in every frame of a window, so that its change from
    one frame to the next keeps its meaning. At the start the logit is about 0: an untrained
    network prefers neither.
    """

    def __init__(
        self, window: tuple[int, int], hidden: tuple[int, ...], generator: torch.Generator | None
    ) -> None:
        """Without a generator the weights are about to be loaded (or on the meta device)."""
        super().__init__()
        frames, features = window
        self.normaliser = Normaliser(features)
        self.layers = Mlp((frames * features, *hidden, 1), "relu", 0.01, generator)

    def inputs(self, windows: torch.Tensor) -> torch.Tensor:
        """Raw windows [n, frames, features] as the layers read them: [n, frames * features]."""
        return self.normaliser(windows).flatten(1)  # type: ignore[no-any-return]

    def logits_of(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [n] of normalised inputs [n, frames * features]."""
        return self.layers(inputs).squeeze(-1)  # type: ignore[no-any-return]

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits [n] of raw windows [n, frames, features]."""
        return self.logits_of(self.inputs(windows))

    def slopes(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n] of normalised inputs, and ||d logit / d input||^2 [n], both with gradients."""
        inputs = inputs.detach().requires_grad_()
        logits = self.logits_of(inputs)
        (gradient,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        return logits, gradient.square().sum(-1)

    def weights(self) -> list[torch.Tensor]:
        """The matrices, without biases; the last one makes the logit."""
        return [p for name, p in self.layers.named_parameters() if name.startswith("weight")]


def _readable(name: str, observations: dict[str, ArraySpec]) -> ArraySpec:
    if name not in observations:
        raise UsageError(
            f"The reward network reads the observation '{name}', which is not there; there are "
            f"{', '.join(sorted(observations))}. Set its field `reads`."
        )
    spec = observations[name]
    if not is_image(spec) and len(spec.shape) != 1:
        raise UsageError(
            "A reward network reads vectors and uint8 images [h, w, c]; the observation "
            f"'{name}' is {spec.dtype} of shape {spec.shape}."
        )
    return spec
