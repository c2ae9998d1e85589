"""The common base of all algorithms: the policy they train, and the gradient step.

A gradient step, top to bottom:

1. `in_shard_order`: the algorithm calls `backward()` on the loss of each of its shards in turn.
   Gradients are summed in shard order over all ranks, so that one process with all shards and
   several ranks that share them agree bit for bit.
2. `checked_norm`: a loss or gradient that is not finite raises `NonFinite`, which names the shard
   and the first bad value. No step has been taken then.
3. `clip`: a gradient that is too long is scaled down.
4. `step`: Adam updates the parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from etude.core.clock import Clock
from etude.core.contracts import Array, Broadcast, Observations
from etude.core.errors import NonFinite
from etude.core.ranks import ALONE, Ranks
from etude.core.trees import Tree, copy_arrays
from etude.models.networks import load_arrays
from etude.models.policies import BasePolicy, Features

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Finding = tuple[str, Mapping[str, Any]]
"""The non-finite value in a shard, "" without any; and its arrays, to reproduce the failure."""
BETA1, BETA2 = 0.9, 0.999
FUSED = getattr(torch, "_fused_adam_", None)
"""Torch's fused Adam, a private name; None if torch has none: public operations replace it."""


class PolicyAlgorithm:
    """Base of an `Algorithm` that trains one policy, which acts and is saved in `policy/`."""

    policy: BasePolicy
    device: torch.device

    def put(self, array: Array) -> torch.Tensor:
        """Copy an array to the learner's device."""
        return torch.from_numpy(array).to(self.device)

    def prepare(self, obs: Observations) -> Features:
        """Normalise the observations {name: [..., n]} that the policy reads."""
        return self.policy.prepare({name: self.put(obs[name]) for name in self.policy.observations})

    def broadcast(self, clock: Clock) -> Broadcast:
        state = {name: tensor.cpu() for name, tensor in self.policy.state_dict().items()}
        return Broadcast(clock.now.iterations, copy_arrays(state))

    def policy_parts(self) -> tuple[Tree, Tree]:
        return dict(self.policy.state_dict()), self.policy.contract()

    def load_policy(self, arrays: Tree) -> None:
        load_arrays(self.policy, arrays)

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """Start from another run's policy; a subclass may also take over training state."""
        self.load_policy(arrays)

    def retire(self, states: Sequence[Tree]) -> None:
        """Delete files that none of these states needs; by default there are none."""

    def close(self) -> None:
        """Close open files; by default there are none."""


class FlatParameters:
    """A module's parameters and gradients as views of two flat vectors.

    One norm, one optimizer call and (between machines) one message per gradient step,
    however many tensors the module has.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named = dict(module.named_parameters())
        # `torch.cat` and `zeros_like` on the meta device would load torch's compiler: seconds.
        self.data = next(iter(self.named.values())).new_empty(
            sum(p.numel() for p in self.named.values())
        )
        self.grad = self.data.new_zeros(self.data.shape)
        offset = 0
        for p in self.named.values():
            end = offset + p.numel()
            p.data = self.data[offset:end].view_as(p).copy_(p.detach())
            p.grad = self.grad[offset:end].view_as(p)
            offset = end

    @property
    def num_tensors(self) -> int:
        return len(self.named)

    def add_gradient(self, parts: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of all parameters, None for 0, to the flat one."""
        pairs = zip(parts, self.named.values(), strict=True)
        filled = [torch.zeros_like(p) if part is None else part for part, p in pairs]
        self.grad += torch.cat([part.reshape(-1) for part in filled])

    def first_bad_gradient(self) -> str | None:
        """The name of the first parameter whose gradient is not finite; None if all are."""
        for name, p in self.named.items():
            if p.grad is not None and not bool(p.grad.isfinite().all()):
                return name
        return None


class Adam:
    """Adam with one kernel call per step. Its state is three tensors.

    `torch.optim.Adam` gives the same bits (tested), but constructing it loads torch's compiler,
    which takes seconds in every command.
    """

    def __init__(self, data: torch.Tensor, grad: torch.Tensor, epsilon: float) -> None:
        """`data` [n] is changed in place by each step along `grad` [n]."""
        self.data, self._grad, self._epsilon = data, grad, epsilon
        self.mean = data.new_zeros(data.shape)
        self.square = data.new_zeros(data.shape)
        self.count = torch.zeros((), device=data.device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update `data` along the negative gradient."""
        self.count += 1
        if FUSED is None:
            self._step_by_public_operations(learning_rate)
            return
        FUSED(
            [self.data],
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
        """The same step to within rounding; slower, in several kernels."""
        self.mean.lerp_(self._grad, 1.0 - BETA1)
        self.square.mul_(BETA2).addcmul_(self._grad, self._grad, value=1.0 - BETA2)
        count = self.count.double()
        spread = (self.square.sqrt() / (1.0 - BETA2**count).sqrt()).add_(self._epsilon)
        self.data.sub_(self.mean / spread * (learning_rate / (1.0 - BETA1**count)))

    def tensors(self) -> list[torch.Tensor]:
        """Everything that `step` changes."""
        return [self.data, self.mean, self.square, self.count]

    def state_dict(self) -> Tree:
        return {"mean": self.mean, "square": self.square, "count": self.count}

    def load_state_dict(self, state: Tree) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(torch.as_tensor(state[name]))


class NetworkOptimizer(Adam):
    """Sum a network's gradient over shards, check and clip it, and step Adam."""

    def __init__(self, name: str, module: nn.Module, epsilon: float, ranks: Ranks = ALONE) -> None:
        """name: of the network, for errors. ranks: the gradient is summed over all their shards."""
        self.name, self.ranks = name, ranks
        self.flat, self.norm = FlatParameters(module), 0.0
        super().__init__(self.flat.data, self.flat.grad, epsilon)

    def in_shard_order(self, shards: Sequence[T], *totals: torch.Tensor) -> Iterator[T]:
        """Yield this rank's shards; the caller adds each one's part to the gradient and `totals`.

        The gradient (by `backward`) and `totals` are zeroed before. After the last shard they are
        the sums over the shards of all ranks, in shard order.
        """
        return self.ranks.ordered_sum((self.flat.grad, *totals), shards)

    def gradient(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean [] of the shards' losses []; its gradient, not checked, is in `flat.grad`."""
        trained = {name: p for name, p in self.flat.named.items() if p.requires_grad}
        for loss in self.in_shard_order(losses):
            # A loss may pass through other networks, which this gradient leaves alone.
            found = torch.autograd.grad(loss / len(losses), [*trained.values()], allow_unused=True)
            parts = dict(zip(trained, found, strict=True))
            self.flat.add_gradient([parts.get(name) for name in self.flat.named])
        return torch.stack([loss.detach() for loss in losses]).mean()

    def mean_gradient(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean [] of the shards' losses []; its checked gradient is in `flat.grad`."""
        mean = self.gradient(losses)
        what = f"the loss of the {self.name}"
        self.norm = self.checked_norm(
            float(mean), losses, lambda loss: ("" if bool(loss.isfinite()) else what, {})
        )
        return mean

    def checked_norm(
        self, loss: float, shards: Sequence[T], inspect: Callable[[T], Finding]
    ) -> float:
        """The norm of the gradient. Raise `NonFinite` if it or `loss` is not finite.

        `inspect` then finds what is not finite in each shard; it may overwrite the gradient.
        """
        norm = float(self.flat.grad.norm())
        if math.isfinite(loss) and math.isfinite(norm):
            return norm
        gradient = self.bad_gradient() or f"the norm of the gradient of the {self.name}"
        arrays: dict[str, Any] = {}
        findings = self.ranks.gather([inspect(shard) for shard in shards])
        for s, (what, found) in enumerate(findings):
            arrays |= {f"shard{s}_{name}": array for name, array in found.items()}
            if what:
                owner = self.ranks.owner(s, len(findings))
                raise NonFinite(f"{what} (shard {s}{owner})", arrays)
        raise NonFinite(gradient, arrays)

    def bad_gradient(self) -> str:
        """Describe the first parameter whose gradient is not finite; "" if all are."""
        parameter = self.flat.first_bad_gradient()
        return f"the gradient of '{parameter}' of the {self.name}" if parameter else ""

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale a gradient of norm `norm` to at most `max_norm`."""
        if norm > max_norm:
            self.flat.grad.mul_(max_norm / (norm + 1e-6))


class TargetNetwork(Generic[M]):
    """A copy of a network that follows it by Polyak averaging, on one flat vector."""

    def __init__(self, module: M) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.data = FlatParameters(self.module).data

    def follow(self, data: torch.Tensor, tau: float) -> None:
        """Move by the fraction `tau` towards the network's parameters `data` [n]."""
        self.data.lerp_(data, tau)


class AdaptiveRate:
    """A learning rate that adapts to the KL divergence of updates (rsl_rl's adaptive schedule)."""

    factor, bounds = 1.5, (1e-5, 1e-2)

    def __init__(self, start: float, desired_kl: float | None) -> None:
        """desired_kl: None for a rate that is not adapted; it has no state."""
        self.rate, self.desired_kl = start, desired_kl

    def after(self, kl: float) -> float:
        """The rate of the next step: lower if the KL divergence was more than twice the desired
        one, higher if it was less than half of it."""
        desired = self.desired_kl or math.inf
        if kl > 2.0 * desired:
            self.rate = max(self.rate / self.factor, self.bounds[0])
        elif kl < 0.5 * desired:
            self.rate = min(self.rate * self.factor, self.bounds[1])
        return self.rate

    def state_dict(self) -> Tree:
        return {} if self.desired_kl is None else {"learning_rate": self.rate}

    def load_state_dict(self, state: Tree) -> None:
        self.rate = float(state.get("learning_rate", self.rate))
