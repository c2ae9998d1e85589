"""Distributions against torch's own and against counted frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as reference

from etude.core.keys import Key
from etude.models.networks import Categoricals, DiagonalGaussian

JUST_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_gaussian_against_torch() -> None:
    mean, log_std, actions = normal(5, 7, 3), normal(3, seed=1), normal(5, 7, 3, seed=2) * 2
    ours = DiagonalGaussian(mean, log_std)
    theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy().expand(5, 7), theirs.entropy())
    assert torch.equal(ours.mode(), mean)


def test_gaussian_samples_have_the_right_moments() -> None:
    mean, log_std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -1.0])
    noise = torch.from_numpy(DiagonalGaussian.noise(Key(0).generator(), 100, 1000, 2))
    drawn = DiagonalGaussian(mean, log_std).sample(noise)[0].reshape(-1, 2).double()
    torch.testing.assert_close(drawn.mean(0), mean.double(), atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.std(0), log_std.exp().double(), atol=0, rtol=0.01)


def test_excess_is_what_leaves_the_bounds() -> None:
    mean = torch.tensor([[0.5, -1.0], [3.0, -1.5]])
    assert DiagonalGaussian(mean, torch.zeros(2)).excess().tolist() == [0.0, 4.25]
    assert float(Categoricals(normal(4, 3), (3,)).excess()) == 0.0


@pytest.mark.parametrize("sizes", [(3,), (2, 4), (1, 5, 2)])
def test_categoricals_against_torch(sizes: tuple[int, ...]) -> None:
    logits = normal(6, 5, sum(sizes)) * 3
    ours = Categoricals(logits, sizes)
    theirs = [reference.Categorical(logits=part) for part in logits.split(sizes, dim=-1)]
    choices = [t.sample() for t in theirs]
    expected = sum(t.log_prob(c) for t, c in zip(theirs, choices, strict=True))
    torch.testing.assert_close(ours.log_prob(torch.stack(choices, dim=-1)), expected)
    torch.testing.assert_close(ours.entropy(), sum(t.entropy() for t in theirs))
    modes = torch.stack([t.probs.argmax(-1) for t in theirs], dim=-1)
    assert torch.equal(ours.mode(), modes)


@pytest.mark.parametrize("sizes", [(3,), (2, 4)])
def test_choices_come_as_often_as_they_should(sizes: tuple[int, ...]) -> None:
    logits, count = normal(sum(sizes), seed=3), 200_000
    noise = torch.from_numpy(Categoricals.noise(Key(1).generator(), count, 1, len(sizes)))
    drawn = Categoricals(logits.expand(count, 1, -1), sizes).sample(noise)[0][:, 0]
    assert drawn.dtype == torch.int64
    for i, part in enumerate(logits.split(sizes)):
        probs = part.softmax(-1)
        found = torch.bincount(drawn[:, i], minlength=sizes[i]) / count
        error = (probs * (1 - probs) / count).sqrt()
        assert ((found - probs).abs() < 5 * error).all()


def test_several_choices_are_independent() -> None:
    noise = torch.from_numpy(Categoricals.noise(Key(2).generator(), 50_000, 1, 2))
    drawn = Categoricals(torch.zeros(50_000, 1, 4), (2, 2)).sample(noise)[0][:, 0].double()
    assert abs(float(torch.corrcoef(drawn.T)[0, 1])) < 0.02


def test_samples_come_with_their_log_probabilities() -> None:
    gaussian = DiagonalGaussian(normal(9, 3), normal(3, seed=1))
    actions, log_probs = gaussian.sample(normal(9, 3, seed=2))
    torch.testing.assert_close(log_probs, gaussian.log_prob(actions), atol=1e-5, rtol=0)
    choices = Categoricals(normal(9, 6), (2, 4))
    actions, log_probs = choices.sample(torch.rand(9, 2, generator=torch.Generator()))
    assert torch.equal(log_probs, choices.log_prob(actions))


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=20))
def test_edge_noise_picks_a_choice_that_can_happen(logits: list[float]) -> None:
    distribution = Categoricals(torch.tensor([logits]), (len(logits),))
    for value in (0.0, JUST_BELOW_ONE):
        pick, _ = distribution.sample(torch.tensor([[value]]))
        assert 0 <= int(pick) < len(logits)
        assert float(distribution.log_probs[0].exp()[0, int(pick)]) > 0.0


@given(st.integers(2, 400), st.integers(0, 1000))
def test_edge_noise_among_many_choices(size: int, seed: int) -> None:
    """Sums of many rounded probabilities end beside 1; the last, impossible one is not picked."""
    logits = normal(1, size, seed=seed)
    logits[0, -1] = -1e4
    pick, _ = Categoricals(logits, (size,)).sample(torch.tensor([[JUST_BELOW_ONE]]))
    assert int(pick) < size - 1


def test_noise_is_the_same_for_the_same_key() -> None:
    for kind in (DiagonalGaussian, Categoricals):
        one, two = (kind.noise(Key(4).generator(), 3, 2, 5) for _ in range(2))
        assert one.shape == (3, 2, 5)
        assert one.dtype == np.float32
        assert one.tobytes() == two.tobytes()
