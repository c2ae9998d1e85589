"""Statistics over seeds: by hand, and against what rliable gives for the same scores."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.compare.comparison import (
    band,
    estimate,
    iqm,
    mean,
    percentiles,
    probability_of_improvement,
)

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
