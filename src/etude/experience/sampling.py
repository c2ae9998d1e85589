"""Which segments a minibatch is made of: a permutation, or draws in favour of the surprising."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from etude.core.contracts import Array

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
