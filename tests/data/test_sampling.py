"""Which segments a minibatch holds: the draws against all the ways there are to draw."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.keys import Key
from etude.rl.on_policy import FLOOR, permuted, prioritised, probabilities


def stream(seed: int = 0) -> np.random.Generator:
    return Key(seed, ("sampling",)).generator()


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 6))
def test_permuted_is_a_permutation(seed: int, minibatches: int, size: int) -> None:
    draw = permuted(stream(seed), minibatches * size, minibatches)
    assert draw.segments.shape == (minibatches, size)
    assert sorted(draw.segments.reshape(-1)) == list(range(minibatches * size))
    assert draw.weights is None


def test_every_permutation_is_as_likely() -> None:
    generator = stream()
    counts = Counter(tuple(permuted(generator, 3, 3).segments.reshape(-1)) for _ in range(6_000))
    assert len(counts) == 6
    assert sum((n - 1_000) ** 2 / 1_000 for n in counts.values()) < 36  # 5 degrees: p = 1e-6


priorities_of = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=20)


@given(st.integers(0, 10**6), priorities_of, st.floats(0, 1), st.floats(0, 1), st.data())
def test_prioritised_in_general(
    seed: int, priorities: list[float], alpha: float, beta: float, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(priorities)))
    p = probabilities(np.array(priorities), alpha)
    raised = [x**alpha + FLOOR for x in priorities]
    np.testing.assert_allclose(p, np.array(raised) / sum(raised), rtol=1e-12)
    assert (p > 0).all()
    draw = prioritised(stream(seed), p, 5, size, beta)
    assert draw.segments.shape == (5, size)
    assert draw.segments.dtype == np.int64
    for row in draw.segments.tolist():
        assert len(set(row)) == size
        assert set(row) <= set(range(len(p)))
    assert draw.weights is not None
    expected = [[(len(p) * p[i]) ** -beta for i in row] for row in draw.segments]
    assert draw.weights.dtype == np.float32
    np.testing.assert_allclose(draw.weights, expected, rtol=1e-7)  # float32 rounding, no more


def sets_by_enumeration(p: np.ndarray, size: int) -> dict[tuple[int, ...], float]:
    """The probability of every set, summed over all orders it can be drawn in one by one."""
    found = dict.fromkeys(combinations(range(len(p)), size), 0.0)
    for order in permutations(range(len(p)), size):
        chance, left = 1.0, 1.0
        for i in order:
            chance, left = chance * p[i] / left, left - p[i]
        found[tuple(sorted(order))] += chance
    assert sum(found.values()) == pytest.approx(1.0)
    return found


@pytest.mark.parametrize(
    ("p", "size", "limit"),
    [((0.1, 0.2, 0.3, 0.4), 2, 36), ((0.7, 0.2, 0.05, 0.05), 2, 36), ((0.5, 0.3, 0.2), 1, 28)],
)
def test_sets_are_those_of_draws_one_by_one(p: tuple[float, ...], size: int, limit: float) -> None:
    """Chi-square; the limits belong to p = 1e-6."""
    count, expected = 40_000, sets_by_enumeration(np.array(p), size)
    draw = prioritised(stream(), np.array(p), count, size, 1.0)
    found = Counter(map(tuple, draw.segments.tolist()))
    assert set(found) <= set(expected)
    square = sum((found[s] - count * q) ** 2 / (count * q) for s, q in expected.items())
    assert square < limit
    # What is not such a draw would be seen: sets as likely as the product of their shares.
    wrong = {s: float(np.prod([p[i] for i in s])) for s in expected}
    total = sum(wrong.values())
    other = sum((found[s] - count * q / total) ** 2 / (count * q / total) for s, q in wrong.items())
    assert size == 1 or other > 2 * limit


def test_weights_with_beta_1_take_the_preference_out() -> None:
    n, size, count = 1_000, 8, 4_000
    numbers = stream(1).normal(3.0, 1.0, n)
    p = probabilities(np.abs(numbers) ** 2, 0.8)  # what is large is preferred
    errors = {}
    for beta in (0.0, 1.0):
        draw = prioritised(stream(2), p, count, size, beta)
        assert draw.weights is not None
        estimates = (draw.weights * numbers[draw.segments]).mean(1)
        spread = estimates.std() / np.sqrt(count)
        # Without replacement a draw of 8 in 1,000 is off by less than its size's share.
        errors[beta] = (abs(estimates.mean() - numbers.mean()), 4 * spread + size / n)
    assert errors[1.0][0] < errors[1.0][1]
    assert errors[0.0][0] > 10 * errors[0.0][1]


@pytest.mark.parametrize(("priority", "alpha"), [(0.0, 0.8), (7.0, 0.8), (0.0, 0.0)])
def test_nothing_to_prefer_is_uniform(priority: float, alpha: float) -> None:
    p = probabilities(np.full(64, priority), alpha)
    assert p.tolist() == [1 / 64] * 64
    draw = prioritised(stream(), p, 32, 2, 0.4)
    assert draw.weights is not None
    assert (draw.weights == 1.0).all()


def test_alpha_0_prefers_nothing_and_a_floor_forgets_nothing() -> None:
    even = probabilities(np.array([0.0, 1.0, 100.0]), 0.0)
    assert even.tolist() == pytest.approx([1 / 3] * 3, rel=1e-12)
    p = probabilities(np.array([0.0, 1.0]), 0.5)
    assert p.tolist() == pytest.approx([FLOOR / (1 + 2 * FLOOR), (1 + FLOOR) / (1 + 2 * FLOOR)])


def test_coverage_of_uniform_priorities_is_about_64_percent() -> None:
    """32 draws of 1/32 each, independent of one another."""
    n = 4_096
    draw = prioritised(stream(), probabilities(np.zeros(n), 0.8), 32, n // 32, 0.2)
    covered = len(np.unique(draw.segments)) / n
    assert covered == pytest.approx(1 - (1 - 1 / 32) ** 32, abs=0.02)
