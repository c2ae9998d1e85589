"""Prioritised minibatches inside PPO: priorities, weights, their schedule, and coverage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.core.contracts import Array
from etude.rl import on_policy as shards
from etude.rl.on_policy import Draw, Minibatch, prioritised
from toy_envs import ACTIONS
from toys import Trainer, make_trainer

PRIORITISED = {"sampling": "prioritised", "horizon": 4}


class Draws:
    """Every draw of a run: the probabilities, beta and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Array, float, Draw]] = []
        monkeypatch.setattr(shards, "prioritised", self._draw)

    def _draw(
        self, generator: np.random.Generator, p: Array, minibatches: int, size: int, beta: float
    ) -> Draw:
        draw = prioritised(generator, p, minibatches, size, beta)
        self.seen.append((p, beta, draw))
        return draw


@pytest.mark.parametrize("shards", [1, 2])
def test_priorities_are_sums_of_raw_advantages_within_a_shard(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws(monkeypatch)
    trainer = make_trainer(shards=shards, priority_alpha=0.6, **PRIORITISED)
    trainer.ingest()
    expected = []
    for shard in trainer.ppo.shards:
        # Before they are normalised: an advantage near the mean of all is not a small one.
        raised = (shard.returns - shard.values).double().abs().sum(1).numpy() ** 0.6 + 1e-6
        expected.append(raised / raised.sum())
    trainer.update()
    assert len(draws.seen) == 2 * shards  # every update epoch anew
    for i, (p, _, draw) in enumerate(draws.seen):
        np.testing.assert_allclose(p, expected[i % shards], rtol=1e-5)
        assert draw.segments.shape == (4, 8 // shards)
    first, second = draws.seen[0][2], draws.seen[shards][2]
    assert first.segments.tolist() != second.segments.tolist()


@pytest.mark.parametrize("kind", ACTIONS)
def test_a_weight_multiplies_its_segments_gradient(kind: str) -> None:
    """The minibatch's gradient is the mean of single segments' gradients times their weights."""
    # A box policy's entropy is the same at every step, so there is nothing to weigh in it.
    entropy = 0.0 if kind == "box" else 0.1
    trainer = make_trainer(
        action=ACTIONS[kind], entropy_coef=entropy, bound_coef=0.3, value_clip=0.1, **PRIORITISED
    )
    ppo = trainer.ppo
    trainer.ingest()
    trainer.update()  # now ratios are not 1 and values have moved
    (chosen,) = trainer.first_order()
    assert chosen.weights is not None
    assert float(chosen.weights.std()) > 0.05
    loss, metrics = ppo._gradient([chosen])
    found, expected = ppo.flat.grad.clone(), torch.zeros_like(ppo.flat.grad)
    singles = []
    for segment, weight in zip(chosen.segments, chosen.weights, strict=True):
        single, values = ppo._gradient([Minibatch(segment.reshape(1), None)])
        expected += weight * ppo.flat.grad / len(chosen.segments)
        singles.append([float(weight) * x for x in (single, *values.values())])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    mean = np.mean(singles, axis=0)
    weighted = ["train/policy_gradient_loss", "train/value_loss", "train/clip_fraction"]
    assert loss == pytest.approx(mean[0], rel=1e-4, abs=1e-6)
    names = list(metrics)
    for name in weighted:
        assert metrics[name] == pytest.approx(mean[1 + names.index(name)], rel=1e-4, abs=1e-6)


def test_beta_goes_to_1_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = Draws(monkeypatch)
    trainer = make_trainer(
        priority_beta=0.2, iterations=4, update_epochs=1, minibatch=64, **PRIORITISED
    )
    used: list[Minibatch] = []
    gradient = trainer.ppo._gradient
    trainer.ppo._gradient = lambda chosen: used.extend(chosen) or gradient(chosen)  # type: ignore[func-returns-value, method-assign]
    for _ in range(4):
        trainer.iterate()
    # At the end of the run (as in one whose last iteration is given once more) it is 1.
    assert trainer.clock.progress == 1.0
    trainer.ingest()
    trainer.update()
    betas = [beta for _, beta, _ in draws.seen]
    assert betas == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    for i, (p, beta, draw) in enumerate(draws.seen):
        for b, some in enumerate(used[2 * i : 2 * i + 2]):
            assert some.weights is not None
            assert some.segments.tolist() == draw.segments[b].tolist()
            expected = (len(p) * p[some.segments.numpy()]) ** -beta
            np.testing.assert_allclose(some.weights, expected, rtol=1e-6)


def covered(trainer: Trainer) -> float:
    """The share of segments in some minibatch of the update, counted from outside."""
    seen: list[set[int]] = [set() for _ in trainer.ppo.shards]
    gradient = trainer.ppo._gradient

    def noting(chosen: list[Minibatch]) -> tuple[float, dict[str, float]]:
        for own, some in zip(seen, chosen, strict=True):
            own |= set(some.segments.tolist())
        return gradient(chosen)

    trainer.ppo._gradient = noting  # type: ignore[method-assign]
    trainer.update()
    return sum(map(len, seen)) / trainer.ppo.geometry.num_segments


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("update_epochs", [1, 3])
def test_coverage_is_reported(shards: int, update_epochs: int) -> None:
    trainer = make_trainer(shards=shards, update_epochs=update_epochs, **PRIORITISED)
    for _ in range(2):  # and each iteration's coverage is its own
        trainer.ingest()
        share = covered(trainer)
        assert trainer.ppo.end_iteration()["train/coverage"] == pytest.approx(share)
        assert 0.2 < share <= 1.0
        assert share < 1.0 or update_epochs > 1  # three passes may well miss nothing
        trainer.clock.advance(1, 0)


def test_coverage_without_anything_to_prefer_is_about_64_percent() -> None:
    trainer = make_trainer(
        sampling="prioritised",
        minibatch=32,
        update_epochs=1,
        num_envs=16,
        steps=64,
        envs_per_group=4,
    )
    trainer.ingest()
    for shard in trainer.ppo.shards:
        shard.priorities = np.zeros_like(shard.priorities)
    assert len(trainer.update()) == 32
    coverage = trainer.ppo.end_iteration()["train/coverage"]
    assert coverage == pytest.approx(1 - (1 - 1 / 32) ** 32, abs=0.04)


def test_uniform_minibatches_have_no_weights_and_nothing_to_report() -> None:
    trainer = make_trainer(horizon=4)
    trainer.ingest()
    assert all(chosen.weights is None for chosen in trainer.first_order())
    assert covered(trainer) == 1.0
    assert "train/coverage" not in trainer.ppo.end_iteration()


def test_priorities_with_alpha_0_and_all_ratios_1_give_the_gradient_of_uniform_ones() -> None:
    """Weights of 1 are no weights."""
    gradients = []
    for sampling in ("uniform", "prioritised"):
        trainer = make_trainer(sampling=sampling, horizon=4, priority_alpha=0.0)
        trainer.ingest()
        weights = None if sampling == "uniform" else torch.ones(8)
        trainer.ppo._gradient([Minibatch(torch.arange(8), weights)])
        gradients.append(trainer.ppo.flat.grad.clone())
        (chosen,) = trainer.first_order()
        assert chosen.weights is None or torch.allclose(chosen.weights, torch.ones(8))
    torch.testing.assert_close(gradients[0], gradients[1])
