"""Batches drawn from an episode store: transitions, and subsets of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from etude.core.contracts import Array, ArraySpec, Observations

_ALIGNED = 64


class Transitions(NamedTuple):
    """Steps and what followed them; leading axes [num], or [subsets, steps] in `Subsets`."""

    obs: Observations
    actions: Array
    rewards: Array
    """float32, as the environment gave them: a reward source may relabel them later."""
    terminated: Array
    """bool: the value of the future is 0."""
    truncated: Array
    """bool: time ran out; the value of the future is V(next_obs)."""
    next_obs: Observations
    """What the step led to; where an episode ended, what it ended on and not the reset."""

    def folded(self, shape: tuple[int, ...]) -> Transitions:
        """The same with the leading axis [m] as `shape`."""
        return Transitions(*(_folded(arrays, shape) for arrays in self))

    def flat(self) -> Transitions:
        """The same with the leading axes [subsets, steps] as one."""
        return Transitions(*(_folded(arrays, (-1,), 2) for arrays in self))


class Subsets(NamedTuple):
    """Steps drawn from finished episodes."""

    steps: Transitions
    """Leading axes [subsets, steps]."""
    returns: Array
    """[subsets] float64: sums of the rewards of the whole episodes."""
    lengths: Array
    """[subsets] int64: steps of the whole episodes."""


def choose(generator: np.random.Generator, lengths: Array, num: int) -> Array:
    """`num` indices below each of `lengths` [subsets], without replacement where they suffice.

    Floyd's method: an exact uniform subset from `num` draws, whatever the length. Random keys and
    a partition would cost O(length), and draws with rejection get slow as `num` nears it. The
    loop in Python takes .1 us an index. The order within a subset means nothing.

    Returns [subsets, num] int64.
    """
    enough = lengths >= num
    bounds = np.where(
        enough[:, None], lengths[:, None] - num + 1 + np.arange(num), lengths[:, None]
    )
    drawn = generator.integers(0, bounds)
    chosen = drawn.tolist()
    for row in enough.nonzero()[0].tolist():
        taken: set[int] = set()
        low = int(lengths[row]) - num
        picks = chosen[row]
        for i, pick in enumerate(picks):
            if pick in taken:
                # The i-th draw is from low + i + 1 numbers, of which the last was not on offer
                # before: it stands in for one that is taken.
                picks[i] = pick = low + i
            taken.add(pick)
    return np.array(chosen, np.int64).reshape(drawn.shape)


class Columns:
    """Makes the arrays of a batch, {name: [m, ...]}, in one piece of memory.

    Each is at an address of 64 bytes: matrix kernels may round differently at others, and a batch
    drawn again has to give the same bits. One allocation, since a small batch would otherwise
    spend most of its time on them.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        self._fields = [(n, s.shape, np.dtype(s.dtype), s.num_bytes) for n, s in specs.items()]

    def fill(self, records: Array) -> dict[str, Array]:
        """The fields of `records` [m], each in an array of its own."""
        num, end, offsets = len(records), 0, []
        for *_, size in self._fields:
            offsets.append(end)
            end += -(-size * num // _ALIGNED) * _ALIGNED
        memory = torch.empty(end, dtype=torch.uint8).numpy()
        filled = {}
        for offset, (name, shape, dtype, _) in zip(offsets, self._fields, strict=True):
            out = filled[name] = np.ndarray((num, *shape), dtype, memory, offset)
            if dtype.kind == "b":
                np.not_equal(records[name], 0, out=out)
            else:
                out[...] = records[name]
        return filled


def _folded(arrays: Any, shape: tuple[int, ...], axes: int = 1) -> Any:
    """The first `axes` axes of every array as `shape`."""
    if isinstance(arrays, dict):
        return {name: _folded(array, shape, axes) for name, array in arrays.items()}
    return arrays.reshape(shape + arrays.shape[axes:])
