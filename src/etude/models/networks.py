"""Multi-layer perceptrons, and the config of image encoders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from etude.core.config import Config
from etude.core.contracts import ArraySpec
from etude.core.keys import Key
from etude.core.trees import Tree

MOST_UNITS = 1 << 16
Units = Annotated[int, Field(ge=1, le=MOST_UNITS)]
"""Units of one layer."""
Layers = Annotated[tuple[Units, ...], Field(max_length=64)]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "silu": functional.silu,
}


class EncoderConfig(Config):
    """Convolutions over images."""

    kind: Literal["cnn", "keypoints", "resnet18"] = Field(
        "cnn",
        description="cnn: 3x3 convolutions, each of which halves the image. keypoints: only the "
        "first two halve it, and spatial softmax gives the place where each of the last filters "
        "responds. resnet18: a ResNet-18 with GroupNorm and spatial softmax, not pretrained.",
    )
    channels: Layers = Field((16, 32, 32, 32), min_length=1, description="Filters of each layer.")
    features: Units = Field(64, description="Features of an image.")


def is_image(spec: ArraySpec) -> bool:
    """Whether an observation is an image, uint8 [height, width, channels]."""
    return len(spec.shape) == 3 and spec.dtype == "uint8"


def make_generator(key: Key | None) -> torch.Generator | None:
    """A generator for initial weights; None if they are loaded, or only counted."""
    return None if key is None else torch.Generator().manual_seed(key.integer())


def load_arrays(module: nn.Module, arrays: Tree) -> None:
    """Load arrays {name: array or tensor} of a module's `state_dict`."""
    module.load_state_dict({name: torch.as_tensor(array) for name, array in arrays.items()})


class Mlp(nn.Module):
    """Linear layers `sizes[0] -> ... -> sizes[-1]` with orthogonal weights and activations between.

    One module instead of `nn.Sequential`: at a rollout's batch sizes, calls of modules take as long
    as the arithmetic.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        activation: str,
        out_gain: float,
        generator: torch.Generator | None,
        layer_norm: bool = False,
    ) -> None:
        """generator: None if the weights are loaded afterwards (or on the meta device).

        out_gain: gain of the last layer's weights. layer_norm: normalise every hidden layer before
        its activation function.
        """
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        self._layer_norm = layer_norm
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = nn.Parameter(torch.zeros(outputs, inputs))
            bias = nn.Parameter(torch.zeros(outputs))
            if generator is not None:
                gain = out_gain if i == len(sizes) - 2 else math.sqrt(2.0)
                nn.init.orthogonal_(weight, gain, generator=generator)
            self.register_parameter(f"weight{i}", weight)
            self.register_parameter(f"bias{i}", bias)
            if layer_norm and i < len(sizes) - 2:
                self.register_parameter(f"norm_weight{i}", nn.Parameter(torch.ones(outputs)))
                self.register_parameter(f"norm_bias{i}", nn.Parameter(torch.zeros(outputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., sizes[0]] -> [..., sizes[-1]]."""
        *hidden, weight, bias = cast(Iterable[torch.Tensor], self._parameters.values())
        if self._layer_norm:
            for i in range(0, len(hidden), 4):
                x = functional.linear(x, hidden[i], hidden[i + 1])
                x = functional.layer_norm(x, x.shape[-1:], hidden[i + 2], hidden[i + 3])
                x = self._activation(x)
        else:
            for i in range(0, len(hidden), 2):
                x = self._activation(functional.linear(x, hidden[i], hidden[i + 1]))
        return functional.linear(x, weight, bias)
