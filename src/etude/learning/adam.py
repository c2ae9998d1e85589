"""Adam over one flat vector, by torch's fused kernel where this version of torch has it."""

from __future__ import annotations

import math

import torch

from etude.core.trees import Tree

BETA1, BETA2 = 0.9, 0.999
FUSED = getattr(torch, "_fused_adam_", None)
"""Torch's kernel, whose name is private; None where there is none, and public operations do it."""


class Adam:
    """One kernel call per step, and state that is plainly three tensors.

    `torch.optim.Adam` gives the same bits (a test holds it to that), but constructing it loads
    torch's compiler, which costs every command seconds.
    """

    def __init__(self, data: torch.Tensor, grad: torch.Tensor, epsilon: float) -> None:
        """`data` [n] is changed in place by each step along `grad` [n]."""
        self._data, self._grad, self._epsilon = data, grad, epsilon
        self.mean = torch.zeros_like(data)
        self.square = torch.zeros_like(data)
        self.count = torch.zeros((), device=data.device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Moves `data` against the gradient."""
        self.count += 1
        if FUSED is None:
            self._step_by_public_operations(learning_rate)
            return
        FUSED(
            [self._data],
            [self._grad],
            [self.mean],
            [self.square],
            [],
            [self.count],
            lr=learning_rate,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
        )

    def _step_by_public_operations(self, learning_rate: float) -> None:
        """The same step to within rounding; slower, since it is several kernels."""
        self.mean.lerp_(self._grad, 1.0 - BETA1)
        self.square.mul_(BETA2).addcmul_(self._grad, self._grad, value=1.0 - BETA2)
        count = float(self.count)
        spread = (self.square.sqrt() / math.sqrt(1.0 - BETA2**count)).add_(self._epsilon)
        self._data.addcdiv_(self.mean, spread, value=-learning_rate / (1.0 - BETA1**count))

    def state_dict(self) -> Tree:
        return {"mean": self.mean, "square": self.square, "count": self.count}

    def load_state_dict(self, state: Tree) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(torch.as_tensor(state[name]))
