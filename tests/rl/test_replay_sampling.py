"""Samplers of replayed transitions: mixtures, and what they know of what they draw."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from etude.core.keys import Key
from etude.data.returns import td_targets
from etude.data.store.episodes import Transitions
from etude.data.store.sampling import MultiStep
from etude.rl.sampling import Batch, Sample, Sampler, ahead, mixture, multi_step

STORE: Any = None


def constant(number: float, known: bool = True) -> Sampler:
    """Transitions that all are this number."""

    def sample(store: Any, generator: np.random.Generator, size: int) -> Sample:
        x = np.full(size, number, np.float32)
        ended = np.zeros(size, bool)
        steps = Transitions({"state": x[:, None]}, x[:, None], x, ended, ended, {"state": x})
        return Sample(steps, x.astype(np.float64), x) if known else Sample(steps)

    return sample


def test_a_mixture_of_samplers_is_a_sampler() -> None:
    mixed = mixture(mixture(constant(1.0), constant(2.0), 0.5), constant(3.0), 0.75)
    drawn = mixed(STORE, Key(0).generator(), 11)
    expected = [1.0] * 4 + [2.0] * 4 + [3.0] * 3
    assert drawn.steps.rewards.tolist() == drawn.steps.obs["state"][:, 0].tolist() == expected
    assert drawn.returns is not None
    assert drawn.weights is not None
    assert drawn.returns.tolist() == drawn.weights.tolist() == expected
    batch = Batch.of(drawn, torch.device("cpu"))
    assert batch.returns is not None
    assert batch.returns.dtype == torch.float64
    assert batch.rewards.tolist() == expected


def test_what_no_sampler_knows_a_mixture_does_not_know() -> None:
    mixed = mixture(constant(1.0, known=False), constant(2.0, known=False), 0.5)
    drawn = mixed(STORE, Key(0).generator(), 4)
    assert drawn.returns is drawn.weights is None
    batch = Batch.of(drawn, torch.device("cpu"))
    assert batch.returns is batch.weights is None


def test_a_target_ends_with_its_episode() -> None:
    rewards, values = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    targets = td_targets(rewards, values, torch.tensor([False, True]), 0.5)
    assert targets.tolist() == [6.0, 2.0]


def test_an_n_step_return_sums_discounted_rewards() -> None:
    """Of three steps, of one at an end, and the discount of the value after them."""

    class Store:
        def sample_multi_step(self, generator: Any, size: int, num_steps: int) -> MultiStep:
            assert (size, num_steps) == (2, 3)
            counts, rewards = np.array([3, 1]), np.array([[1, 2, 4], [8, 0, 0]], np.float32)
            return MultiStep(constant(0.0)(STORE, generator, size).steps, rewards, counts)

    source: Any = Store()
    drawn = multi_step(3, 0.5)(source, Key(0).generator(), 2)
    batch = Batch.of(drawn, torch.device("cpu"))
    assert batch.discounts is not None
    assert batch.rewards.tolist() == [1 + 0.5 * 2 + 0.25 * 4, 8]
    targets = td_targets(
        batch.rewards, torch.full((2,), 16.0), torch.tensor([False, False]), batch.discounts
    )
    assert targets.tolist() == [3 + 0.125 * 16, 8 + 0.5 * 16]


def test_what_is_drawn_ahead_is_the_same() -> None:
    def draws(fails: bool) -> Iterator[int]:
        generator = np.random.default_rng(0)
        for _ in range(5):
            yield int(generator.integers(1 << 30))
        if fails:
            raise ValueError("nothing left")

    assert [*ahead(draws(False))] == [*draws(False)] == [*ahead(draws(False), False)]
    found = []
    with pytest.raises(ValueError, match="nothing left"):
        found += ahead(draws(True))
    given_up = ahead(draws(False))
    assert next(given_up) == next(draws(False))
    given_up.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("ahead")]
