"""Running statistics against those of all samples at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays
from etude.models.networks import CLIP, Normaliser, RewardScaler, merge_moments, no_moments
from etude.rollout.group import moments

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def samples(sizes: list[int], seed: int, columns: int = 3) -> list[np.ndarray]:
    stream = Key(seed, ("samples",)).generator()
    offset, spread = stream.normal(0, 100, columns), np.exp(stream.normal(0, 2, columns))
    return [stream.normal(offset, spread, (1, n, columns)) for n in sizes]


@given(sizes, st.integers(0, 10**6))
def test_merged_moments_are_those_of_all_samples(sizes: list[int], seed: int) -> None:
    parts = samples(sizes, seed)
    total = no_moments(3)
    for part in parts:
        total = merge_moments(total, moments(part))
    everything = np.concatenate(parts, axis=1)[0]
    assert float(total["count"]) == len(everything)
    np.testing.assert_allclose(total["mean"], everything.mean(0), rtol=1e-12)
    square = ((everything - everything.mean(0)) ** 2).sum(0)
    np.testing.assert_allclose(total["m2"], square, rtol=1e-11, atol=1e-12)


def test_nothing_merged_with_nothing_is_nothing() -> None:
    assert float(merge_moments(no_moments(2), no_moments(2))["count"]) == 0.0
    one = moments(np.array([[[1.0, 2.0], [3.0, 5.0]]]))
    for merged in (merge_moments(one, no_moments(2)), merge_moments(no_moments(2), one)):
        assert merged["mean"].tolist() == [2.0, 3.5]
        assert merged["m2"].tolist() == [2.0, 4.5]


def filled(array: np.ndarray) -> Normaliser:
    normaliser = Normaliser(array.shape[-1])
    normaliser.absorb(moments(array))
    return normaliser


def test_normalised_samples_have_mean_zero_and_spread_one() -> None:
    array = samples([500], 0)[0].astype(np.float32)
    out = filled(array)(torch.from_numpy(array))[0].double()
    np.testing.assert_allclose(out.mean(0), 0.0, atol=1e-4)
    np.testing.assert_allclose(out.std(0, correction=0), 1.0, atol=1e-4)


def test_absorbing_in_parts_is_absorbing_all() -> None:
    parts = samples([20, 1, 300], 1)
    one = Normaliser(3)
    for part in parts:
        one.absorb(moments(part))
    all_at_once = filled(np.concatenate(parts, axis=1))
    torch.testing.assert_close(one.mean, all_at_once.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(one.m2, all_at_once.m2, rtol=1e-11, atol=0)


def test_before_any_sample_nothing_is_changed() -> None:
    x = torch.tensor([[-3.0, 0.5, 9.0]])
    assert torch.equal(Normaliser(3)(x), x)


def test_a_constant_column_is_centred_and_not_blown_up() -> None:
    array = samples([100], 2)[0]
    array[..., 1] = 1234.5678
    normaliser = filled(array.astype(np.float32))
    x = torch.from_numpy(array[0, :1].astype(np.float32))
    assert float(normaliser(x)[0, 1]) == pytest.approx(0.0, abs=1e-3)
    assert float(normaliser(x + 0.25)[0, 1]) == pytest.approx(0.25, abs=1e-3)


def test_outliers_are_clipped_and_the_input_is_not_touched() -> None:
    normaliser = filled(samples([100], 3)[0])
    x = torch.tensor([[1e9, -1e9, 0.0]])
    assert normaliser(x)[0, :2].tolist() == [CLIP, -CLIP]
    assert x.tolist() == [[1e9, -1e9, 0.0]]


def test_loading_a_state_refreshes_what_is_applied() -> None:
    source = filled(samples([100], 4)[0])
    x = torch.randn(5, 3) * 100
    copy = filled(samples([50], 5)[0])
    copy.load_state_dict(source.state_dict())
    assert torch.equal(copy(x), source(x))
    copy.load_state_dict(Normaliser(3).state_dict())
    assert torch.equal(copy(x.clamp(-CLIP, CLIP)), x.clamp(-CLIP, CLIP))


def test_only_absorb_moves_the_statistics() -> None:
    normaliser = filled(samples([100], 6)[0])
    before = copy_arrays(dict(normaliser.state_dict()))
    normaliser.train()
    normaliser(torch.randn(50, 3) * 1e3)
    assert all(torch.equal(before[k], v) for k, v in normaliser.state_dict().items())


def returns_by_hand(rewards: np.ndarray, done: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted reward since the episode's start, O(T^2)."""
    rows, steps = rewards.shape
    out = np.zeros((rows, steps))
    for row in range(rows):
        for t in range(steps):
            ends = np.flatnonzero(done[row, :t])
            start = ends[-1] + 1 if len(ends) else 0
            out[row, t] = sum(gamma ** (t - k) * rewards[row, k] for k in range(start, t + 1))
    return out


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 0.9, 1.0]))
def test_reward_spread_against_brute_force(seed: int, fragments: int, gamma: float) -> None:
    stream = Key(seed, ("rewards",)).generator()
    rows, steps = 3, 7
    rewards = stream.normal(1.0, 3.0, (rows, steps * fragments)).astype(np.float32)
    done = stream.random((rows, steps * fragments)) < 0.25
    scaler = RewardScaler(rows, gamma)
    for f in range(fragments):
        part = slice(f * steps, (f + 1) * steps)
        # Two shards, of unequal size.
        for own in (slice(0, 1), slice(1, 3)):
            everyone = np.ones_like(done[own, part])
            none = np.zeros(own.stop - own.start, np.bool_)
            observed = scaler.observe(own, rewards[own, part], done[own, part], everyone, none)
            scaler.absorb(observed)
        scaler = _again(scaler, rows, gamma)
    returns = returns_by_hand(rewards.astype(np.float64), done, gamma)
    spread = np.sqrt(returns.var() + 1e-8)
    expected = np.clip(rewards / spread, -CLIP, CLIP)
    np.testing.assert_allclose(scaler.scale(rewards), expected, rtol=1e-5)
    last = np.where(done[:, -1], 0.0, returns[:, -1])
    np.testing.assert_allclose(scaler.running, last, rtol=1e-9, atol=1e-12)


def _again(scaler: RewardScaler, rows: int, gamma: float) -> RewardScaler:
    copy = RewardScaler(rows, gamma)
    state: Tree = copy_arrays(scaler.state_dict())
    copy.load_state_dict(state)
    return copy


def test_rewards_keep_their_sign_and_are_clipped() -> None:
    scaler = RewardScaler(1, 0.9)
    rewards = np.array([[1.0, 2.0, 3.0, 2.0, 1.0]], np.float32)
    never, always = np.zeros((1, 5), bool), np.ones((1, 5), bool)
    scaler.absorb(scaler.observe(slice(0, 1), rewards, never, always, never[:, 0]))
    assert (scaler.scale(rewards) > 0).all()  # the mean is not subtracted
    assert scaler.scale(np.array([[1e6, -1e6]], np.float32)).tolist() == [[CLIP, -CLIP]]
    assert scaler.scale(rewards).dtype == np.float32
