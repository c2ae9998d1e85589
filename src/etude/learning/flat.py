"""A network's parameters as one flat vector, and target networks that follow it."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


class FlatParameters:
    """A module's parameters and gradients as views of two flat vectors.

    One norm, one optimizer call and (between machines) one message per gradient step,
    however many tensors the module has.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named = dict(module.named_parameters())
        self.data = torch.cat([p.detach().reshape(-1) for p in self.named.values()])
        self.grad = torch.zeros_like(self.data)
        offset = 0
        for p in self.named.values():
            end = offset + p.numel()
            p.data = self.data[offset:end].view_as(p)
            p.grad = self.grad[offset:end].view_as(p)
            offset = end

    @property
    def num_tensors(self) -> int:
        return len(self.named)

    def first_bad_gradient(self) -> str | None:
        """The name of the first parameter whose gradient is not finite."""
        for name, p in self.named.items():
            if p.grad is not None and not bool(p.grad.isfinite().all()):
                return name
        return None


class TargetNetwork(Generic[M]):
    """A copy of a network that follows it slowly, its parameters one vector like the other's."""

    def __init__(self, module: M) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.data = FlatParameters(self.module).data

    def follow(self, data: torch.Tensor, share: float) -> None:
        """Moves `share` of the way to the network's parameters `data` [n] (Polyak averaging)."""
        self.data.lerp_(data, share)
