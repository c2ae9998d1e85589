"""The gradient step that all algorithms share.

1. `in_shard_order`: the algorithm calls `backward()` on the loss of each of its shards in turn.
   Gradients are added up in shard order over all ranks, so that one process with all shards and
   several ranks that share them agree bit for bit.
2. `checked_norm`: a loss or gradient that is not finite raises `NonFinite`, which names the shard
   and what in it is not finite. Nothing has been applied then.
3. `clip`: a gradient that is too long is shortened.
4. `step`: Adam moves the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from etude.core.errors import NonFinite
from etude.core.ranks import ALONE, Ranks
from etude.learning.adam import Adam
from etude.learning.flat import FlatParameters

T = TypeVar("T")
Finding = tuple[str, Mapping[str, Any]]
"""What of a shard is not finite, "" for nothing; and the shard's arrays, to reproduce it with."""


class NetworkOptimizer(Adam):
    """Sums a network's gradient over shards, checks and clips it, and steps Adam."""

    def __init__(self, name: str, module: nn.Module, epsilon: float, ranks: Ranks = ALONE) -> None:
        """name: what errors call the network. The shards of all `ranks` are summed over."""
        self.name, self.ranks = name, ranks
        self.flat = FlatParameters(module)
        super().__init__(self.flat.data, self.flat.grad, epsilon)

    def in_shard_order(self, shards: Sequence[T], *totals: torch.Tensor) -> Iterator[T]:
        """Yields this rank's shards; the caller adds each one's part to the gradient and `totals`.

        The gradient (by `backward`) and `totals` are zeroed before. After the last shard they are
        the sums over the shards of all ranks, in shard order.
        """
        return self.ranks.ordered_sum((self.flat.grad, *totals), shards)

    def mean_gradient(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean [] of the shards' losses [], whose gradient is left in `flat.grad`, checked."""
        parameters = list(self.flat.named.values())
        for loss in self.in_shard_order(losses):
            # Only towards these parameters: a loss may pass through networks that stay as they are.
            (loss / len(losses)).backward(inputs=parameters)  # type: ignore[no-untyped-call]
        mean = torch.stack([loss.detach() for loss in losses]).mean()
        what = f"the loss of the {self.name}"
        self.checked_norm(
            float(mean), losses, lambda loss: ("" if bool(loss.isfinite()) else what, {})
        )
        return mean

    def checked_norm(
        self, loss: float, shards: Sequence[T], inspect: Callable[[T], Finding]
    ) -> float:
        """The gradient's norm. Raises `NonFinite` where it or `loss` is not finite.

        `inspect` then looks at each of the shards; it may overwrite the gradient.
        """
        norm = float(self.flat.grad.norm())
        if math.isfinite(loss) and math.isfinite(norm):
            return norm
        gradient = self.bad_gradient() or f"the norm of the gradient of the {self.name}"
        arrays: dict[str, Any] = {}
        findings = self.ranks.gather([inspect(shard) for shard in shards])
        for s, (what, own) in enumerate(findings):
            arrays |= {f"shard{s}_{name}": array for name, array in own.items()}
            if what:
                owner = self.ranks.owner(s, len(findings))
                raise NonFinite(f"{what} (shard {s}{owner})", arrays)
        raise NonFinite(gradient, arrays)

    def bad_gradient(self) -> str:
        """Names the first parameter whose gradient is not finite; "" where all are."""
        parameter = self.flat.first_bad_gradient()
        return f"the gradient of '{parameter}' of the {self.name}" if parameter else ""

    def clip(self, norm: float, max_norm: float) -> None:
        """Scales a gradient of length `norm` to at most `max_norm`."""
        if norm > max_norm:
            self.flat.grad.mul_(max_norm / (norm + 1e-6))
