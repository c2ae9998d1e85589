"""A policy network: an ordinary `nn.Module` from [..., inputs] to [..., outputs]."""

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from etude.plugin import ModulePolicyConfig


class ResidualNetwork(nn.Module):
    """Layers that add to what they are given: x + f(x)."""

    def __init__(self, num_inputs: int, num_outputs: int, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(num_inputs, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, num_outputs)
        nn.init.zeros_(self.last.weight)  # at first every action has mean 0, every state value 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.last(x)
        return x


class ResidualConfig(ModulePolicyConfig):
    """Residual networks as actor and as critic."""

    kind: Literal["residual"] = "residual"
    width: int = Field(32, ge=1, description="Units of each layer.")
    blocks: int = Field(2, ge=1, description="Residual layers.")

    def network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        return ResidualNetwork(num_inputs, num_outputs, self.width, self.blocks)
