"""One verdict on whether returns can teach a reward."""

from __future__ import annotations

import numpy as np
import pytest

from etude.data.contrast import contrast

RNG, LENGTHS = np.random.default_rng(0), np.arange(10, 60)


@pytest.mark.parametrize(
    ("returns", "enough"),
    [
        (np.ones(50), False),
        (3.0 + 1e-9 * RNG.normal(size=50), False),  # rounding
        (np.zeros(50), False),
        (0.1 * LENGTHS, False),  # the same per step
        (np.where(np.arange(50) == 3, 0.0, 1.0), True),
        (RNG.normal(size=50), True),
        (5.0 + 1e-3 * RNG.normal(size=50), True),
        (1e-9 * RNG.normal(size=50), True),  # small numbers are not equal ones
    ],
)
def test_the_verdict(returns: np.ndarray, enough: bool) -> None:
    assert contrast(returns, LENGTHS).enough is enough


@pytest.mark.parametrize(
    ("returns", "lengths", "word"),
    [
        ([], [], "no episode"),
        ([1.0] * 5, [3] * 5, "Every return is 1"),
        ([0.0, 0.0], [1, 2], "Add successes"),
        ([5e6, 5e6 + 1], [1, 1], "learns nothing"),
        ([2.0, 4.0], [4, 8], "gives 0.5 per step, independent of the actions"),
        ([0.0, 1.0, 1.0], [5, 5, 5], "something to learn"),
        ([0.0] + [1.0] * 99, [5] * 100, "99% of them are 1"),
    ],
)
def test_what_is_said(returns: list[float], lengths: list[int], word: str) -> None:
    assert word in contrast(np.array(returns), np.array(lengths)).sentence
