"""SAC: its update is stable-baselines3's, and alpha goes where it should."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_off_policy import DIMS, OBS, plain_agent, random_batch, random_noise, weights

import etude
from etude.core.errors import UsageError
from etude.rl.sac import SAC
from etude.rl.sampling import Batch

SIZE = 256
HIDDEN = (64, 64)


def peer(agent: SAC) -> Any:
    """stable-baselines3's SAC with the same weights."""
    sb3 = pytest.importorskip("stable_baselines3", reason="the extra `bench` is not installed")
    config = agent.config
    model = sb3.SAC(
        "MlpPolicy",
        blank_env(),
        learning_rate=config.learning_rate,
        tau=1.0 - config.polyak,
        gamma=config.gamma,
        ent_coef="auto" if config.alpha is None else config.alpha,
        policy_kwargs={"net_arch": list(HIDDEN)},
        buffer_size=1,
        device="cpu",
    )
    model.set_logger(sb3.common.logger.Logger(None, []))
    dtype = agent.actor_optimizer.flat.data.dtype
    model.policy.to(dtype)
    for ours, theirs in pairs(agent, model):
        theirs.data.copy_(ours)
    if config.alpha is None:
        model.log_ent_coef.data = model.log_ent_coef.data.to(dtype)
    return model


def blank_env() -> Any:
    """Spaces alone: nothing is ever stepped."""
    import gymnasium

    class Blank(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (DIMS,), np.float32)

    return Blank()


def layers(network: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Weight and bias of each linear layer of one of our networks."""
    found = [p.detach() for p in network.parameters()]
    return zip(found[::2], found[1::2], strict=True)


def critic_pairs(ours: Any, theirs: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for k, other in enumerate((theirs.qf0, theirs.qf1)):
        linear = [module for module in other if hasattr(module, "weight")]
        for (weight, bias), module in zip(layers(ours), linear, strict=True):
            yield weight[k].t(), module.weight
            yield bias[k, 0], module.bias


def pairs(agent: SAC, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every parameter of ours beside theirs."""
    linear = [module for module in model.actor.latent_pi if hasattr(module, "weight")]
    *hidden, (weight, bias) = layers(agent.policy.actor)
    for (own, shift), module in zip(hidden, linear, strict=True):
        yield own, module.weight
        yield shift, module.bias
    for part, head in enumerate((model.actor.mu, model.actor.log_std)):
        yield weight[part * DIMS : (part + 1) * DIMS], head.weight
        yield bias[part * DIMS : (part + 1) * DIMS], head.bias
    yield from critic_pairs(agent.critics, model.critic)
    yield from critic_pairs(agent.critic_target.module, model.critic_target)


def as_samples(batch: Batch) -> Any:
    """A batch as stable-baselines3 replays it."""
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    dtype = batch.rewards.dtype
    return ReplayBufferSamples(
        batch.obs["state"],
        batch.actions,
        batch.next_obs["state"],
        batch.terminated.to(dtype)[:, None],
        batch.rewards[:, None],
    )


def feed(patch: pytest.MonkeyPatch, model: Any, batch: Batch) -> None:
    """Let theirs replay this batch, in the precision it has."""
    patch.setattr(model.replay_buffer, "sample", lambda *_, **__: as_samples(batch))
    patch.setattr("stable_baselines3.common.policies.preprocess_obs", lambda obs, *_, **__: obs)


def train_peer(
    model: Any, batch: Batch, noise: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gradient step of theirs on this batch, with this noise."""
    numbers = iter(noise)

    def rsample(self: Any, sample_shape: Any = None) -> torch.Tensor:
        return self.loc + self.scale * next(numbers)

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributions.Normal, "rsample", rsample)
        feed(patch, model, batch)
        model.train(gradient_steps=1, batch_size=len(batch.rewards))


@pytest.mark.parametrize("alpha", [None, 0.2])
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("float64", 1e-10)])
def test_updates_equal_those_of_stable_baselines3(
    alpha: float | None, dtype: str, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one update and after three: actor, both critics, their targets and alpha."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        agent = plain_agent("sac", hidden=HIDDEN, alpha=alpha)
        model = peer(agent)
        for i in range(3):
            batch, noise = random_batch(SIZE, i), random_noise(agent, SIZE, i)
            metrics = agent.learn([batch], [noise])
            train_peer(model, batch, noise, monkeypatch)
            worst = max(float((a - b.detach()).abs().max()) for a, b in pairs(agent, model))
            assert worst < close
            logged = model.logger.name_to_value
            for name in ("critic_loss", "actor_loss", "ent_coef"):
                own = float(metrics[f"train/{name}"])
                assert own == pytest.approx(float(logged[f"train/{name}"]), rel=1e-5)
            if alpha is None:
                assert abs(float(agent.log_alpha - model.log_ent_coef.detach())) < close
                own = float(metrics["train/ent_coef_loss"])
                assert own == pytest.approx(float(logged["train/ent_coef_loss"]), abs=1e-6)
    finally:
        torch.set_default_dtype(before)


def test_acting_equals_stable_baselines3() -> None:
    """Observations beyond 10 are not clipped."""
    agent = plain_agent("sac", hidden=HIDDEN)
    model = peer(agent)
    obs = torch.randn(32, OBS) * 30
    ours = agent.policy.act({"state": obs}, {}, None).actions.detach()
    theirs, _ = model.predict(obs.numpy(), deterministic=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_alpha_follows_the_entropy() -> None:
    """Certain policies make entropy dear, uncertain ones cheap; a given price stays."""
    for wanted, sign in ((-100.0, -1), (100.0, 1)):
        agent = plain_agent("sac", target_entropy=wanted)
        for i in range(3):
            agent.learn([random_batch(32, i)], [random_noise(agent, 32, i)])
        assert math.copysign(1, float(agent.log_alpha)) == sign
    fixed = plain_agent("sac", alpha=0.3)
    metrics = fixed.learn([random_batch(32)], [random_noise(fixed, 32)])
    assert float(fixed.log_alpha.exp()) == pytest.approx(0.3)
    assert "train/ent_coef_loss" not in metrics


def test_the_first_step_of_alpha_by_hand() -> None:
    agent = plain_agent("sac", learning_rate=0.01)
    batch, noise = random_batch(32), random_noise(agent, 32)
    _, log_probs = agent.policy.sample(agent.policy.prepare(batch.obs), noise[0])
    surplus = float(log_probs.detach().mean()) - DIMS
    metrics = agent.learn([batch], [noise])
    assert float(metrics["train/ent_coef"]) == 1.0
    assert float(metrics["train/ent_coef_loss"]) == 0.0  # log 1
    # Adam's first step is the learning rate, against the gradient -surplus.
    assert float(agent.log_alpha) == pytest.approx(math.copysign(0.01, surplus), rel=1e-4)


def test_one_step_with_random_critics_by_hand() -> None:
    """As in REDQ: the target is the minimum of two of three critics, the actor's value the mean."""
    agent = plain_agent("sac", num_critics=3, subset=2, gamma=0.9, alpha=0.3)
    batch, noise = random_batch(32), random_noise(agent, 32)
    policy, target = agent.policy, agent.critic_target.module
    x, after = (policy.prepare(obs) for obs in (batch.obs, batch.next_obs))
    with torch.no_grad():
        actions, log_probs = policy.sample(after, noise[1])
        every = target(after, actions)
        estimates = agent.critics(x, batch.actions)
        drawn, drawn_log_probs = policy.sample(x, noise[0])
    prepared, drawn_pairs = batch._replace(next_obs=after), set()
    for number in range(30):
        agent.num_updates = number
        agent.begin_step()
        found = agent.target(prepared, noise[1], torch.tensor([0.3]))
        for pair in ((0, 1), (0, 2), (1, 2)):
            value = every[list(pair)].min(0).values - 0.3 * log_probs
            wanted = batch.rewards + 0.9 * value * ~batch.terminated
            if torch.allclose(found, wanted):
                drawn_pairs.add(pair)
                break
        else:
            pytest.fail("the target is no pair's")
    assert drawn_pairs == {(0, 1), (0, 2), (1, 2)}

    agent.num_updates = 0
    agent.begin_step()
    wanted = agent.target(prepared, noise[1], torch.tensor([0.3]))
    metrics = agent.learn([batch], [noise])
    assert float(metrics["train/critic_loss"]) == pytest.approx(
        float((estimates - wanted).square().mean()), rel=1e-5
    )
    with torch.no_grad():
        mean_q = agent.critics(x, drawn).mean(0)
    assert float(metrics["train/actor_loss"]) == pytest.approx(
        float((0.3 * drawn_log_probs - mean_q).mean()), rel=1e-5
    )


def test_the_smallest_of_all_critics_is_the_default() -> None:
    """Of any number of them; their loss is the mean of their errors."""
    for num in (1, 4):
        agent = plain_agent("sac", num_critics=num, gamma=0.9, alpha=0.3)
        batch, noise = random_batch(32), random_noise(agent, 32)
        policy, target = agent.policy, agent.critic_target.module
        x, after = (policy.prepare(obs) for obs in (batch.obs, batch.next_obs))
        with torch.no_grad():
            actions, log_probs = policy.sample(after, noise[1])
            value = target(after, actions).min(0).values - 0.3 * log_probs
            estimates = agent.critics(x, batch.actions)
            drawn, drawn_log_probs = policy.sample(x, noise[0])
        assert len(estimates) == num
        wanted = batch.rewards + 0.9 * value * ~batch.terminated
        metrics = agent.learn([batch], [noise])
        error = (estimates - wanted).square().mean()
        assert float(metrics["train/critic_loss"]) == pytest.approx(float(error), rel=1e-5)
        with torch.no_grad():
            min_q = agent.critics(x, drawn).min(0).values
        loss = (0.3 * drawn_log_probs - min_q).mean()
        assert float(metrics["train/actor_loss"]) == pytest.approx(float(loss), rel=1e-5)


def test_the_actor_learns_every_so_many_steps() -> None:
    agent = plain_agent("sac", actor_interval=3)
    learned = [
        "train/actor_loss" in agent.learn([random_batch(16)], [random_noise(agent, 16)])
        for _ in range(6)
    ]
    assert learned == [False, False, True] * 2


def test_only_its_own_networks_feel_a_loss() -> None:
    """The actor's loss passes through the critics and leaves nothing in their gradient."""
    agent = plain_agent("sac")
    agent.learn([random_batch(16)], [random_noise(agent, 16)])
    grad = agent.critic_optimizer.flat.grad.clone()
    features = agent.policy.prepare(random_batch(16).obs)
    actions, _ = agent.policy.sample(features, random_noise(agent, 16)[0])
    agent.actor_optimizer.mean_gradient([agent.critics.min_q(features, actions).mean()])
    assert torch.equal(agent.critic_optimizer.flat.grad, grad)
    assert set(weights(agent)) == {"actor", "critics", "critic_target", "log_alpha"}


def test_the_plan_names_an_ensemble_and_refuses_a_subset_that_is_larger() -> None:
    recipe = etude.recipes.find("pick-place-sac")
    assert "critics" not in " ".join(etude.plan(recipe).lines)
    many = recipe.replace(
        algorithm__num_critics=5, algorithm__subset=2, algorithm__actor_interval=4
    )
    lines = " ".join(etude.plan(many).lines)
    assert "for 5 critics, 16 batches for the actor" in lines
    with pytest.raises(UsageError, match="subset 3 is more than the 2 critics: use 2 or fewer"):
        etude.plan(recipe.replace(algorithm__subset=3))
