"""One shard of a rollout as tensors, and the minibatches that are drawn from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from etude.core.contracts import Array
from etude.core.keys import Key
from etude.models.actor_critic import Memory
from etude.models.policies import Features

FLOOR = 1e-6
"""Added to every priority: no segment ever has probability zero."""


class Draw(NamedTuple):
    """The minibatches of one pass over a shard."""

    segments: Array
    """[minibatches, size] int64."""
    weights: Array | None
    """[minibatches, size] float32, what a segment's loss counts; None where all count the same."""


def permuted(generator: np.random.Generator, num_segments: int, minibatches: int) -> Draw:
    """Every segment exactly once."""
    return Draw(generator.permutation(num_segments).reshape(minibatches, -1), None)


def probabilities(priorities: Array, alpha: float) -> Array:
    """[segments] float64, summing to 1: proportional to priority^alpha, none of them zero.

    priorities: [segments], how much there is to learn from each, such as its sum of |advantage|.
    """
    raised: Array = np.asarray(priorities, np.float64) ** alpha + FLOOR
    p: Array = raised / raised.sum()
    return p


def prioritised(
    generator: np.random.Generator, p: Array, minibatches: int, size: int, beta: float
) -> Draw:
    """Minibatches drawn one by one with probabilities `p` [segments].

    Inside a minibatch no segment comes twice; another minibatch may draw it again, or none. With
    beta 1 the weights (n p)^-beta take the preference out of the gradient's expectation again, as
    far as a minibatch is small beside the shard; with less they leave some of it in.

    The `size` smallest of exponential noise / p are such a draw without replacement: a race
    in which each segment is as fast as it is probable.
    """
    segments: Array = np.empty((minibatches, size), np.int64)
    for drawn in segments:
        finish = generator.standard_exponential(len(p))
        finish /= p
        # In the order of memory: the draw is a set, and reading it forwards is faster.
        drawn[:] = np.sort(np.argpartition(finish, size - 1)[:size])
    weights = (len(p) * p[segments]) ** -beta
    return Draw(segments, weights.astype(np.float32))


class Minibatch(NamedTuple):
    """A shard's part of one gradient."""

    segments: torch.Tensor
    """[m] int64."""
    weights: torch.Tensor | None
    """[m] importance weights of prioritised draws; None where all are 1."""


@dataclass
class Shard:
    """Segments [n, horizon, ...] of a rollout, with what held before the update's first step."""

    features: Features
    memory: Memory | None
    """None for a memoryless policy."""
    actions: torch.Tensor
    log_probs: torch.Tensor
    """[n, horizon] under the proximal policy: the weights at the start of the update."""
    importance: torch.Tensor | None
    """[n, horizon] at most 1: the proximal policy's probability of an action, over that of the
    older policy that collected it; None where the two are the same."""
    behaviour_kl: float
    """Mean KL divergence between those two policies."""
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    present: torch.Tensor
    """[n, horizon] bool: the step is an agent's."""
    all_present: bool
    priorities: Array | None
    """[n] sum of |advantage| over a segment's steps, before advantages are normalised; None where
    segments are drawn uniformly."""
    weights: torch.Tensor | None = None
    """[n, horizon] each step's weight in the loss, 1 on average over the buffer; None where all
    are 1."""
    drawn: Array = field(init=False)
    """[n] bool: the segments that were in a minibatch of this iteration."""

    def __post_init__(self) -> None:
        self.drawn = np.zeros(len(self.values), np.bool_)

    def masked(self, x: torch.Tensor) -> torch.Tensor:
        """[k]: the steps of x [n, horizon] that are an agent's, in order."""
        return x.flatten() if self.all_present else x[self.present]

    def draw(self, key: Key, minibatches: int, size: int, alpha: float, beta: float) -> Draw:
        """One pass over this shard in minibatches of `size` segments.

        alpha, beta: exponents of the priorities and of their importance weights, if there are any.
        """
        generator = key.generator()
        if self.priorities is None:
            return permuted(generator, len(self.advantages), minibatches)
        p = probabilities(self.priorities, alpha)
        return prioritised(generator, p, minibatches, size, beta)

    def minibatch(self, draw: Draw, index: int) -> Minibatch:
        """One minibatch of a draw, on the shard's device."""
        segments, device = draw.segments[index], self.advantages.device
        self.drawn[segments] = True
        weights = None if draw.weights is None else torch.from_numpy(draw.weights[index]).to(device)
        return Minibatch(torch.from_numpy(segments).to(device), weights)

    def step_weights(self, minibatch: Minibatch) -> torch.Tensor | None:
        """[m, horizon] or [m, 1]: each step's weight in the loss; None where all are 1."""
        weights = None if self.weights is None else self.weights.index_select(0, minibatch.segments)
        if minibatch.weights is None:
            return weights
        drawn = minibatch.weights.unsqueeze(1)
        return drawn if weights is None else weights * drawn

    def arrays(self, minibatch: Minibatch) -> dict[str, torch.Tensor]:
        """The minibatch's part of all tensors, to reproduce a failure with."""
        named = {**vars(self)} | {f"features_{name}": x for name, x in self.features.items()}
        if self.memory is not None:
            named |= {f"state_{name}": x for name, x in self.memory.state.items()}
            named["starts"] = self.memory.starts
        tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        return {name: x.index_select(0, minibatch.segments) for name, x in tensors.items()}
