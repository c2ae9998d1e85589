"""Statistics of scores over seeds, with bootstrap intervals, as Agarwal et al. (2021) propose.

Scores are arrays [..., num_runs, num_tasks]. The bootstrap draws runs with replacement for each
task separately (stratified); intervals are percentiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]

DRAWS = 50_000
"""Bootstrap samples per interval."""
CONFIDENCE = 0.95
_BLOCK = 1 << 21
"""Numbers drawn at once, a bound on memory."""


class Estimate(NamedTuple):
    """A statistic and its confidence interval."""

    value: float
    low: float
    high: float


def iqm(scores: Scores) -> Any:
    """Interquartile mean over runs and tasks, [...]: cuts off a quarter of the scores, rounded
    down, at either end."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def mean(scores: Scores) -> Any:
    """The mean over runs and tasks, [...]."""
    return scores.mean(axis=(-2, -1))


def probability_of_improvement(x: Scores, y: Scores) -> Any:
    """Probability that a run of x scores higher than one of y on the same task, mean over tasks,
    [...]. Equal scores count half."""
    ours, theirs = x[..., :, None, :], y[..., None, :, :]
    return ((ours > theirs) + 0.5 * (ours == theirs)).mean(axis=(-3, -2, -1))


def estimate(
    statistic: Callable[..., Any], *samples: Scores, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """A statistic of samples [num_runs, num_tasks] with its interval; samples are drawn
    independently. The same seed gives the same interval."""
    generator = np.random.default_rng(seed)
    pairs = float(np.prod([sample.shape[0] for sample in samples])) * samples[0].shape[1]
    block = max(int(_BLOCK / max(pairs, 1.0)), 1)
    found = []
    for start in range(0, draws, block):
        count = min(block, draws - start)
        drawn = [_drawn(generator, sample, count) for sample in samples]
        found.append(statistic(*drawn))
    low, high = percentiles(np.concatenate(found))
    return Estimate(float(statistic(*samples)), float(low), float(high))


def band(values: Scores, draws: int = 2000, seed: int = 0) -> tuple[Scores, Scores, Scores]:
    """(interquartile mean, low, high), each [num_points], of curves [num_runs, num_points]."""
    runs, points = values.shape
    index = np.random.default_rng(seed).integers(0, runs, (draws, runs))
    edges = np.array([percentiles(iqm(values[index, k][..., None])) for k in range(points)])
    return iqm(values.T[..., None]), edges[:, 0], edges[:, 1]


def percentiles(values: Scores) -> Scores:
    """Low and high end of the interval with `CONFIDENCE` of the values, [2]."""
    outside = 50.0 * (1.0 - CONFIDENCE)
    ends: Scores = np.percentile(values, [outside, 100.0 - outside])
    return ends


def _drawn(generator: np.random.Generator, sample: Scores, count: int) -> Scores:
    runs, tasks = sample.shape
    index = generator.integers(0, runs, (count, runs, tasks))
    return sample[index, np.arange(tasks)]
