"""Statistics over seeds: by hand, and against what rliable gives for the same scores."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from etude.compare.comparison import (
    band,
    estimate,
    improvement,
    iqm,
    mean,
    percentiles,
    permutation_test,
    probability_of_improvement,
)
from etude.core.intervals import wilson_of

EXPECTED = json.loads((Path(__file__).parent / "rliable" / "expected.json").read_text())


def column(*scores: float) -> np.ndarray:
    return np.array(scores)[:, None]


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end() -> None:
    assert iqm(column(0, 10, 20, 90)) == 15.0
    assert iqm(column(100, 3, 1, 2, -50)) == 2.0  # a quarter of five is one
    assert iqm(column(1, 2, 6)) == 3.0  # a quarter of three is none
    assert iqm(np.array([[0.0, 4.0], [8.0, 100.0]])) == 6.0  # over tasks and runs alike


def test_equal_scores_count_half() -> None:
    assert probability_of_improvement(column(1, 3), column(1, 2)) == (0.5 + 0 + 1 + 1) / 4
    assert probability_of_improvement(column(5), column(1, 2, 3)) == 1.0
    two = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    assert probability_of_improvement(*two) == 0.5  # better in one task, worse in the other


@pytest.mark.parametrize(
    ("runs", "low", "p"),
    [
        (1, 0.2065, 1.0),
        (3, 0.4385, 0.1),
        (4, 0.5101, 2 / 70),
        (5, 0.5655, 2 / 252),
        (10, 0.7225, 2 / 184_756),
    ],
)
def test_groups_that_do_not_overlap_have_the_smallest_p(runs: int, low: float, p: float) -> None:
    """Wilson's low end of n in n is n / (n + z^2), and 2 of all permutations are as far apart."""
    found = improvement(np.arange(runs)[:, None] + 100.0, np.arange(runs)[:, None] + 0.0)
    assert found == pytest.approx((1.0, low, 1.0, p, p), abs=5e-5)
    turned = improvement(np.arange(runs)[:, None] + 0.0, np.arange(runs)[:, None] + 100.0)
    assert turned == pytest.approx((0.0, 0.0, 1.0 - low, p, p), abs=5e-5)


@pytest.mark.parametrize("sizes", [(1, 4), (3, 3), (2, 5), (4, 4)])
def test_p_is_the_share_of_permutations_at_least_as_far_apart(sizes: tuple[int, int]) -> None:
    """Also of equal scores, which success rates often are."""
    rng, (n, m) = np.random.default_rng(0), sizes
    for _ in range(20):
        both = rng.integers(0, 4, n + m).astype(float)

        def distance(chosen: tuple[int, ...], both: np.ndarray = both) -> float:
            x, y = both[list(chosen)], np.delete(both, chosen)
            return abs(float(probability_of_improvement(x[:, None], y[:, None])) - 0.5)

        found = [distance(c) for c in itertools.combinations(range(n + m), n)]
        p = np.mean([each >= found[0] - 1e-9 for each in found])
        assert permutation_test(both[:n], both[n:]) == pytest.approx(p)


@pytest.mark.parametrize("runs", [3, 5])
@pytest.mark.parametrize("truth", [0.5, 0.75, 0.9])
@pytest.mark.parametrize(
    ("shape", "least"), [("normal", 0.95), ("apart", 0.94), ("all or nothing", 0.88)]
)
def test_the_interval_of_few_runs_holds_the_truth(
    runs: int, truth: float, shape: str, least: float
) -> None:
    """In about 95 % of experiments; the bootstrap's interval in far fewer."""
    rng, trials = np.random.default_rng(3), 1500
    shift = NormalDist().inv_cdf(truth)
    y = rng.normal(size=(trials, runs))
    if shape == "normal":  # both groups scatter alike
        x = rng.normal(shift * math.sqrt(2), 1.0, (trials, runs))
    elif shape == "apart":  # the scores of one scatter twice as widely
        x = rng.normal(shift * math.sqrt(5), 2.0, (trials, runs))
    else:  # one either fails or succeeds
        x = np.where(rng.random((trials, runs)) < truth, 10.0, -10.0)
    values = probability_of_improvement(x[..., None], y[..., None])
    ends = {value: wilson_of(float(value), runs) for value in np.unique(values)}
    held = np.mean([ends[v][0] - 1e-9 <= truth <= ends[v][1] + 1e-9 for v in values])
    assert held >= least - 0.02
    one = improvement(x[0][:, None], y[0][:, None])
    assert (one.low, one.high) == ends[one.value]


def test_a_bootstrap_of_three_runs_does_not() -> None:
    """The reason for the other interval: the bootstrap's has no width where all pairs agree."""
    rng, runs, truth = np.random.default_rng(3), 3, 0.9
    shift, held = NormalDist().inv_cdf(truth) * math.sqrt(2), 0
    for _ in range(200):
        x, y = rng.normal(shift, 1.0, (runs, 1)), rng.normal(size=(runs, 1))
        found = estimate(probability_of_improvement, x, y, draws=500)
        held += found.low <= truth <= found.high
    assert held < 0.6 * 200


def test_the_interval_of_two_runs_is_known() -> None:
    """Of the four samples of 0 and 1, one has the mean 0 and one the mean 1: a quarter each."""
    found = estimate(mean, column(0, 1))
    assert found == (0.5, 0.0, 1.0)
    assert estimate(mean, column(0.7)) == (0.7, 0.7, 0.7)


def test_tasks_are_drawn_apart() -> None:
    """Stratified: runs of a task are exchanged with runs of the same task alone."""
    scores = np.array([[0.0, 100.0], [0.0, 100.0]])
    assert estimate(mean, scores) == (50.0, 50.0, 50.0)


def test_a_band_is_the_interval_at_every_point() -> None:
    values = np.array([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]])
    middle, low, high = band(values)
    assert (middle == [0, 2]).all()
    assert low[0] == high[0] == 0.0
    assert 1.0 <= low[1] < 2.0 < high[1] <= 3.0


def test_draws_give_the_interval_of_all_samples_there_are() -> None:
    scores = column(10, 30, 20)
    every = [np.mean(sample) for sample in itertools.product(scores[:, 0], repeat=3)]
    value, low, high = estimate(iqm, scores)
    assert value == 20.0
    ends = np.percentile(every, [2.5, 97.5], method="inverted_cdf")  # one in 27 is above 2.5 %
    assert [low, high] == [*ends] == [10.0, 30.0]


def repeated(*samples: np.ndarray) -> list[np.ndarray]:
    """The bootstrap samples that rliable drew, [reps, num_runs, num_tasks] of each."""
    generator = np.random.RandomState(EXPECTED["seed"])
    drawn: list[list[np.ndarray]] = [[] for _ in samples]
    for _ in range(EXPECTED["reps"]):
        for sample, made in zip(samples, drawn, strict=True):
            index = generator.choice(len(sample), sample.shape, replace=True)
            made.append(sample[index, np.arange(sample.shape[1])])
    return [np.array(each) for each in drawn]


@pytest.mark.parametrize("case", EXPECTED["cases"], ids=["five seeds", "four tasks", "three seeds"])
def test_numbers_are_those_of_rliable(case: dict[str, Any]) -> None:
    """For the same draws."""
    arrays = {name: np.array(scores) for name, scores in case["scores"].items()}
    for statistic in (iqm, mean):
        for name, scores in arrays.items():
            found = [statistic(scores), *percentiles(statistic(*repeated(scores)))]
            np.testing.assert_allclose(found, case[statistic.__name__][name], atol=1e-9)
    both = [*arrays.values()]
    better = probability_of_improvement
    found = [better(*both), *percentiles(better(*repeated(*both)))]
    np.testing.assert_allclose(found, case["improvement"], atol=1e-9)


@pytest.mark.parametrize("name", ["a", "b"])
def test_so_are_those_of_other_draws(name: str) -> None:
    scores = np.array(EXPECTED["cases"][0]["scores"][name])
    np.testing.assert_allclose(estimate(iqm, scores), EXPECTED["independent"][name], atol=1e-3)
