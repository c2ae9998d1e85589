"""Images to features: strided convolutions and one linear layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from etude.core.config import Config
from etude.core.errors import UsageError
from etude.models.networks import Layers, Units

KERNEL, STRIDE, PADDING = 3, 2, 1


class EncoderConfig(Config):
    """Convolutions over images."""

    channels: Layers = Field(
        (16, 32, 32, 32), description="Filters of each 3x3 convolution; each halves the image."
    )
    features: Units = Field(64, description="Features of an image.")


def smallest_image(config: EncoderConfig) -> int:
    """Pixels of the shorter side that an image needs."""
    return int(STRIDE ** len(config.channels))


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """uint8 [..., h, w, c] as float32 in [-1, 1]."""
    return images.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)


def stack_channels(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """uint8 images [n, h, w, c] of the same size as one, [n, h, w, sum of c].

    Channel by channel: `torch.cat` copies three bytes at a time, which takes three times as long.
    """
    channels = [channel for image in images for channel in image.unbind(-1)]
    stacked = images[0].new_empty((*images[0].shape[:-1], len(channels)))
    for place, channel in zip(stacked.unbind(-1), channels, strict=True):
        place.copy_(channel)
    return stacked


class ImageEncoder(nn.Module):
    """Convolutions of stride 2, a linear layer, layer norm and tanh: features in (-1, 1).

    Images are stored [n, h, w, c]. Seen as [n, c, h, w] that is torch's channels-last format, in
    which the kernels of a processor are twice as fast as in the plain one, and it costs no copy.
    Each layer acts on a quarter of the places of the one before: the first filters decide the
    time, so they are few.
    """

    def __init__(
        self, shape: tuple[int, int, int], config: EncoderConfig, generator: torch.Generator | None
    ) -> None:
        """`shape` is (h, w, c). Without a generator the weights are about to be loaded."""
        super().__init__()
        height, width, inputs = shape
        least = smallest_image(config)
        if min(height, width) < least:
            raise UsageError(
                f"Images of {height} x {width} pixels are too small for {len(config.channels)} "
                f"convolutions that halve them: give {least} pixels or more, or fewer channels."
            )
        self._depth = len(config.channels)
        for i, outputs in enumerate(config.channels):
            weight = nn.Parameter(torch.zeros(outputs, inputs, KERNEL, KERNEL))
            if generator is not None:
                nn.init.orthogonal_(weight, math.sqrt(2.0), generator=generator)
            self.register_parameter(f"filter{i}", weight)
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(outputs)))
            inputs, height, width = outputs, -(-height // STRIDE), -(-width // STRIDE)
        self.weight = nn.Parameter(torch.zeros(config.features, inputs * height * width))
        if generator is not None:
            nn.init.orthogonal_(self.weight, generator=generator)
        self.norm_weight = nn.Parameter(torch.ones(config.features))
        self.norm_bias = nn.Parameter(torch.zeros(config.features))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [n, h, w, c] -> float32 [n, features]; the bytes become floats only here."""
        x = to_pixels(images).permute(0, 3, 1, 2)
        for i in range(self._depth):
            weight = cast(torch.Tensor, self._parameters[f"filter{i}"])
            bias = self._parameters[f"bias{i}"]
            x = functional.conv2d(x, weight, bias, STRIDE, PADDING).relu_()
        # As it lies in memory: row, column, channel.
        x = functional.linear(x.permute(0, 2, 3, 1).flatten(1), self.weight)
        x = functional.layer_norm(x, x.shape[1:], self.norm_weight, self.norm_bias)
        return x.tanh_()
