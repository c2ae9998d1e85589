"""TD3: its update is stable-baselines3's, delay and targets included."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_off_policy import make_learner, plain_agent, random_batch, random_noise, weights
from test_sac import HIDDEN, SIZE, blank_env, critic_pairs, feed, layers

from etude.rl.sampling import Batch
from etude.rl.td3 import TD3


def peer(agent: TD3) -> Any:
    """stable-baselines3's TD3 with the same weights."""
    sb3 = pytest.importorskip("stable_baselines3", reason="the extra `bench` is not installed")
    config = agent.config
    model = sb3.TD3(
        "MlpPolicy",
        blank_env(),
        learning_rate=config.learning_rate,
        tau=1.0 - config.polyak,
        gamma=config.gamma,
        policy_delay=config.delay,
        target_policy_noise=config.target_noise,
        target_noise_clip=config.target_noise_clip,
        policy_kwargs={"net_arch": list(HIDDEN)},
        buffer_size=1,
        device="cpu",
    )
    model.set_logger(sb3.common.logger.Logger(None, []))
    model.policy.to(agent.actor_optimizer.flat.data.dtype)
    for ours, theirs in pairs(agent, model):
        theirs.data.copy_(ours)
    return model


def pairs(agent: TD3, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every parameter of ours beside theirs."""
    actors = ((agent.policy.actor, model.actor), (agent.actor_target.module, model.actor_target))
    for ours, theirs in actors:
        linear = [module for module in theirs.mu if hasattr(module, "weight")]
        for (weight, bias), module in zip(layers(ours), linear, strict=True):
            yield weight, module.weight
            yield bias, module.bias
    yield from critic_pairs(agent.critics, model.critic)
    yield from critic_pairs(agent.critic_target.module, model.critic_target)


def train_peer(
    model: Any, batch: Batch, noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gradient step of theirs on this batch, with this noise."""

    def normal(self: torch.Tensor, mean: float, std: float) -> torch.Tensor:
        return self.copy_(mean + std * noise[0])

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", normal)
        feed(patch, model, batch)
        model.train(gradient_steps=1, batch_size=len(batch.rewards))


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("float64", 1e-10)])
def test_updates_equal_those_of_stable_baselines3(
    dtype: str, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one to four updates: actor, both critics and all targets, which move at 2 and 4."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        agent = plain_agent("td3", hidden=HIDDEN)
        model = peer(agent)
        for i in range(4):
            batch, noise = random_batch(SIZE, i), random_noise(agent, SIZE, i)
            metrics = agent.learn([batch], [noise])
            train_peer(model, batch, noise, monkeypatch)
            worst = max(float((a - b.detach()).abs().max()) for a, b in pairs(agent, model))
            assert worst < close
            for name in ("critic_loss", "actor_loss"):
                if f"train/{name}" in metrics:
                    theirs = float(model.logger.name_to_value[f"train/{name}"])
                    assert float(metrics[f"train/{name}"]) == pytest.approx(theirs, rel=1e-5)
    finally:
        torch.set_default_dtype(before)


def test_the_actor_waits() -> None:
    agent = plain_agent("td3", delay=3, target_interval=2)
    for i in range(1, 7):
        before = weights(agent)
        metrics = agent.learn([random_batch(16, i)], [random_noise(agent, 16, i)])
        after = weights(agent)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        expected = {"critics"} | ({"actor"} if i % 3 == 0 else set())
        if i % 2 == 0:
            # At 2 the actor has not moved yet, and its target has nowhere to go.
            expected |= {"critic_target"} | ({"actor_target"} if i > 2 else set())
        assert moved == expected
        assert ("train/actor_loss" in metrics) == (i % 3 == 0)


def test_exploration_is_what_the_learner_says(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, "td3", warmup_steps=0, exploration=0.25)
    broadcast = learner.agent.broadcast(learner.clock).policy
    assert float(broadcast["exploration"]) == 0.25
    assert float(learner.agent.policy.exploration) == 0.0
    policy = learner.agent.policy
    policy.load_state_dict(broadcast)
    obs = {"state": torch.randn(4000, 4) * 0.1}
    noise = torch.from_numpy(policy.noise(np.random.default_rng(0), 1, 4000)[0])
    spread = (policy.act(obs, {}, noise).actions - policy.act(obs, {}, None).actions).std()
    assert float(spread.detach()) == pytest.approx(0.25, rel=0.05)


def test_a_run_from_another_policy_has_targets_of_its_own() -> None:
    agent, other = plain_agent("td3"), plain_agent("td3")
    for i in range(4):
        other.learn([random_batch(16, i)], [random_noise(other, 16, i)])
    agent.start_from(other.policy_parts()[0], None)
    assert torch.equal(weights(agent)["actor_target"], weights(other)["actor"])


@pytest.mark.parametrize("shards", [1, 2])
def test_the_actor_is_held_to_the_data_as_in_td3_bc(shards: int) -> None:
    """mse(pi, a) - Q / (coef mean|Q|): the paper's loss with alpha = 1 / coef, and its gradient."""
    agent = plain_agent("td3", shards, delay=1, behaviour_coef=0.4)
    before = copy.deepcopy(agent.policy)
    batches = [random_batch(SIZE, i) for i in range(shards)]
    noises = [random_noise(agent, SIZE, i) for i in range(shards)]
    metrics = agent.learn(batches, noises)
    chosen = [before.actions(before.prepare(b.obs)) for b in batches]
    worths = [
        agent.critics.first_q(before.prepare(b.obs), a)
        for b, a in zip(batches, chosen, strict=True)
    ]
    scale = 2.5 / torch.stack([q.detach().abs().mean() for q in worths]).mean()
    errors = [(a - b.actions).square().mean() for a, b in zip(chosen, batches, strict=True)]
    loss = sum(e - scale * q.mean() for e, q in zip(errors, worths, strict=True)) / shards
    assert float(metrics["train/actor_loss"]) == pytest.approx(loss.item(), rel=1e-5)
    expected = torch.autograd.grad(loss, list(before.parameters()))
    flat = torch.cat([g.reshape(-1) for g in expected])
    torch.testing.assert_close(agent.actor_optimizer.flat.grad, flat, rtol=1e-4, atol=1e-6)


def test_a_large_coefficient_is_imitation_alone() -> None:
    agent = plain_agent("td3", delay=1, behaviour_coef=1e6, learning_rate=1e-2)
    batch = random_batch(16)
    first, *_, last = (
        float(agent.learn([batch], [random_noise(agent, 16, i)])["train/behaviour_error"])
        for i in range(150)
    )
    assert last < 0.05 * first
