"""Rows without an agent: whatever stands in them, nothing that is learned can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.core.contracts import Fragment
from etude.core.keys import Key
from etude.core.trees import digest
from etude.models.policies import PolicyConfig
from toy_envs import ACTIONS, VanishingEnv
from toys import Trainer, fragment_bits, make_trainer

MLP = PolicyConfig(hidden=(8,))
LSTM = PolicyConfig(kind="lstm", hidden=(8,), units=6)
POLICIES = {"mlp": MLP, "lstm": LSTM}


def vanishing(
    kind: str = "mlp", action: str = "box", garbage: float = 0.0, **options: object
) -> Trainer:
    envs = [VanishingEnv(2, ACTIONS[action], garbage=garbage) for _ in range(4)]
    chosen = {"horizon": 4, "learning_rate": 0.01, **options}
    trainer = make_trainer(envs=envs, policy=POLICIES[kind], **chosen)
    with torch.no_grad():
        for i, p in enumerate(trainer.ppo.policy.parameters()):
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return trainer


def test_the_toy_vanishes_and_comes_back() -> None:
    trainer = vanishing()
    trainer.collect()
    arrays = trainer.ppo.buffers[0].arrays
    present = arrays["present"]
    assert 0.2 < present.mean() < 0.8
    came, went = present[:, 1:] & ~present[:, :-1], ~present[:, 1:] & present[:, :-1]
    assert came.sum() > 5
    assert went.sum() > 5
    done = arrays["terminated"] | arrays["truncated"]
    assert done[:, :-1][went].all()
    assert not done[~present].any()
    assert (arrays["obs/state"][:, 1:, 0][came] == 0).all()  # an episode's first step
    assert not arrays["obs/state"][~present].any()


def spoil(fragments: list[Fragment], *names: str) -> None:
    """Write nonsense wherever no agent was."""
    stream = Key(1, ("nonsense",)).generator()
    for f in fragments:
        nobody = ~f.present
        if "obs" in names:
            f.obs["state"][nobody] = stream.normal(0, 5, (int(nobody.sum()), 4))
            last = nobody[:, -1] | (f.terminated | f.truncated)[:, -1]
            f.last_obs["state"][last] = stream.normal(0, 5, (int(last.sum()), 4))
        if "actions" in names:
            if f.actions.dtype.kind == "i":
                f.actions[nobody] = 1 - np.minimum(f.actions[nobody], 1)
            else:
                f.actions[nobody] = stream.normal(0, 2, f.actions[nobody].shape)
            f.log_probs[nobody] += stream.normal(0, 1, int(nobody.sum()))
        if "rewards" in names:
            f.rewards[nobody] = stream.normal(0, 50, int(nobody.sum()))


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("action", ["box", "discrete"])
@pytest.mark.parametrize("options", [{}, {"sampling": "prioritised", "advantages": "vtrace"}])
def test_nonsense_in_absent_steps_changes_nothing(
    kind: str, action: str, options: dict[str, str]
) -> None:
    """Bit for bit: statistics, every gradient step, and the weights after two iterations."""
    runs = []
    for names in ((), ("obs", "actions")):
        trainer = vanishing(kind, action, shards=2, entropy_coef=0.01, value_clip=0.1, **options)
        ppo, found = trainer.ppo, []
        for _ in range(2):
            fragments = trainer.collect()
            spoil(fragments, *names)
            found.append(ppo.ingest(fragments, trainer.clock))
            found += [
                {"advantages": shard.advantages[shard.present].double().sum().item()}
                for shard in ppo.shards
            ]
            found += [metrics.values for metrics in trainer.update()]
            found.append(ppo.end_iteration())
            trainer.clock.advance(1, 0)
        state = {**ppo.state_dict(), "policy": ppo.policy_parts()[0]}
        runs.append((found, digest(state)))
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("kind", POLICIES)
def test_rewards_of_absent_steps_reach_no_gradient(kind: str) -> None:
    gradients = []
    for names in ((), ("rewards",)):
        trainer = vanishing(kind, normalise_rewards=False)
        fragments = trainer.collect()
        spoil(fragments, *names)
        variance = trainer.ppo.ingest(fragments, trainer.clock)
        trainer.ppo._gradient(trainer.first_order())
        gradients.append((variance, digest({"gradient": trainer.ppo.flat.grad})))
    assert gradients[0] == gradients[1]


def test_rewards_of_absent_steps_reach_no_reward_scale() -> None:
    moments = []
    for names in ((), ("rewards",)):
        trainer = vanishing()
        for _ in range(2):
            fragments = trainer.collect()
            spoil(fragments, *names)
            trainer.ppo.ingest(fragments, trainer.clock)
            trainer.clock.advance(1, 0)
        moments.append(digest(trainer.ppo.scaler.state_dict()["moments"]))
    assert moments[0] == moments[1]


@pytest.mark.parametrize("kind", POLICIES)
def test_an_environment_that_shows_nonsense_changes_nothing(kind: str) -> None:
    """From the rollout on: moments of the normaliser, actions of those who are there, episodes."""
    runs = []
    for garbage in (0.0, 7.0):
        trainer = vanishing(kind, garbage=garbage)
        found: list[object] = []
        for _ in range(2):
            fragments = trainer.collect()
            for f in fragments:
                seen = {"actions": f.actions[f.present], "log_probs": f.log_probs[f.present]}
                found.append(digest({**seen, **f.episodes, **f.moments["state"]}))
            trainer.ppo.ingest(fragments, trainer.clock)
            found += [metrics.values for metrics in trainer.update()]
            found.append(trainer.ppo.end_iteration())
            trainer.clock.advance(1, 0)
        runs.append((found, digest(trainer.ppo.policy_parts()[0])))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_average_1_and_statistics_are_of_those_who_are_there(shards: int) -> None:
    trainer = vanishing(shards=shards)
    trainer.ingest()
    present = torch.cat([shard.present for shard in trainer.ppo.shards])
    weights = torch.cat([s.weights for s in trainer.ppo.shards if s.weights is not None])
    assert float(weights.mean()) == pytest.approx(1.0, rel=1e-6)
    assert (weights[~present] == 0).all()
    assert len(weights[present].unique()) == 1
    advantages = torch.cat([s.advantages for s in trainer.ppo.shards])[present].double()
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    values = torch.cat([s.values for s in trainer.ppo.shards])[present].double()
    returns = torch.cat([s.returns for s in trainer.ppo.shards])[present].double()
    variance = 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
    again = trainer.ppo.ingest(trainer.collect(), trainer.clock)
    assert again.keys() == {"train/explained_variance"}
    fresh = vanishing(shards=shards)
    assert fresh.ingest()["train/explained_variance"] == pytest.approx(variance, abs=1e-4)


def test_where_everyone_is_there_no_step_has_a_weight() -> None:
    trainer = make_trainer()
    trainer.ingest()
    assert all(shard.weights is None for shard in trainer.ppo.shards)
    assert all(shard.present.all() for shard in trainer.ppo.shards)


def test_a_loss_is_the_mean_over_those_who_are_there() -> None:
    """With the whole buffer in one minibatch it is that of the present steps alone."""
    trainer = vanishing(minibatch=128, horizon=1, action="discrete", entropy_coef=0.1)
    ppo = trainer.ppo
    trainer.ingest()
    trainer.update()
    (chosen,) = trainer.first_order()
    loss, metrics = ppo._gradient([chosen])
    found, shard = ppo.flat.grad.clone(), ppo.shards[0]
    there = torch.nonzero(shard.present[:, 0])[:, 0]
    shard.weights = None
    alone, values = ppo._gradient([chosen._replace(segments=there)])
    assert loss == pytest.approx(alone, rel=1e-4)
    assert metrics == pytest.approx(values, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found, ppo.flat.grad, rtol=1e-3, atol=1e-6)


def test_the_normaliser_counts_those_who_are_there() -> None:
    trainer = vanishing(shards=2)
    trainer.ingest()
    arrays = trainer.ppo.buffers[0].arrays
    seen = arrays["obs/state"][arrays["present"]].astype(np.float64)
    trainer.ppo.end_iteration()
    normaliser = trainer.ppo.policy.normalisers["state"]
    assert float(normaliser.count) == len(seen)
    np.testing.assert_allclose(normaliser.mean, seen.mean(0), atol=1e-12)
    np.testing.assert_allclose(normaliser.m2 / len(seen), seen.var(0), rtol=1e-10)


@pytest.mark.parametrize("horizon", [4, 16])
def test_a_memory_begins_anew_with_those_who_come(horizon: int) -> None:
    """The ratio is 1 wherever somebody is, on arrival inside a segment and at its start."""
    trainer = vanishing("lstm", horizon=horizon, minibatch=128, garbage=3.0)
    trainer.iterate()  # Where all states were zero.
    for _ in range(3):
        trainer.ingest()
        arrays, (shard,) = trainer.ppo.buffers[0].arrays, trainer.ppo.shards
        judged = trainer.ppo.policy.evaluate(shard.features, shard.actions, shard.memory)
        change = (judged.log_probs - shard.log_probs).detach().abs()
        assert float(change[shard.present].max()) <= 1e-5
        first = arrays["present"][:, ::horizon] & (arrays["obs/state"][:, ::horizon, 0] == 0)
        for name in ("h", "c"):
            assert not arrays[f"state/{name}"][first].any()
            assert arrays[f"state/{name}"][~first].any()
        trainer.update()
        trainer.ppo.end_iteration()
        trainer.clock.advance(1, 0)


def test_segments_without_anyone_have_no_priority() -> None:
    trainer = vanishing(sampling="prioritised", horizon=1, minibatch=32)
    trainer.ingest()
    (shard,) = trainer.ppo.shards
    count = int(shard.present.sum())
    assert count > 32
    draw = shard.draw(Key(0), 4, 32, trainer.ppo.config.priority_alpha, 0.5)
    assert shard.present[torch.from_numpy(draw.segments).reshape(-1)].float().mean() > 0.99


def test_a_group_in_which_nobody_is_teaches_nothing() -> None:
    """A whole rollout without anyone in one group, which is a shard of its own."""
    envs = [VanishingEnv(1, never=0 if g == 0 else None) for g in range(8)]
    trainer = make_trainer(envs=envs, policy=MLP, envs_per_group=1, shards=8)
    fragments = trainer.collect()
    assert float(fragments[0].moments["state"]["count"]) == 0.0
    trainer.ppo.ingest(fragments, trainer.clock)
    for metrics in trainer.update():
        assert np.isfinite(list(metrics.values.values())).all()
    trainer.ppo.end_iteration()
    arrays = trainer.ppo.buffers[0].arrays
    seen = arrays["obs/state"][arrays["present"]].astype(np.float64)
    normaliser = trainer.ppo.policy.normalisers["state"]
    np.testing.assert_allclose(normaliser.mean, seen.mean(0), atol=1e-12)
    assert bool(trainer.ppo.flat.data.isfinite().all())


def test_a_rollout_with_absent_rows_is_pure() -> None:
    one, two = vanishing("lstm"), vanishing("lstm", threads=2)
    one.collect()
    two.collector.load_state_dict(one.collector.state_dict())
    one.clock.advance(1, 0)
    two.clock.advance(1, 0)
    found = [[fragment_bits(f) for f in trainer.collect()] for trainer in (one, two)]
    assert found[0] == found[1]
