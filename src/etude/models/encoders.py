"""Image encoders: convolutions or a ResNet-18, and one linear layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from etude.core.contracts import ArraySpec
from etude.core.errors import UsageError
from etude.models.networks import EncoderConfig, is_image

KERNEL, STRIDE, PADDING = 3, 2, 1
_HALVINGS = 2
"""First convolutions of `keypoints` with stride 2; the others keep the size."""
_RESNET_CHANNELS = (64, 128, 256, 512)
_RESNET_SMALLEST = 32
_CHANNELS_PER_GROUP = 16
"""Channels that GroupNorm normalises together."""
_PRIVILEGED = ("progress", "critic", "style")
"""Observations for evaluation, critic or discriminator; not read by default."""
_SIMULATED = ("states", "object")
"""Prefixes of observations that only a simulator has."""


def smallest_image(config: EncoderConfig) -> int:
    """Fewest pixels of the shorter side of an image."""
    if config.kind == "resnet18":
        return _RESNET_SMALLEST
    return int(math.prod(strides(config)))


def strides(config: EncoderConfig) -> list[int]:
    """Stride of each 3x3 convolution of `cnn` or `keypoints`."""
    halved = len(config.channels) if config.kind == "cnn" else _HALVINGS
    return [STRIDE if i < halved else 1 for i in range(len(config.channels))]


def default_observations(
    observations: Mapping[str, ArraySpec], config: EncoderConfig, but: str | None = None
) -> tuple[str, ...]:
    """Observations of a dataset that are read by default: images and proprioceptive vectors.

    Without images, all vectors. Never the observation `but`.
    """
    least = smallest_image(config)
    images = [n for n, s in observations.items() if is_image(s) and min(s.shape[:2]) >= least]
    vectors = [n for n, s in observations.items() if len(s.shape) == 1]
    hidden = {*_PRIVILEGED, but}
    if images:  # images show the task; without them, its state must be read
        hidden |= {n for n in vectors if n.startswith(_SIMULATED)}
        hidden |= {"state"} if "proprio" in vectors else set()
    reads = tuple(name for name in [*images, *vectors] if name not in hidden)
    if not reads:
        raise UsageError(
            "No observation is read by default among "
            f"{', '.join(sorted(observations))}. Name those to read (`reads` of a reward network, "
            "policy.actor_reads)."
        )
    return reads


def num_activations(config: EncoderConfig, shape: tuple[int, ...]) -> int:
    """Approximate number of float32 activations per image [h, w, c] in a gradient step."""
    height, width, channels = shape
    count = height * width * channels
    if config.kind == "resnet18":
        # Each of the four stages keeps about ten arrays; the first has a quarter of the size.
        stages = enumerate(_RESNET_CHANNELS)
        return 2 * count + sum(12 * c * (height * width >> 2 * (2 + i)) for i, c in stages)
    for filters, stride in zip(config.channels, strides(config), strict=True):
        height, width = -(-height // stride), -(-width // stride)
        count += height * width * filters
    return count + 4 * config.features


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [..., h, w, c] to float32 in [-1, 1]."""
    return images.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)


def stack_channels(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate uint8 images [n, h, w, c] to [n, h, w, sum of c].

    Copies channels, because `torch.cat` copies three bytes at a time and takes three times as long.
    """
    channels = [channel for image in images for channel in image.unbind(-1)]
    stacked = images[0].new_empty((*images[0].shape[:-1], len(channels)))
    for place, channel in zip(stacked.unbind(-1), channels, strict=True):
        place.copy_(channel)
    return stacked


def random_shift(images: torch.Tensor, pixels: int, generator: np.random.Generator) -> torch.Tensor:
    """Shift each of the images [n, h, w, c] by up to `pixels`; borders are repeated.

    Copies rows, because indexing all pixels copies three bytes at a time.
    """
    num, height, width, _ = images.shape
    moves = generator.integers(-pixels, pixels + 1, (2, num, 1))[..., 0]
    rows = (torch.arange(height) + torch.from_numpy(moves[0])[:, None]).clamp(0, height - 1)
    moved = torch.empty_like(images)
    each = zip(moved, images, rows.to(images.device), moves[1].tolist(), strict=True)
    for place, unmoved, row, across in each:
        image = unmoved.index_select(0, row)
        left, right = max(-across, 0), max(across, 0)
        place[:, left : width - right] = image[:, right : width - left]
        place[:, :left] = image[:, :1]
        place[:, width - right :] = image[:, -1:]
    return moved


class ImageEncoder(nn.Module):
    """Convolutions, a linear layer, layer norm and tanh: features in (-1, 1).

    Images [n, h, w, c], viewed as [n, c, h, w], are in torch's channels-last format, whose CPU
    kernels are twice as fast, without a copy.
    """

    def __init__(
        self, shape: tuple[int, ...], config: EncoderConfig, generator: torch.Generator | None
    ) -> None:
        """shape: (h, w, c). generator: None if the weights are loaded afterwards."""
        super().__init__()
        height, width, _ = shape
        least = smallest_image(config)
        if min(height, width) < least:
            fewer = ", or the encoder cnn" if config.kind == "resnet18" else ", or fewer channels"
            raise UsageError(
                f"Images of {height} x {width} pixels are too small for the encoder "
                f"{config.kind}, whose layers halve them: give {least} pixels or "
                f"more{fewer}."
            )
        inputs = self._setup(shape, config, generator)
        self.weight = nn.Parameter(torch.zeros(config.features, inputs))
        if generator is not None:
            nn.init.orthogonal_(self.weight, generator=generator)
        self.norm_weight = nn.Parameter(torch.ones(config.features))
        self.norm_bias = nn.Parameter(torch.zeros(config.features))

    def _setup(
        self, shape: tuple[int, ...], config: EncoderConfig, generator: torch.Generator | None
    ) -> int:
        """Make the convolutions; returns the number of their outputs per image.

        Each layer has a quarter of the pixels of the one before, so the first filters decide the
        time and are few.
        """
        height, width, inputs = shape
        self._strides = strides(config)
        for i, (outputs, stride) in enumerate(zip(config.channels, self._strides, strict=True)):
            weight = nn.Parameter(torch.zeros(outputs, inputs, KERNEL, KERNEL))
            if generator is not None:
                nn.init.orthogonal_(weight, math.sqrt(2.0), generator=generator)
            self.register_parameter(f"filter{i}", weight)
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(outputs)))
            inputs, height, width = outputs, -(-height // stride), -(-width // stride)
        return inputs * height * width

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        """[n, c, h, w] float32 -> [n, outputs]."""
        for i in range(len(self._strides)):
            x = self._layer(i, x).relu_()
        # In memory order: row, column, channel.
        return x.permute(0, 2, 3, 1).flatten(1)

    def _layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        weight = cast(torch.Tensor, self._parameters[f"filter{i}"])
        bias = self._parameters[f"bias{i}"]
        return functional.conv2d(x, weight, bias, self._strides[i], PADDING)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [n, h, w, c] -> float32 [n, features]."""
        x = self._convolve(to_pixels(images).permute(0, 3, 1, 2))
        x = functional.linear(x, self.weight)
        x = functional.layer_norm(x, x.shape[1:], self.norm_weight, self.norm_bias)
        return x.tanh_()


class Keypoints(ImageEncoder):
    """Convolutions at a quarter of the image's size, and spatial softmax of the last filters.

    It learns the position of an object from a few hundred demonstrations; a linear layer over all
    pixels needs many more.
    """

    def _setup(
        self, shape: tuple[int, ...], config: EncoderConfig, generator: torch.Generator | None
    ) -> int:
        super()._setup(shape, config, generator)
        return 2 * config.channels[-1]

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        *hidden, last = range(len(self._strides))
        for i in hidden:
            x = self._layer(i, x).relu_()
        return spatial_softmax(self._layer(last, x))


class ResNet18(ImageEncoder):
    """A ResNet-18 with GroupNorm in place of batch norm, so that features do not depend on other
    images of the batch, and spatial softmax in place of the mean, which keeps positions."""

    def _setup(
        self, shape: tuple[int, ...], config: EncoderConfig, generator: torch.Generator | None
    ) -> int:
        self.stem = _convolution(shape[2], _RESNET_CHANNELS[0], 7, 2, generator)
        self.stem_norm = _group_norm(_RESNET_CHANNELS[0])
        self.blocks = nn.ModuleList()
        inputs = _RESNET_CHANNELS[0]
        for stage, outputs in enumerate(_RESNET_CHANNELS):
            for stride in (1 if stage == 0 else 2, 1):
                self.blocks.append(_Residual(inputs, outputs, stride, generator))
                inputs = outputs
        return 2 * inputs

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem_norm(self.stem(x)).relu()
        x = functional.max_pool2d(x, 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return spatial_softmax(x)


class _Residual(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride, generator)
        self.first_norm = _group_norm(outputs)
        self.second = _convolution(outputs, outputs, 3, 1, generator)
        self.second_norm = _group_norm(outputs)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = _convolution(inputs, outputs, 1, stride, generator)
            self.shortcut_norm = _group_norm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.shortcut is None else self.shortcut_norm(self.shortcut(x))
        x = self.first_norm(self.first(x)).relu()
        x = self.second_norm(self.second(x))
        return (x + kept).relu()


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator | None
) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    with torch.no_grad():
        if generator is None:
            made.weight.zero_()
        else:
            spread = math.sqrt(2.0 / (outputs * kernel * kernel))  # He et al. 2015, by fan-out.
            made.weight.normal_(0.0, spread, generator=generator)
    return made


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // _CHANNELS_PER_GROUP), channels)


def spatial_softmax(x: torch.Tensor) -> torch.Tensor:
    """[n, c, h, w] -> [n, 2 c]: mean position of each channel, x and y in [-1, 1], weighted by the
    channel's softmax over the image (Levine et al. 2016)."""
    num, channels, height, width = x.shape
    weights = x.flatten(2).softmax(-1).view(num, channels, height, width)
    across = torch.linspace(-1.0, 1.0, width, device=x.device)
    down = torch.linspace(-1.0, 1.0, height, device=x.device)
    places = (weights.sum(2) * across).sum(-1), (weights.sum(3) * down).sum(-1)
    return torch.cat(places, dim=-1)


def make_encoder(
    shape: tuple[int, ...], config: EncoderConfig, generator: torch.Generator | None
) -> ImageEncoder:
    """A new encoder of images (h, w, c); generator: None if the weights are loaded afterwards."""
    kinds = {"cnn": ImageEncoder, "keypoints": Keypoints, "resnet18": ResNet18}
    return kinds[config.kind](shape, config, generator)


class ImageEncoders(nn.ModuleDict):
    """{name: encoder} of images."""

    def encoded(self, images: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Encode images uint8 [..., h, w, c] that have an encoder, {name: [..., features]}."""
        return {name: self._features(name, x) for name, x in images.items() if name in self}

    def _features(self, name: str, images: torch.Tensor) -> torch.Tensor:
        leading, shape = images.shape[:-3], images.shape[-3:]
        features: torch.Tensor = self[name](images.reshape(-1, *shape))
        return features.view(*leading, -1)

    @staticmethod
    def beside(
        vector: torch.Tensor, encoded: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> torch.Tensor:
        """Concatenate a vector [..., n] and the encoded `names`, [..., n + features]."""
        parts = [encoded[name] for name in names if name in encoded]
        return torch.cat([vector, *parts], dim=-1)
