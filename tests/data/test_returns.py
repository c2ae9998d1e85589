"""Advantages against a sum over all later steps, with an end at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.keys import Key
from etude.data.returns import (
    advantages_and_targets,
    explained_variance,
    importance_weights,
    moments_of,
    next_values,
)

ROWS, STEPS = 3, 7


def reference(
    rewards: np.ndarray,
    values: np.ndarray,
    following: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    lam: float,
    ratios: np.ndarray | None = None,
) -> np.ndarray:
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, up to and with the episode's last step.

    With ratios, V-trace: every delta counts by its own ratio and by all those on the way to it
    from t, each of them at most 1.
    """
    rows, steps = rewards.shape
    out = np.zeros((rows, steps))
    cut = np.ones((rows, steps)) if ratios is None else np.minimum(ratios, 1.0)
    for row in range(rows):
        for t in range(steps):
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[row, k] else following[row, k]
                delta = rewards[row, k] + gamma * bootstrap - values[row, k]
                out[row, t] += (gamma * lam) ** (k - t) * np.prod(cut[row, t : k + 1]) * delta
                if terminated[row, k] or truncated[row, k]:
                    break
    return out


def example(seed: int) -> dict[str, np.ndarray]:
    stream = Key(seed, ("example",)).generator()
    return {
        name: stream.normal(size=(ROWS, STEPS)) for name in ("rewards", "values", "following")
    } | {name: np.zeros((ROWS, STEPS), bool) for name in ("terminated", "truncated")}


def both(
    arrays: dict[str, np.ndarray], gamma: float, lam: float, ratios: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages, and value targets less the values."""
    tensors = [torch.from_numpy(array) for array in arrays.values()]
    weights = None
    if ratios is not None:
        weights = importance_weights(torch.from_numpy(np.log(ratios)), torch.zeros(ROWS, STEPS))
    advantages, targets = advantages_and_targets(*tensors, gamma, lam, weights)
    return advantages.numpy(), targets.numpy() - arrays["values"]


def ours(
    arrays: dict[str, np.ndarray], gamma: float, lam: float, ratios: np.ndarray | None = None
) -> np.ndarray:
    """How far value targets are from the values: what V-trace corrects."""
    return both(arrays, gamma, lam, ratios)[1]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("row", range(ROWS))
def test_an_end_at_every_position(end: str, step: int, row: int) -> None:
    arrays = example(step)
    arrays[end][row, step] = True
    expected = reference(**arrays, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(ours(arrays, 0.9, 0.8), expected, rtol=1e-12)
    # Taken for the other kind of end it would be wrong.
    other = {"terminated": "truncated", "truncated": "terminated"}[end]
    mistaken = ours({**arrays, end: arrays[other], other: arrays[end]}, 0.9, 0.8)
    assert abs(mistaken[row, step] - expected[row, step]) > 1e-6


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_any_ends_anywhere(seed: int, share: float, gamma: float, lam: float) -> None:
    arrays = example(seed)
    ends = Key(seed, ("ends",)).generator().random((2, ROWS, STEPS))
    arrays["terminated"] = ends[0] < share
    arrays["truncated"] = (ends[1] < share) & ~arrays["terminated"]
    expected = reference(**arrays, gamma=gamma, lam=lam)
    np.testing.assert_allclose(ours(arrays, gamma, lam), expected, rtol=1e-9, atol=1e-12)


def some_ratios(seed: int) -> np.ndarray:
    """Around 1, on either side."""
    return np.exp(Key(seed, ("ratios",)).generator().normal(0.0, 0.7, (ROWS, STEPS)))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("step", range(STEPS))
def test_vtrace_with_an_end_at_every_position(end: str, step: int) -> None:
    arrays, ratios = example(step), some_ratios(step)
    arrays[end][:, step] = True
    expected = reference(**arrays, gamma=0.9, lam=0.8, ratios=ratios)
    np.testing.assert_allclose(ours(arrays, 0.9, 0.8, ratios), expected, rtol=1e-12)
    assert not np.allclose(expected, reference(**arrays, gamma=0.9, lam=0.8))


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_vtrace_with_any_ends_and_ratios(seed: int, share: float, gamma: float, lam: float) -> None:
    arrays, ratios = example(seed), some_ratios(seed)
    ends = Key(seed, ("ends",)).generator().random((2, ROWS, STEPS))
    arrays["terminated"] = ends[0] < share
    arrays["truncated"] = (ends[1] < share) & ~arrays["terminated"]
    found = ours(arrays, gamma, lam, ratios)
    expected = reference(**arrays, gamma=gamma, lam=lam, ratios=ratios)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    # A step's own advantage lacks its own weight, which the policy loss puts in.
    advantages, _ = both(arrays, gamma, lam, ratios)
    np.testing.assert_allclose(
        advantages * np.minimum(ratios, 1.0), expected, rtol=1e-9, atol=1e-12
    )
    # Ratios of 1 are GAE, and those above 1 count as 1: in every bit.
    ones = np.ones((ROWS, STEPS))
    assert ours(arrays, gamma, lam, ones).tobytes() == ours(arrays, gamma, lam).tobytes()
    cut = np.minimum(ratios, 1.0)
    assert found.tobytes() == ours(arrays, gamma, lam, cut).tobytes()


def test_an_action_that_would_not_be_taken_again_says_nothing() -> None:
    """A ratio of 0 hides its own step, and all later ones from those before it."""
    arrays, ratios = example(3), np.ones((ROWS, STEPS))
    ratios[:, 4] = np.finfo(float).tiny
    found = ours(arrays, 0.9, 0.8, ratios)
    assert (found[:, 4] == 0.0).all()
    later = {**arrays, "rewards": arrays["rewards"].copy()}
    later["rewards"][:, 4:] += 100.0
    assert ours(later, 0.9, 0.8, ratios)[:, :4].tobytes() == found[:, :4].tobytes()


@pytest.mark.parametrize("name", ["rewards", "values", "following", "terminated", "truncated"])
def test_rows_do_not_leak(name: str) -> None:
    arrays = example(1)
    before = ours(arrays, 0.99, 0.95)
    arrays[name] = arrays[name].copy()
    arrays[name][1] = ~arrays[name][1] if arrays[name].dtype == bool else 1e6
    after = ours(arrays, 0.99, 0.95)
    assert after[[0, 2]].tobytes() == before[[0, 2]].tobytes()
    assert after[1].tobytes() != before[1].tobytes()


def test_a_reward_of_one_forever_is_worth_one_over_one_minus_gamma() -> None:
    """Where the values are right, time limits or not, there is no advantage left."""
    gamma = 0.9
    worth = np.full((ROWS, STEPS), 1.0 / (1.0 - gamma))
    arrays = example(0) | {"rewards": np.ones((ROWS, STEPS)), "values": worth, "following": worth}
    arrays["truncated"][:, 3] = True
    np.testing.assert_allclose(ours(arrays, gamma, 0.95), 0.0, atol=1e-12)
    # With V = 0 and lambda = 1 the return to the limit, bootstrapped there, is the same number.
    arrays["values"] = np.zeros((ROWS, STEPS))
    arrays["following"] = np.where(arrays["truncated"], worth, 0.0)
    np.testing.assert_allclose(ours(arrays, gamma, 1.0)[:, :4], 1.0 / (1.0 - gamma))
    # Taken for terminations, the limits would cost reward.
    wrong = arrays | {"terminated": arrays["truncated"], "truncated": arrays["terminated"]}
    np.testing.assert_allclose(ours(wrong, gamma, 1.0)[:, 0], (1 - gamma**4) / (1 - gamma))


def test_values_of_what_each_step_led_to() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    following = next_values(
        values,
        last_values=torch.tensor([10.0, 20.0]),
        final_values=torch.tensor([-1.0, -2.0]),
        final_envs=torch.tensor([0, 1]),
        final_steps=torch.tensor([1, 2]),
    )
    # Row 0 ended on its second step, row 1 on its last: V(final), not V(after the reset).
    assert following.tolist() == [[1.0, -1.0, 10.0], [4.0, 5.0, -2.0]]
    assert values.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_explained_variance() -> None:
    def explained(values: torch.Tensor, returns: torch.Tensor) -> float:
        return explained_variance(moments_of(returns - values), moments_of(returns))

    returns = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert explained(returns, returns) == 1.0
    assert explained(returns + 5.0, returns) == pytest.approx(1.0)
    assert explained(torch.zeros(2, 2), returns) == pytest.approx(0.0)
    assert explained(-returns, returns) == pytest.approx(-3.0)
    assert explained(returns, torch.ones(2, 2)) == 0.0


def test_moments_are_of_all_numbers() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert moments_of(x) == {"count": 4.0, "mean": 3.0, "m2": 14.0}
    assert moments_of(x[:0]) == {"count": 0.0, "mean": 0.0, "m2": 0.0}
    assert x.sum() == 12.0
