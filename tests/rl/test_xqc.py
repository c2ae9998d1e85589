"""XQC: distributions and normalisation against formulas, one step by hand, checkpoints, plans."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_off_policy import make_learner, plain_agent, random_batch, random_noise
from torch.nn import functional

import etude
from etude.core.errors import UsageError
from etude.rl.xqc import EPSILON, MOMENTUM, STDS, XQCConfig, two_hot
from golden_runs import RUNS
from test_exact_resume import killed_runs

SIZE = 32


def shuffled(agent: Any) -> Any:
    """The agent with a random last layer, since all first estimates are 0."""
    last = agent.critics.get_parameter("weight1").data
    last.normal_(generator=torch.Generator().manual_seed(3))
    agent.critic_target.data.copy_(agent.critic_optimizer.data)
    return agent


@given(
    st.lists(st.floats(-3.0, 3.0, width=32), min_size=1, max_size=9),
    st.integers(3, 30),
)
def test_two_hot_divides_a_value_between_its_atoms(values: list[float], num: int) -> None:
    atoms = np.linspace(-1.5, 1.5, num)
    expected = np.zeros((len(values), num))
    for row, value in zip(expected, np.clip(values, -1.5, 1.5), strict=True):
        below = min(int((value + 1.5) / 3.0 * (num - 1)), num - 2)
        share = (value - atoms[below]) / (atoms[1] - atoms[0])
        row[below], row[below + 1] = 1.0 - share, share
    found = two_hot(torch.from_numpy(atoms), torch.tensor(values, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-9)
    np.testing.assert_allclose(found.sum(1), 1.0)
    np.testing.assert_allclose(found @ atoms, np.clip(values, -1.5, 1.5), atol=1e-9)


def logits_by_torch(critics: Any, x: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """Of every network, one after the other, by torch's own batch normalisation."""

    def normal(i: int, k: int, y: torch.Tensor) -> torch.Tensor:
        moments = [critics.get_parameter(f"{n}{i}")[k, 0].clone() for n in ("mean", "variance")]
        return functional.batch_norm(y, *moments, training=training, eps=EPSILON)

    found = []
    for k in range(critics.num):
        y = normal(0, 0, x)
        for i in range(2):
            weight, bias = (critics.get_parameter(f"{n}{i}")[k] for n in ("weight", "bias"))
            if i == 1:
                found.append(y @ weight + bias)
                continue
            scale = critics.get_parameter("norm_weight1")[k]
            y = torch.relu(normal(1, k, y @ weight) * scale + bias)
    return found


@pytest.mark.parametrize("training", [True, False])
def test_critics_normalise_as_torch_does(training: bool) -> None:
    agent = shuffled(plain_agent("xqc", num_critics=3))
    for name, parameter in agent.critics.named_parameters():
        if name.startswith(("mean", "variance", "norm_weight", "bias")):
            parameter.data += torch.rand(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    batch = random_batch(SIZE)
    features = agent.policy.prepare(batch.obs)
    inputs = torch.cat([features["critic"], batch.actions], -1)
    expected = torch.stack(logits_by_torch(agent.critics, inputs, training))
    found = agent.critics.logits(features, batch.actions, training)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if not training:  # A row's estimate does not depend on the others, of all or some networks.
        some = {name: x[:3] for name, x in features.items()}
        every, last = agent.critics(features, batch.actions), slice(2, None)
        torch.testing.assert_close(agent.critics(some, batch.actions[:3]), every[:, :3])
        chosen = agent.critics(features, batch.actions, last)
        torch.testing.assert_close(chosen, every[last])


def test_one_step_by_hand() -> None:
    agent = shuffled(plain_agent("xqc", gamma=0.9, alpha=0.3, polyak=0.8, learning_rate=1e-3))
    agent.returns.moments = {"count": np.asarray(4.0), "mean": np.zeros(1), "m2": np.ones(1)}
    batch, noise = random_batch(SIZE), random_noise(agent, SIZE)
    x, after = (agent.policy.prepare(obs) for obs in (batch.obs, batch.next_obs))
    span = STDS * 0.5
    critics, atoms = agent.critics, torch.linspace(-span, span, 51)
    with torch.no_grad():
        actions, log_probs = agent.policy.sample(after, noise[1])
        one, two = (
            torch.cat([x["critic"], batch.actions], -1),
            torch.cat([after["critic"], actions], -1),
        )
        first, second = logits_by_torch(critics, torch.cat([one, two]), True)
        values = torch.stack([part[SIZE:].softmax(-1) @ atoms for part in (first, second)])
        soft = values.amin(0) - 0.3 * log_probs
        targets = two_hot(atoms, batch.rewards + 0.9 * soft * (~batch.terminated))
        expected = sum(
            float(functional.cross_entropy(part[:SIZE], targets)) for part in (first, second)
        )
    before = {name: p.detach().clone() for name, p in critics.named_parameters()}
    metrics = agent.learn([batch], [noise])
    assert metrics["train/critic_loss"] == pytest.approx(expected / 2, rel=1e-4)

    lengths = critics.get_parameter("weight0").norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    inputs = torch.cat([one, two])
    for name, moment in (("mean0", inputs.mean(0)), ("variance0", inputs.var(0, unbiased=False))):
        wanted = before[name][0, 0].lerp(moment, MOMENTUM)
        torch.testing.assert_close(critics.get_parameter(name)[0, 0], wanted)
    now = agent.critic_optimizer.data
    old = torch.cat([p.reshape(-1) for p in before.values()])
    start = dict(zip(before, torch.split(old, [p.numel() for p in before.values()]), strict=True))
    start["span"] = torch.tensor([span])
    torch.testing.assert_close(
        agent.critic_target.data, torch.cat([*start.values()]).lerp(now, 1 - 0.8)
    )


def test_estimates_of_actor_and_evaluation_leave_the_statistics_alone() -> None:
    agent = shuffled(plain_agent("xqc"))
    agent.learn([random_batch(SIZE)], [random_noise(agent, SIZE)])
    before = agent.critic_optimizer.data.clone()
    features = agent.policy.prepare(random_batch(SIZE, 1).obs)
    actions = random_batch(SIZE, 1).actions
    first = agent.critics.min_q(features, actions)
    torch.testing.assert_close(agent.critics.min_q(features, actions), first, rtol=0, atol=0)
    assert torch.equal(agent.critic_optimizer.data, before)


def test_atoms_span_the_returns_of_all_episodes(tmp_path: Path) -> None:
    """Returns from the start of an episode, over several iterations, by the definition."""
    learner = make_learner(tmp_path, "xqc", gamma=0.9, shards=2)
    found, running = [], {}
    for _ in range(4):
        fragments = learner.collect()
        for group, part in enumerate(fragments):
            for row in range(len(part.rewards)):
                so_far = running.get((group, row), [])
                for step, reward in enumerate(part.rewards[row]):
                    so_far = [*so_far, float(reward)]
                    found.append(sum(x * 0.9**i for i, x in enumerate(reversed(so_far))))
                    if part.terminated[row, step] or part.truncated[row, step]:
                        so_far = []
                running[group, row] = so_far
        learner.agent.ingest(fragments, learner.clock)
        learner.clock.advance(0, 0)
    learner.agent.begin_step()
    expected = max(STDS * np.std(found), np.abs(found).max())
    for critics in (learner.agent.critics, learner.agent.following):
        assert float(critics.span) == pytest.approx(expected, rel=1e-6)
        assert float(critics.atoms[-1]) == -float(critics.atoms[0]) == float(critics.span)


def test_every_value_is_an_atom_before_there_are_rewards() -> None:
    agent = plain_agent("xqc")
    agent.learn([random_batch(SIZE)], [random_noise(agent, SIZE)])
    assert float(agent.critics.span) == 1.0
    assert all(math.isfinite(x) for x in agent.critic_optimizer.data)


def test_it_is_refused_where_it_cannot_learn(tmp_path: Path) -> None:
    recipe = etude.recipes.find("pick-place-sac")
    algorithm = {"kind": "xqc", "capacity": 200_000}
    with pytest.raises(UsageError, match="in place of layer norm"):
        etude.plan(recipe.replace(algorithm=algorithm, policy__layer_norm="critic"))
    offline = etude.recipes.find("offline")
    with pytest.raises(UsageError, match="xqc learns in an environment, whose returns"):
        etude.plan(
            offline.replace(
                algorithm={"kind": "xqc", "dataset": str(tmp_path)}, policy__kind="squashed"
            )
        )


@pytest.mark.rotated
def test_killed_and_resumed(tmp_path: Path) -> None:
    """With two shards and delayed actors: statistics, span and weights come back."""
    recipe = RUNS["sac"](tmp_path)
    sizes = ("rollout_steps", "batch_size", "warmup_steps", "train_batches", "capacity")
    kept = {name: getattr(recipe.algorithm, name) for name in sizes}
    recipe = recipe.replace(
        algorithm=XQCConfig(**kept, actor_interval=2, return_steps=2), learner__shards=2
    )
    assert sum(killed_runs(recipe, tmp_path, kills=5, seed=13).values()) == 5
