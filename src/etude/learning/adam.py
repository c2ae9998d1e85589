"""Adam over one flat vector, by torch's own fused kernel."""

from __future__ import annotations

import torch

from etude.core.trees import Tree


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

    def step(self, learning_rate: float) -> None:
        """Move `data` against the gradient."""
        self.count += 1
        with torch.no_grad():
            torch._fused_adam_(
                [self._data],
                [self._grad],
                [self.mean],
                [self.square],
                [],
                [self.count],
                lr=learning_rate,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=self._epsilon,
                amsgrad=False,
                maximize=False,
            )

    def state_dict(self) -> Tree:
        return {"mean": self.mean, "square": self.square, "count": self.count}

    def load_state_dict(self, state: Tree) -> None:
        for name, own in self.state_dict().items():
            own.copy_(torch.as_tensor(state[name]))
