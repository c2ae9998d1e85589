"""Reward networks r(s, a, s') of vectors and images, and the discriminator of motion priors."""

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
from etude.models.networks import EncoderConfig, Layers, Mlp, Normaliser, is_image, make_generator
from etude.models.rebuilding import Contract, rebuild

CONTRACT_FORMAT, CONTRACT_KIND = 2, "reward"
"""Format 1 did not scale columns with a standard deviation below 1e-4."""
RESOLUTION = 1e-6
"""Relative standard deviations below this are rounding errors of float32."""
Named = dict[str, torch.Tensor]
_CHUNK = 64
"""Steps per forward pass."""


class RewardNetworkConfig(Config):
    """Config of a reward network r(s, a, s')."""

    reads: tuple[str, ...] = Field(
        ("state",),
        description="Observations that the network reads; uint8 [h, w, c] are images. Empty: all "
        "images and all proprioceptive vectors.",
    )
    hidden: Layers = Field((256, 256), description="Units of each hidden layer.")
    encoder: EncoderConfig = Field(EncoderConfig(), description="Encoder of each image.")

    def with_reads(self, observations: Mapping[str, ArraySpec], but: str | None = None) -> Self:
        """A copy with default `reads` among the observations except `but`, if they are empty."""
        if self.reads:
            return self
        reads = default_observations(observations, self.encoder, but)
        return self.replace(reads=reads)


class StepNormaliser(Normaliser):
    """Scales each column of [s, s - s', a] by its standard deviation, however small.

    The change in a step may be a millionth of the state and still decide the reward. A column is
    left unscaled only if its standard deviation is within rounding errors of its values, or of
    those of s for s - s'.
    """

    def __init__(self, size: int, width: int) -> None:
        """width: number of columns of s, and of s - s'."""
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

    *Vectors* (every rank-1 observation, and box actions) are concatenated to [s, s - s', a] and
    normalised by `StepNormaliser`. Discrete actions are one-hot and not normalised.

    *Images* are encoded as the channels [s, s'] of one image, so that the first filters can compute
    differences of pixels. The difference of two encodings would be less precise and take twice the
    time.

    The layers compute y; the reward is `shift + scale * y`, buffers with the values 0 and 1 unless
    training uses other units. Initially y is about 0: an untrained network gives no reward.
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
        """generator: None if the weights are loaded afterwards (or on the meta device)."""
        super().__init__()
        config = config.with_reads(observations)
        self.config, self.action = config, action
        self.observations = {name: _readable(name, observations) for name in config.reads}
        self._vectors = [n for n, spec in self.observations.items() if not is_image(spec)]
        self._images = [n for n, spec in self.observations.items() if is_image(spec)]
        width = sum(self.observations[name].shape[0] for name in self._vectors)
        boxes = action.array.shape[0] if action.kind == "box" else 0
        self.num_vectors = 2 * width + boxes
        """Number of columns of `vectors`, 0 without vectors."""
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
        """Raw [s, s - s', a], [n, num_vectors] float32: the input of the normaliser."""
        here = [obs[name].float() for name in self._vectors]
        change = [x - next_obs[n].float() for n, x in zip(self._vectors, here, strict=True)]
        boxes = [actions.float()] if self.action.kind == "box" else []
        return torch.cat([*here, *change, *boxes], dim=-1)

    def outputs(self, obs: Named, actions: torch.Tensor, next_obs: Named) -> torch.Tensor:
        """y [n] of stored steps: obs {name: [n, ...]}, actions [n, dims]."""
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
        """Rewards r(s, a, s') [n] in the environment's units."""
        return torch.addcmul(self.shift, self.outputs(obs, actions, next_obs), self.scale)

    def contract(self) -> Tree:
        """Description of this network, enough to rebuild it with its arrays."""
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
    """A new network with weights from `key`; None if they are loaded, or only counted."""
    return RewardNetwork(config, observations, action, make_generator(key))


class RewardContract(Contract):
    """Contract of a reward network, from `RewardNetwork.contract`."""

    kind: str
    network: RewardNetworkConfig


def reward_network_from_contract(contract: Tree, arrays: Tree) -> RewardNetwork:
    """Rebuild the reward network of a checkpoint's `policy/`."""
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
    """Rewards r(s, a, s') of stored steps, [n] float64; obs may hold further observations.

    Computed in pieces, which bounds the memory of images.
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
    """Logit of a window [frames, features]; above 0, it is classified as the reference's.

    A feature has the same normalisation in every frame of a window. Initially logits are about 0.
    """

    def __init__(
        self, window: tuple[int, int], hidden: tuple[int, ...], generator: torch.Generator | None
    ) -> None:
        """generator: None if the weights are loaded afterwards (or on the meta device)."""
        super().__init__()
        frames, features = window
        self.normaliser = Normaliser(features)
        self.layers = Mlp((frames * features, *hidden, 1), "relu", 0.01, generator)

    def inputs(self, windows: torch.Tensor) -> torch.Tensor:
        """Normalise and flatten raw windows [n, frames, features] to [n, frames * features]."""
        return self.normaliser(windows).flatten(1)  # type: ignore[no-any-return]

    def logits_of(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [n] of normalised inputs [n, frames * features]."""
        return self.layers(inputs).squeeze(-1)  # type: ignore[no-any-return]

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits [n] of raw windows [n, frames, features]."""
        return self.logits_of(self.inputs(windows))

    def slopes(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [n], ||d logit / d input||^2 [n]) at normalised inputs, both differentiable."""
        inputs = inputs.detach().requires_grad_()
        logits = self.logits_of(inputs)
        (gradient,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        return logits, gradient.square().sum(-1)

    def weights(self) -> list[torch.Tensor]:
        """Weight matrices without biases, of the output layer last."""
        return [p for name, p in self.layers.named_parameters() if name.startswith("weight")]


def _readable(name: str, observations: dict[str, ArraySpec]) -> ArraySpec:
    if name not in observations:
        raise UsageError(
            f"The reward network reads the observation '{name}', which does not exist; there are "
            f"{', '.join(sorted(observations))}. Set its field `reads`."
        )
    spec = observations[name]
    if not is_image(spec) and len(spec.shape) != 1:
        raise UsageError(
            "A reward network reads vectors and uint8 images [h, w, c]; the observation "
            f"'{name}' is {spec.dtype} of shape {spec.shape}."
        )
    return spec
