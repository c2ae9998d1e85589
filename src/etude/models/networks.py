"""Networks, and their parameters as one flat vector."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


def mlp(
    sizes: tuple[int, ...], activation: str, out_gain: float, generator: torch.Generator | None
) -> nn.Sequential:
    """Linear layers `sizes[0] -> ... -> sizes[-1]`, orthogonal, the last one with its own gain."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        linear = nn.Linear(inputs, outputs)
        # Without a generator the weights are about to be loaded (or live on the meta device).
        if generator is not None:
            gain = out_gain if last else math.sqrt(2.0)
            nn.init.orthogonal_(linear.weight, gain, generator=generator)
            nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


class FlatParameters:
    """A module's parameters and gradients as views of two flat vectors.

    One norm, one optimizer call and (between machines) one message per gradient step,
    however many tensors the module has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._named = dict(module.named_parameters())
        parameters = list(self._named.values())
        self.num_tensors = len(parameters)
        self.data = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.grad = torch.zeros_like(self.data)
        offset = 0
        for p in parameters:
            end = offset + p.numel()
            p.data = self.data[offset:end].view_as(p)
            p.grad = self.grad[offset:end].view_as(p)
            offset = end

    def first_bad_gradient(self) -> str | None:
        """The name of the first parameter whose gradient is not finite."""
        for name, p in self._named.items():
            if p.grad is not None and not bool(p.grad.isfinite().all()):
                return name
        return None
