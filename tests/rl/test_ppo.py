"""PPO: the loss by an independent formula, and every promise its text makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from etude.core.contracts import ActionSpec
from etude.core.keys import Key
from etude.core.trees import copy_arrays, digest
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.on_policy import Minibatch
from etude.rl.ppo import LOSS_METRICS, PPO, PPOConfig
from toy_envs import ACTIONS, DISCRETE
from toys import Trainer, TwoRanks, make_trainer, toy_buffer


def log_ratio(trainer: Trainer) -> float:
    """Largest |log ratio| on the first minibatch, as the loss sees it."""
    worst = 0.0
    for shard, chosen in zip(trainer.ppo.shards, trainer.first_order(), strict=True):
        order = chosen.segments
        features = {name: x[order] for name, x in shard.features.items()}
        judged = trainer.ppo.policy.evaluate(features, shard.actions[order], None)
        change = (judged.log_probs - shard.log_probs[order]).abs().max()
        worst = max(worst, float(change.detach()))
    return worst


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("shards", [1, 2])
def test_the_ratio_is_one_on_the_first_minibatch(kind: str, shards: int) -> None:
    trainer = make_trainer(action=ACTIONS[kind], shards=shards, learning_rate=1e-2)
    for _ in range(3):  # from the second iteration on the normaliser has moved
        trainer.ingest()
        assert log_ratio(trainer) <= 1e-5
        before = digest(dict(trainer.ppo.policy.normalisers.state_dict()))
        trainer.update()
        assert log_ratio(trainer) > 1e-5
        assert digest(dict(trainer.ppo.policy.normalisers.state_dict())) == before
        trainer.ppo.end_iteration()
        assert digest(dict(trainer.ppo.policy.normalisers.state_dict())) != before
        trainer.clock.advance(1, 0)


def test_the_ratio_is_one_for_a_sharp_policy_too() -> None:
    """Seven joints, a spread of 0.05 around means near 1: rounding must not look like learning."""
    action = ActionSpec("box", low=(-1.0,) * 7, high=(1.0,) * 7)
    trainer = make_trainer(action=action)
    with torch.no_grad():
        trainer.ppo.policy.log_std.fill_(-3.0)
        list(trainer.ppo.policy.actor.parameters())[-1].fill_(0.9)
    trainer.ingest()
    assert log_ratio(trainer) <= 1e-5


def test_the_normaliser_takes_in_exactly_what_was_collected() -> None:
    trainer = make_trainer(shards=2)
    seen = []
    for _ in range(2):
        trainer.ingest()
        seen.append(trainer.ppo.buffers[0].arrays["obs/state"].astype(np.float64).reshape(-1, 4))
        trainer.update()
        trainer.ppo.end_iteration()
        trainer.clock.advance(1, 0)
    everything, normaliser = np.concatenate(seen), trainer.ppo.policy.normalisers["state"]
    assert float(normaliser.count) == len(everything)
    np.testing.assert_allclose(normaliser.mean, everything.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(normaliser.m2 / len(everything), everything.var(0), rtol=1e-10)


def by_hand(trainer: Trainer, order: torch.Tensor) -> torch.Tensor:
    """PPO's loss on some segments of the only shard, written again from the definitions."""
    ppo, shard = trainer.ppo, trainer.ppo.shards[0]
    config = ppo.config
    x, policy = shard.features["actor"][order], ppo.policy
    w = [p for _, p in policy.actor.named_parameters()]
    mean = torch.tanh(x @ w[0].T + w[1]) @ w[2].T + w[3]
    normal = torch.distributions.Normal(mean, policy.log_std.exp())
    ratio = (normal.log_prob(shard.actions[order]).sum(-1) - shard.log_probs[order]).exp()
    a = shard.advantages[order]
    low, high = 1 - config.clip, 1 + config.clip
    gain = torch.where(a >= 0, ratio.clamp(max=high), ratio.clamp(min=low)) * a
    if shard.importance is not None:
        gain = gain * shard.importance[order]
    v = [p for _, p in policy.critic.named_parameters()]
    values = (torch.tanh(x @ v[0].T + v[1]) @ v[2].T + v[3]).squeeze(-1)
    returns, old = shard.returns[order], shard.values[order]
    near = torch.min(torch.max(values, old - config.value_clip), old + config.value_clip)
    value = torch.max((values - returns) ** 2, (near - returns) ** 2) / 2
    entropy = normal.entropy().sum(-1).mean()
    outside = (mean.abs() - 1).clamp(min=0).square().sum(-1).mean()
    return (
        -gain.mean()
        + config.value_coef * value.mean()
        - config.entropy_coef * entropy
        + config.bound_coef * outside
    )


def test_the_loss_and_its_gradient_by_hand() -> None:
    trainer = make_trainer(
        value_clip=0.05, entropy_coef=0.3, bound_coef=0.7, horizon=4, learning_rate=0.05
    )
    ppo = trainer.ppo
    with torch.no_grad():
        list(ppo.policy.actor.parameters())[-1].fill_(1.05)  # some means leave the bounds
    trainer.ingest()
    trainer.update()  # now ratios and values have moved, and some are clipped
    order = trainer.first_order()[0]
    _, metrics = ppo._gradient([order])
    assert 0.05 < metrics["train/clip_fraction"] < 0.95
    found = ppo.flat.grad.clone()
    loss, _ = ppo.loss(ppo.shards[0], order)
    expected = by_hand(trainer, order.segments)
    torch.testing.assert_close(loss, expected)
    ppo.flat.grad.zero_()
    expected.backward()
    torch.testing.assert_close(found, ppo.flat.grad, atol=1e-6, rtol=1e-4)


def stale_trainer(**config: Any) -> Trainer:
    """One whose experience an older policy collected, as with a lag."""
    trainer = make_trainer(**config)
    trainer.ppo.is_stale = True
    fragments = trainer.collect()
    with torch.no_grad():
        trainer.ppo.flat.data.mul_(0.7)
        trainer.ppo.policy.log_std.sub_(0.4)
    trainer.ppo.ingest(fragments, trainer.clock)
    return trainer


@pytest.mark.parametrize("way", ["gae", "vtrace"])
def test_the_clip_is_around_the_weights_at_the_updates_start(way: str) -> None:
    """However old the experience is, nothing is outside the clip before the first step."""
    trainer = stale_trainer(advantages=way, value_clip=0.05)
    ppo = trainer.ppo
    order = trainer.first_order()[0]
    collected = torch.from_numpy(ppo.buffers[0].arrays["log_probs"]).reshape(-1, 1)[order.segments]
    drift = (ppo.shards[0].log_probs[order.segments] - collected).exp()
    # The older policy is far off.
    assert float(((drift < 0.8) | (drift > 1.2)).float().mean()) > 0.4
    loss, metrics = ppo._gradient([order])
    assert metrics["train/clip_fraction"] == 0.0
    assert abs(metrics["train/approx_kl"]) < 1e-6
    # The older policy enters once, as a weight of at most 1.
    shard = ppo.shards[0]
    torch.testing.assert_close(shard.importance[order.segments], drift.clamp(max=1.0))
    found = ppo.flat.grad.clone()
    expected = by_hand(trainer, order.segments)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
    ppo.flat.grad.zero_()
    expected.backward()
    torch.testing.assert_close(found, ppo.flat.grad, atol=1e-6, rtol=1e-4)


def test_a_kl_limit_counts_from_the_updates_start() -> None:
    """A stale buffer would otherwise end every update before its first step."""
    trainer = stale_trainer(target_kl=0.05, learning_rate=1e-4)
    metrics = trainer.ppo.ingest(trainer.collect(), trainer.clock)
    assert metrics["train/behaviour_kl"] == pytest.approx(0.0, abs=1e-5)  # collected just now
    trainer = stale_trainer(target_kl=0.05, learning_rate=1e-4)
    assert trainer.ppo.shards[0].behaviour_kl > 1.5 * 0.05
    assert len(trainer.update()) == 8


def test_the_first_iterations_only_collect() -> None:
    """Nothing is learned before the normaliser has statistics; what was collected still counts."""
    trainer = make_trainer()
    trainer.clock.loops = replace(trainer.clock.loops, idle_iterations=1)
    weights = trainer.ppo.flat.data.clone()
    assert trainer.iterate() == []
    assert torch.equal(trainer.ppo.flat.data, weights)
    assert float(trainer.ppo.policy.normalisers["state"].count) == 8 * 16
    assert float(trainer.ppo.scaler.moments["count"]) == 8 * 16
    assert len(trainer.iterate()) == 8
    assert not torch.equal(trainer.ppo.flat.data, weights)


def test_advantages_and_returns_are_those_of_the_fragment() -> None:
    """End to end against an O(T^2) sum over the buffer, values asked of the policy itself."""
    trainer = make_trainer(normalise_rewards=False)
    ppo = trainer.ppo
    fragments = trainer.collect()
    finals = {
        (g * 2 + int(row), int(step)): f.finals.obs["state"][k]
        for g, f in enumerate(fragments)
        for k, (row, step) in enumerate(zip(f.finals.envs, f.finals.steps, strict=True))
    }
    ppo.ingest(fragments, trainer.clock)
    arrays, gamma, lam = ppo.buffers[0].arrays, ppo.config.gamma, ppo.config.gae_lambda

    def value(obs: np.ndarray) -> float:
        with torch.no_grad():
            return float(
                ppo.policy.values(ppo.policy.prepare({"state": torch.from_numpy(obs)}), None)
            )

    rows, steps = arrays["rewards"].shape
    expected = np.zeros((rows, steps))
    for row in range(rows):
        for t in range(steps):
            for k in range(t, steps):
                done = arrays["terminated"][row, k] or arrays["truncated"][row, k]
                if arrays["terminated"][row, k]:
                    after = 0.0
                elif done:
                    after = value(finals[row, k])
                elif k == steps - 1:
                    after = value(arrays["last_obs/state"][row])
                else:
                    after = value(arrays["obs/state"][row, k + 1])
                delta = arrays["rewards"][row, k] + gamma * after
                delta -= value(arrays["obs/state"][row, k])
                expected[row, t] += (gamma * lam) ** (k - t) * delta
                if done:
                    break
    shard = ppo.shards[0]
    found = (shard.returns - shard.values).reshape(rows, steps)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    normalised = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(
        shard.advantages.reshape(rows, steps), normalised, rtol=1e-3, atol=1e-4
    )


OFF = {"value_coef": 0.0, "entropy_coef": 0.0, "bound_coef": 0.0, "anchor_coef": 0.0}


def applied_gradient(trainer: Trainer) -> torch.Tensor:
    ppo = trainer.ppo
    order = trainer.first_order()
    ppo._gradient(order)
    ppo._apply(order, 0.0, 0.0)
    return ppo.flat.grad.clone()


@pytest.mark.parametrize(
    ("name", "value"),
    [("value_coef", 0.5), ("entropy_coef", 0.1), ("bound_coef", 0.5), ("anchor_coef", 0.5)],
)
def test_every_loss_term_moves_some_gradient(name: str, value: float) -> None:
    def gradient(**terms: float) -> torch.Tensor:
        trainer = make_trainer(max_grad_norm=1e9, **{**OFF, **terms})
        with torch.no_grad():
            list(trainer.ppo.policy.actor.parameters())[-1].fill_(1.5)
        trainer.ingest()
        return applied_gradient(trainer)

    change = gradient(**{name: value}) - gradient()
    assert float(change.abs().max()) > 1e-4
    # A term is linear in its weight.
    twice = gradient(**{name: 2 * value}) - gradient()
    torch.testing.assert_close(twice, 2 * change, atol=1e-5, rtol=1e-3)


def test_the_policy_term_moves_the_actor_alone() -> None:
    trainer = make_trainer(**OFF)
    trainer.ingest()
    trainer.ppo._gradient(trainer.first_order())
    moved = {
        name.split(".")[0]: float(p.grad.abs().max())
        for name, p in trainer.ppo.policy.named_parameters()
        if p.grad is not None
    }
    assert moved["actor"] > 0
    assert moved["critic"] == 0


def test_a_value_clip_changes_the_gradient_once_values_have_moved() -> None:
    gradients = []
    for clip in (None, 0.01):
        trainer = make_trainer(value_clip=clip, learning_rate=0.05)
        trainer.ingest()
        for shard in trainer.ppo.shards:
            shard.values = shard.values + 0.5
        trainer.ppo._gradient(trainer.first_order())
        gradients.append(trainer.ppo.flat.grad.clone())
    assert not torch.allclose(gradients[0], gradients[1], atol=1e-4)


@pytest.mark.parametrize("kind", ["box", "discrete"])
def test_the_entropy_bonus_raises_entropy(kind: str) -> None:
    """The sign test: only the bonus differs."""
    entropies = {}
    for coefficient in (0.0, 1.0):
        trainer = make_trainer(
            action=ACTIONS[kind], learning_rate=0.02, entropy_coef=coefficient, update_epochs=4
        )
        if kind == "discrete":
            with torch.no_grad():
                list(trainer.ppo.policy.actor.parameters())[-1].copy_(torch.tensor([2.0, 0.0, 0.0]))
        for _ in range(3):
            batches = trainer.iterate()
        entropies[coefficient] = -batches[-1].values["train/entropy_loss"]
    assert entropies[1.0] > entropies[0.0] + 0.05


def farthest_bias(iterations: int, **options: Any) -> float:
    """The bias of a policy's mean that is farthest from 0 after some iterations; it begins at 2."""
    trainer = make_trainer(learning_rate=0.02, update_epochs=10, **options)
    last = list(trainer.ppo.policy.actor.parameters())[-1]
    with torch.no_grad():
        last.fill_(2.0)
    for _ in range(iterations):
        trainer.iterate()
    return float(last.detach().abs().max())


def test_the_bound_loss_brings_the_mean_back() -> None:
    assert farthest_bias(6, bound_coef=10.0) < 1.7


def test_means_move_back_to_their_bounds_by_default() -> None:
    """Beyond them all samples are the same clipped action, and nothing is explored."""
    default, free = (farthest_bias(20, **options) for options in ({}, {"bound_coef": 0.0}))
    assert default < 1.95 < free


def test_a_kl_limit_ends_an_update_early_and_before_the_step() -> None:
    free, stopped = (
        make_trainer(learning_rate=0.05, update_epochs=5, target_kl=limit) for limit in (None, 1e-3)
    )
    all_batches, few = free.iterate(), stopped.iterate()
    assert 0 < len(few) < len(all_batches) == 20
    # Up to the limit nothing differs, and no batch beyond it was applied.
    assert [b.values for b in few] == [b.values for b in all_batches[: len(few)]]
    assert all(b.values["train/approx_kl"] <= 1.5e-3 for b in few)
    assert all_batches[len(few)].values["train/approx_kl"] > 1.5e-3
    assert stopped.clock.now.updates == len(few)
    assert float(stopped.ppo.optimizer.count) == len(few)


def test_the_learning_rate_falls_in_a_line() -> None:
    trainer = make_trainer(learning_rate=0.1, final_learning_rate=0.2, iterations=4)
    rates = [trainer.iterate()[-1].values["train/learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04])
    constant = make_trainer(learning_rate=0.1, iterations=2)
    assert [constant.iterate()[0].values["train/learning_rate"] for _ in range(2)] == [0.1, 0.1]


def test_a_gradient_is_never_longer_than_allowed() -> None:
    trainer = make_trainer(max_grad_norm=0.1)
    trainer.ingest()
    order = trainer.first_order()
    trainer.ppo._gradient(order)
    raw = trainer.ppo.flat.grad.clone()
    norm = trainer.ppo._apply(order, 0.0, 0.0)
    assert norm == pytest.approx(float(raw.norm()))
    assert norm > 0.1
    torch.testing.assert_close(trainer.ppo.flat.grad, raw * 0.1 / norm, rtol=1e-4, atol=1e-7)


def reloaded(trainer: Trainer, **config: float) -> Trainer:
    """The same run in new objects, as after a resume."""
    other = make_trainer(**config)
    state = copy_arrays(trainer.ppo.state_dict())
    other.ppo.load_policy(copy_arrays(trainer.ppo.policy_parts()[0]))
    other.ppo.load_state_dict(state)
    other.collector.load_state_dict(trainer.collector.state_dict())
    other.clock.load_state_dict(trainer.clock.state_dict())
    return other


def test_a_state_round_trip_changes_no_bit() -> None:
    config = {"anchor_coef": 0.1, "learning_rate": 0.01}
    one = make_trainer(**config)
    one.iterate()
    two = reloaded(one, **config)
    for _ in range(2):
        assert [b.values for b in one.iterate()] == [b.values for b in two.iterate()]
    assert digest(one.ppo.state_dict()) == digest(two.ppo.state_dict())
    assert digest(one.ppo.policy_parts()[0]) == digest(two.ppo.policy_parts()[0])


def test_a_state_is_gathered_before_it_is_read() -> None:
    """`state_dict` changes nothing and asks no other rank; `gather` does, and comes before it."""
    ppo, ranks = make_trainer(shards=2).ppo, TwoRanks()
    ppo.ranks, ppo.local_shards = ranks, ranks.part(2)
    ppo.scaler.running[:] = np.arange(8)
    before = digest(ppo.state_dict())
    assert digest(ppo.state_dict()) == before
    assert ranks.exchanges == 0
    ppo.gather()
    assert ppo.state_dict()["rewards"]["running"].tolist() == [0, 1, 2, 3] * 2
    assert ranks.exchanges == 1


def test_the_anchor_is_the_true_start_of_the_run() -> None:
    config = {**OFF, "anchor_coef": 0.3, "max_grad_norm": 1e9, "learning_rate": 0.02}
    trainer = make_trainer(**config)
    start = trainer.ppo.flat.data.clone()
    for _ in range(2):
        trainer.iterate()
    trainer = reloaded(trainer, **config)
    ppo = trainer.ppo
    assert torch.equal(ppo.initial, start)
    assert not torch.equal(ppo.flat.data, start)
    ppo.flat.grad.zero_()
    trainer.ingest()
    ppo._apply(trainer.first_order(), 0.0, 0.0)
    expected = 0.3 * 2 * (ppo.flat.data - start) / ppo.flat.num_tensors
    torch.testing.assert_close(ppo.flat.grad, expected)
    # It is the gradient of the mean over tensors of the squared distance.
    tensors = list(ppo.policy.parameters())
    moved, offset = 0.0, 0
    for p in tensors:
        origin = start[offset : offset + p.numel()].view_as(p)
        moved = moved + (p - origin).square().sum() / len(tensors)
        offset += p.numel()
    gradients = torch.autograd.grad(0.3 * moved, tensors)
    torch.testing.assert_close(torch.cat([g.reshape(-1) for g in gradients]), expected)


@pytest.mark.parametrize("shards", [2, 4])
def test_the_gradient_of_several_shards_is_that_of_one(shards: int) -> None:
    one, several = make_trainer(shards=1), make_trainer(shards=shards)
    fragments = [one.ingest(), several.ingest()]
    assert fragments[0] == pytest.approx(fragments[1])
    joined = {
        name: torch.cat([getattr(shard, name) for shard in several.ppo.shards])
        for name in ("advantages", "returns", "values", "log_probs", "actions")
    }
    for name, value in joined.items():
        torch.testing.assert_close(value, getattr(one.ppo.shards[0], name), msg=name)
    assert float(joined["advantages"].double().mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(joined["advantages"].double().std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    # The same steps, spread over the shards, give the same gradient and the same metrics.
    chosen, size = several.first_order(), len(several.ppo.shards[0].advantages)
    same = torch.cat([order.segments + s * size for s, order in enumerate(chosen)])
    (loss, metrics), (one_loss, one_metrics) = (
        several.ppo._gradient(chosen),
        one.ppo._gradient([Minibatch(same, None)]),
    )
    assert metrics == pytest.approx(one_metrics, abs=1e-5)
    assert loss == pytest.approx(one_loss, abs=1e-5)
    torch.testing.assert_close(several.ppo.flat.grad, one.ppo.flat.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_number_of_shards_is_deterministic(shards: int) -> None:
    results = []
    for threads in (1, 3):
        trainer = make_trainer(shards=shards, threads=threads)
        for _ in range(2):
            trainer.iterate()
        results.append(digest({"p": trainer.ppo.flat.data, "s": trainer.ppo.state_dict()}))
    assert results[0] == results[1]


def test_reward_scaling_reaches_the_returns() -> None:
    """Rewards of another unit give the same advantages and the same scaled returns."""
    found = []
    for unit in (1.0, 100.0):
        trainer = make_trainer()
        fragments = trainer.collect()
        for fragment in fragments:
            fragment.rewards *= unit
        trainer.ppo.ingest(fragments, trainer.clock)
        found.append(trainer.ppo.shards[0].returns)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_metrics_mean_what_they_are_called() -> None:
    trainer = make_trainer(learning_rate=0.05, action=DISCRETE)
    trainer.ingest()
    trainer.update()
    shard, order = trainer.ppo.shards[0], trainer.first_order()[0]
    _, values = trainer.ppo.loss(shard, order)
    metrics = dict(zip(LOSS_METRICS, values.tolist(), strict=True))
    order = order.segments
    with torch.no_grad():
        features = {name: x[order] for name, x in shard.features.items()}
        judged = trainer.ppo.policy.evaluate(features, shard.actions[order], None)
        change = judged.log_probs - shard.log_probs[order]
    assert metrics["train/approx_kl"] == pytest.approx(
        float((change.exp() - 1 - change).mean()), rel=1e-4
    )
    assert metrics["train/approx_kl"] > 0
    outside = (change.exp() < 0.8) | (change.exp() > 1.2)
    assert metrics["train/clip_fraction"] == pytest.approx(float(outside.float().mean()))
    assert metrics["train/entropy_loss"] == pytest.approx(-float(judged.entropy.mean()))


def test_a_broadcast_is_a_copy() -> None:
    trainer = make_trainer()
    broadcast = trainer.ppo.broadcast(trainer.clock)
    before = digest(broadcast.policy)
    trainer.iterate()
    assert digest(broadcast.policy) == before
    assert trainer.ppo.broadcast(trainer.clock).version == 1


@pytest.mark.parametrize("kind", ACTIONS)
def test_everything_is_made_where_it_is_used(kind: str) -> None:
    """On the meta device an operation with a tensor from elsewhere is refused."""
    cpu = make_trainer(action=ACTIONS[kind])
    cut, spec = cpu.ppo.geometry, cpu.collector._groups[0].env.spec
    meta = torch.device("meta")
    with meta:
        policy = make_policy(PolicyConfig(hidden=(16,)), spec, None)
    config = PPOConfig(rollout_steps=cut.steps, value_clip=0.1, bound_coef=0.1, entropy_coef=0.1)
    ppo = PPO(config, policy, cut, [toy_buffer(spec, 1, 1)], meta)
    cpu.ingest()
    part = cpu.ppo.buffers[0].part(slice(0, cut.num_envs))
    part.finals = cpu.collect()[0].finals
    shard = ppo.make_shard(part, part.rewards)
    ppo.shards = [shard]
    draw = shard.draw(Key(0), cut.num_minibatches, cut.segments_per_minibatch, 0.0, 1.0)
    order = shard.minibatch(draw, 0)
    loss, metrics = ppo.loss(shard, order)
    loss.backward()
    ppo.load_state_dict(cpu.ppo.state_dict())
    tensors = [loss, metrics, order.segments, ppo.flat.data, ppo.flat.grad, ppo.initial]
    tensors += [*ppo.optimizer.state_dict().values(), *vars(shard)["features"].values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
