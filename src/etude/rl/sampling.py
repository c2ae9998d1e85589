"""Which replayed transitions a gradient step learns from.

Off-policy, a gradient step is  sample -> relabel -> target -> loss.  A sampler draws transitions
from one shard's replay, a reward source relabels their rewards (`rl/rewards/given.py`),
`td_targets` (`data/returns.py`) makes targets of them, and the algorithm the loss. Each knows
nothing of the others, so that a mixture of replays, priorities or longer returns are one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from etude.core.contracts import Array, Observations
from etude.core.keys import Key
from etude.data.store.episodes import EpisodeStore, Transitions
from etude.data.store.views import EpisodesOf
from etude.models.normalise import moments
from etude.models.policies import BasePolicy

T = TypeVar("T")
Experience = EpisodeStore | EpisodesOf
"""What is sampled from: a shard's replay, or episodes of a dataset."""


class Sample(NamedTuple):
    """Transitions as they were stored, and what a sampler knows of them."""

    steps: Transitions
    returns: Array | None = None
    """[n] float64: the return of each transition's episode; None where it is not known."""
    weights: Array | None = None
    """[n] float32: importance weights in the critics' loss; None where all are 1."""


Sampler = Callable[[Experience, np.random.Generator, int], Sample]
"""Draws so many transitions from one shard's experience."""


def uniform(store: Experience, generator: np.random.Generator, size: int) -> Sample:
    """All transitions alike, with replacement."""
    return Sample(store.sample_transitions(generator, size))


def finished(store: Experience, generator: np.random.Generator, size: int) -> Sample:
    """The transitions of finished episodes alike, with replacement."""
    drawn = store.sample_subsets(generator, size, 1)
    return Sample(drawn.steps.flat(), drawn.returns)


def mixture(first: Sampler, second: Sampler, share: float) -> Sampler:
    """The part `share` of each draw (rounded down) from the first sampler, the rest from another.

    Either both samplers know returns and weights, or neither does.
    """

    def sample(store: Experience, generator: np.random.Generator, size: int) -> Sample:
        num = int(size * share)
        one, two = first(store, generator, num), second(store, generator, size - num)
        steps = type(one.steps)(*map(_joined, one.steps, two.steps))
        return Sample(steps, *map(_joined, one[1:], two[1:]))

    return sample


def _joined(first: Any, second: Any) -> Any:
    """Arrays, or dicts of arrays, one after the other; what only one of two dicts has is left out.
    None where neither is known."""
    if first is None and second is None:
        return None
    if isinstance(first, dict):
        both = [name for name in first if name in second]
        return {name: np.concatenate((first[name], second[name])) for name in both}
    return np.concatenate((first, second))


def ahead(items: Iterator[T], wanted: bool = True) -> Iterator[T]:
    """The items of an iterator, each made in a thread while the one before it is used.

    They are the same in the same order: whatever randomness they draw must be theirs alone. Without
    `wanted` each is made when it is asked for.
    """
    if not wanted:
        yield from items
        return
    end = object()
    with ThreadPoolExecutor(1, "ahead") as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]


class Batch(NamedTuple):
    """Sampled transitions as tensors on the learner's device, observations raw."""

    obs: dict[str, torch.Tensor]
    """{name: [n, ...]}."""
    actions: torch.Tensor
    """[n, dims]."""
    rewards: torch.Tensor
    """[n] float32: as they were stored, until a reward source relabels them."""
    terminated: torch.Tensor
    """[n] bool: the value of the future is 0. A truncated step's is that of `next_obs`."""
    next_obs: dict[str, torch.Tensor]
    """{name: [n, ...]}: what the step led to, before any reset."""
    returns: torch.Tensor | None = None
    """As in `Sample`, and so are the weights."""
    weights: torch.Tensor | None = None

    @classmethod
    def of(cls, sample: Sample, device: torch.device) -> Batch:
        def put(array: Array) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        def named(arrays: Observations) -> dict[str, torch.Tensor]:
            return {name: put(array) for name, array in arrays.items()}

        steps, *known = sample
        return cls(
            named(steps.obs),
            put(steps.actions),
            put(steps.rewards),
            put(steps.terminated),
            named(steps.next_obs),
            *(None if array is None else put(array) for array in known),
        )


NORMALISED_BY = 16_384
"""Steps of a dataset that are drawn for the normaliser; the mean of a column is then known to
.8 % of its spread."""


def fit_normaliser(
    policy: BasePolicy, stores: Sequence[EpisodesOf], at_a_time: int, key: Key
) -> None:
    """Normalise by a sample of the dataset; an earlier run's policy keeps its statistics."""
    if any(float(n.count) for n in policy.normalisers.values()):  # type: ignore[arg-type]
        return
    for s, store in enumerate(stores):
        generator, left = key.child(s).generator(), NORMALISED_BY // len(stores)
        while left > 0:
            num = min(left, at_a_time)
            obs = store.sample_observations(generator, num, [*policy.normalisers])
            policy.absorb({name: moments(obs[name]) for name in policy.normalisers})
            left -= num
