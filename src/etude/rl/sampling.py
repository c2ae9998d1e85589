"""Sampling of transitions from a replay or a dataset.

Off-policy, a gradient step is  sample -> relabel -> target -> loss.  A sampler draws transitions
from one shard's replay, a reward source relabels their rewards (`rl/rewards/given.py`),
`td_targets` (`data/returns.py`) computes targets, and the algorithm the loss. They are independent:
a mixture of replays or prioritised sampling changes the sampler only.
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
from etude.models.networks import moments
from etude.models.policies import BasePolicy

T = TypeVar("T")
Experience = EpisodeStore | EpisodesOf
"""The source of transitions: a shard's replay, or episodes of a dataset."""


class Sample(NamedTuple):
    """Sampled transitions as they were stored, with what a sampler adds."""

    steps: Transitions
    returns: Array | None = None
    """[n] float64: the return of each transition's episode; None if it is not known."""
    weights: Array | None = None
    """[n] float32: importance weights in the critics' loss; None if all are 1."""
    discounts: Array | None = None
    """[n] float32: discount factors of the next values; None if all are gamma."""


Sampler = Callable[[Experience, np.random.Generator, int], Sample]
"""Samples a number of transitions from one shard's experience."""


def uniform(store: Experience, generator: np.random.Generator, size: int) -> Sample:
    """Sample uniformly from all transitions, with replacement."""
    return Sample(store.sample_transitions(generator, size))


def multi_step(num_steps: int, gamma: float) -> Sampler:
    """Sample like `uniform`, with sums of the discounted rewards of up to `num_steps` steps.

    The sum ends with its episode, or at the newest step. With k steps, `terminated` and
    `next_obs` are those of the k-th, whose discount is gamma^k.
    """
    powers = gamma ** np.arange(num_steps + 1)

    def sample(store: Experience, generator: np.random.Generator, size: int) -> Sample:
        steps, rewards, counts = store.sample_multi_step(generator, size, num_steps)
        sums = (rewards * powers[:-1]).sum(1).astype(np.float32)
        discounts = powers[counts].astype(np.float32)
        return Sample(steps._replace(rewards=sums), discounts=discounts)

    return sample


def finished(store: Experience, generator: np.random.Generator, size: int) -> Sample:
    """Sample uniformly from the transitions of finished episodes, with replacement."""
    drawn = store.sample_subsets(generator, size, 1)
    return Sample(drawn.steps.flat(), drawn.returns)


def mixture(first: Sampler, second: Sampler, share: float) -> Sampler:
    """Take the fraction `share` of each sample (rounded down) from `first`, the rest from `second`.

    Returns, weights and discounts must be known to both samplers or to neither.
    """

    def sample(store: Experience, generator: np.random.Generator, size: int) -> Sample:
        num = int(size * share)
        one, two = first(store, generator, num), second(store, generator, size - num)
        steps = type(one.steps)(*map(_joined, one.steps, two.steps))
        return Sample(steps, *map(_joined, one[1:], two[1:]))

    return sample


def _joined(first: Any, second: Any) -> Any:
    """Concatenate arrays, or dicts of arrays by their common names; None if both are None."""
    if first is None and second is None:
        return None
    if isinstance(first, dict):
        both = [name for name in first if name in second]
        return {name: np.concatenate((first[name], second[name])) for name in both}
    return np.concatenate((first, second))


def ahead(items: Iterator[T], wanted: bool = True) -> Iterator[T]:
    """Compute each item of an iterator in a thread while the one before it is used.

    Items and order do not change, as long as nothing else uses the iterator's random generators.
    Without `wanted` each item is computed on demand.
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
    """[n] float32: as stored, until a reward source relabels them."""
    terminated: torch.Tensor
    """[n] bool: the next state has value 0. After truncation its value is that of `next_obs`."""
    next_obs: dict[str, torch.Tensor]
    """{name: [n, ...]}: observations after the step, before any reset."""
    returns: torch.Tensor | None = None
    """As in `Sample`, like the weights."""
    weights: torch.Tensor | None = None
    discounts: torch.Tensor | None = None

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
"""Steps of a dataset that are sampled for the normaliser: the standard error of a mean is .8 % of
the standard deviation."""


def fit_normaliser(
    policy: BasePolicy, stores: Sequence[EpisodesOf], at_a_time: int, key: Key
) -> None:
    """Fit the normaliser to a sample of the dataset, unless it has statistics of an earlier run."""
    if any(float(n.count) for n in policy.normalisers.values()):  # type: ignore[arg-type]
        return
    for s, store in enumerate(stores):
        generator, left = key.child(s).generator(), NORMALISED_BY // len(stores)
        while left > 0:
            num = min(left, at_a_time)
            obs = store.sample_observations(generator, num, [*policy.normalisers])
            policy.absorb({name: moments(obs[name]) for name in policy.normalisers})
            left -= num
