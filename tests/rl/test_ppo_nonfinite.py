"""A NaN or an infinity is caught in the update it appears in, before anything is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.core.errors import NonFinite
from etude.core.trees import digest
from etude.rl.ppo import PPO
from toy_envs import ACTIONS, PoisonedEnv, ToyEnv
from toys import Trainer, make_trainer

BAD = [float("nan"), float("inf"), -float("inf")]


def fingerprint(trainer: Trainer) -> str:
    """Weights, normaliser and optimizer."""
    ppo = trainer.ppo
    return digest({"p": ppo.policy_parts()[0], "o": ppo.optimizer.state_dict()})


def refused(trainer: Trainer) -> NonFinite:
    """The error of the next iteration, which must leave everything as it was."""
    before = fingerprint(trainer)
    with pytest.raises(NonFinite) as caught:
        trainer.iterate()
    assert fingerprint(trainer) == before
    return caught.value


def poisoned(where: str, value: float, at: int = 2) -> Trainer:
    """Group 2 (rows 4 and 5) gives a bad number."""
    envs: list[Any] = [ToyEnv(2) for _ in range(4)]
    envs[2] = PoisonedEnv(2, where, value, at)
    return make_trainer(envs=envs)


def holds_it(error: NonFinite, value: float) -> bool:
    """Whether the reproduction has the bad number in it."""
    arrays = [np.asarray(array) for array in error.arrays.values()]
    same = np.isnan if np.isnan(value) else (lambda array: array == value)
    return any(bool(same(array).any()) for array in arrays if array.dtype.kind == "f")


@pytest.mark.parametrize("value", BAD)
def test_an_observation(value: float) -> None:
    error = refused(poisoned("observation", value))
    # A NaN reaches the action and is stopped in the rollout, an infinity is clipped on its way.
    row = "row 1 of its group" if np.isnan(value) else "environment 5"
    assert f"observation 'state' of {row}, step 2, column 2" in error.where
    assert holds_it(error, value)


@pytest.mark.parametrize("value", BAD)
def test_a_final_observation(value: float) -> None:
    error = refused(poisoned("final", value))
    assert "final observation 'state' of environment" in error.where
    assert "column 2" in error.where
    assert holds_it(error, value)


@pytest.mark.parametrize("value", BAD)
def test_a_reward(value: float) -> None:
    error = refused(poisoned("reward", value))
    assert "reward of environment 5, step 1" in error.where
    assert holds_it(error, value)


@pytest.mark.parametrize("value", BAD)
def test_the_observation_after_the_last_step(value: float) -> None:
    """It is acted on only in the next iteration, but its value is used in this one."""
    error = refused(poisoned("observation", value, at=16))
    assert "last observation 'state' of environment 5, step 16, column 2" in error.where
    assert holds_it(error, value)


def test_it_is_caught_in_a_later_iteration_too() -> None:
    trainer = poisoned("reward", float("nan"), at=40)
    trainer.iterate()
    trainer.iterate()
    assert "reward of environment 5, step 7" in refused(trainer).where


@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_an_action(kind: str) -> None:
    """A policy whose weights are broken names the first action (or its probability)."""
    trainer = make_trainer(action=ACTIONS[kind])
    with torch.no_grad():
        next(iter(trainer.ppo.policy.actor.parameters()))[0, 0] = float("nan")
    error = refused(trainer)
    log_prob = "log-probability of environment 0"
    expected = "action of row 0 of its group" if kind == "box" else log_prob
    assert f"{expected}, step 0" in error.where


@pytest.mark.parametrize("value", BAD[:2])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_loss(monkeypatch: pytest.MonkeyPatch, value: float, shards: int) -> None:
    """Even one whose gradient is finite: adding a constant changes no gradient."""
    trainer = make_trainer(shards=shards)
    good, calls = PPO.loss, []

    def broken(self: PPO, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, metrics = good(self, *arguments)
        calls.append(1)
        return (loss + value if len(calls) > 3 * shards else loss), metrics

    monkeypatch.setattr(PPO, "loss", broken)
    trainer.ingest()
    batches = trainer.ppo.batches(trainer.clock, trainer.key)
    for _ in range(3):
        next(batches)
    before = fingerprint(trainer)
    with pytest.raises(NonFinite, match=r"the loss of a minibatch \(shard 0\)") as caught:
        next(batches)
    assert fingerprint(trainer) == before
    assert caught.value.arrays


def test_a_loss_with_a_bad_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    good = PPO.loss

    def broken(self: PPO, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, metrics = good(self, *arguments)
        return loss * float("nan"), metrics

    monkeypatch.setattr(PPO, "loss", broken)
    assert "the loss of a minibatch" in refused(trainer).where


@pytest.mark.parametrize("value", BAD)
def test_a_gradient_names_its_parameter(value: float) -> None:
    trainer = make_trainer()
    name, parameter = list(trainer.ppo.policy.named_parameters())[3]
    parameter.register_hook(lambda grad: grad * value)
    error = refused(trainer)
    assert f"'{name}'" in error.where
    assert "shard0_actions" in error.arrays


def test_numbers_too_large_to_add_up() -> None:
    trainer = make_trainer(normalise_rewards=False)
    fragments = trainer.collect()
    fragments[0].rewards[0, 0] = np.float32(3e38)
    trainer.ppo.ingest(fragments, trainer.clock)
    applied = [fingerprint(trainer)]
    batches = trainer.ppo.batches(trainer.clock, trainer.key)
    with pytest.raises(NonFinite, match="the loss of a minibatch"):
        applied.extend(fingerprint(trainer) for _ in batches)
    assert fingerprint(trainer) == applied[-1]
