"""Implicit Q-learning: one step by hand, better actions preferred, shards, plan, kills."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_off_policy import part_of, plain_agent, random_batch, random_noise

import etude
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.runs.files import Disk
from test_exact_resume import killed_runs


def test_one_step_by_hand() -> None:
    agent = plain_agent("iql", expectile=0.8, temperature=2.0, max_weight=0.5, gamma=0.9)
    batch = random_batch(32)
    x, after = (agent.policy.prepare(obs) for obs in (batch.obs, batch.next_obs))
    with torch.no_grad():
        q = agent.critic_target.module.min_q(x, batch.actions)
        v, v_after = (agent.values(y).squeeze(-1) for y in (x, after))
        gap = q - v
        weight = torch.where(gap < 0, 0.2, 0.8)
        value_loss = (weight * gap**2).mean()
        targets = batch.rewards + 0.9 * v_after * (~batch.terminated)
        first, second = agent.critics(x, batch.actions)
        critic_loss = ((first - targets) ** 2).mean() + ((second - targets) ** 2).mean()
        preferred = (2.0 * gap).exp().clamp(max=0.5)
        errors = (agent.policy.actions(x) - batch.actions).square().mean(-1)
        actor_loss = (preferred * errors).mean()
    assert float(preferred.max()) == 0.5
    metrics = agent.learn([batch], [random_noise(agent, 32)])
    expected = {"value_loss": value_loss, "critic_loss": critic_loss, "actor_loss": actor_loss}
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(float(value), rel=1e-5)
    assert metrics["train/v_mean"] == pytest.approx(float(v.mean()), rel=1e-5)


def test_shards_give_the_gradient_of_the_whole() -> None:
    whole, halves = plain_agent("iql"), plain_agent("iql", 2)
    batch = random_batch(64)
    parts = [part_of(batch, slice(32 * s, 32 * s + 32)) for s in range(2)]
    whole.learn([batch], [random_noise(whole, 64)])
    halves.learn(parts, [random_noise(halves, 32)] * 2)
    for name in ("actor_optimizer", "critic_optimizer", "value_optimizer"):
        one, two = (getattr(agent, name).flat.grad for agent in (whole, halves))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def choices(path: Path, episodes: int) -> Path:
    """Episodes of one step: half of the actions are about .8 and rewarded, half -.8 and not."""
    spec = EnvSpec({"state": ArraySpec((2,))}, ActionSpec("box", (-1.0,), (1.0,)), 1)
    store = EpisodeStore.create(path, StoreGeometry(store_specs(spec), 1, 1), Disk())
    stream = np.random.default_rng(0)
    for number in range(episodes):
        good = number % 2
        action = np.array([[1.6 * good - 0.8 + 0.05 * stream.normal()]], np.float32)
        obs = {"state": stream.normal(size=(2, 2)).astype(np.float32)}
        store.append_episode(obs, action, np.array([good], np.float32), True)
    store.seal().close()
    return path


def recipe_of(dataset: Path, epochs: int = 1, iterations: int = 6) -> etude.Recipe:
    return etude.recipes.iql().replace(
        policy__actor_reads=("state",),
        policy__hidden=(32, 32),
        algorithm__dataset=str(dataset),
        algorithm__train_batches=50,
        algorithm__batch_size=64,
        algorithm__learning_rate=3e-3,
        clock={"epochs": epochs, "cycles": 1, "iterations": iterations},
    )


@pytest.mark.rotated
def test_what_did_better_is_imitated_and_the_plan_is_kept(tmp_path: Path) -> None:
    recipe = recipe_of(choices(tmp_path / "data", 200))
    plan, run = etude.plan(recipe), etude.train(recipe, tmp_path / "iql")
    assert run.summary()["counts"]["updates"] == plan.counts["updates"] == 300
    states = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    chosen = run.policy("latest").act(states)
    assert float(np.mean(chosen)) > 0.55
    indifferent = etude.train(recipe.replace(algorithm__temperature=0.0), tmp_path / "all")
    assert abs(float(np.mean(indifferent.policy("latest").act(states)))) < 0.3


def test_killed_and_resumed(tmp_path: Path) -> None:
    recipe = recipe_of(choices(tmp_path / "data", 40), epochs=8, iterations=4)
    recipe = recipe.replace(algorithm__train_batches=8, evaluation__every="2 epochs")
    hits = killed_runs(recipe, tmp_path, kills=5, seed=7)
    assert sum(hits.values()) == 5
