"""RLPD: half of a batch from demonstrations, learning, refusals, plan, kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_off_policy import DIMS, OBS

import etude
from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.rewards.given import GIVEN
from etude.rl.rlpd import RLPD, RLPDConfig
from etude.runs.files import Disk
from etude.tasks.seek import Seek
from test_exact_resume import killed_runs

BOX = EnvSpec({"state": ArraySpec((OBS,))}, ActionSpec("box", (-1.0,) * DIMS, (1.0,) * DIMS), 9)


def kept(path: Path, spec: EnvSpec, episodes: list[tuple[Array, Array, Array]]) -> Path:
    """A sealed dataset of (states, actions, rewards); every episode terminates."""
    store = EpisodeStore.create(path, StoreGeometry(store_specs(spec), 1, 50), Disk())
    for states, actions, rewards in episodes:
        obs = {"state": states.astype(np.float32)}
        store.append_episode(obs, actions.astype(np.float32), rewards.astype(np.float32), True)
    store.seal().close()
    return path


def straight(path: Path, episodes: int) -> Path:
    """Straight ways of `seek`, with its rewards."""
    env, taken = Seek(1), []
    for number in range(episodes):
        states = [env.reset(Key(number))["state"][0]]
        actions, rewards, over = [], [], False
        while not over:
            actions.append(np.clip(states[-1][2:] / 0.1, -1, 1))
            result = env.step(actions[-1][None].astype(np.float32))
            rewards.append(result.reward[0])
            over = bool(result.terminated[0])
            states.append((result.final_obs if over else result.obs)["state"][0])
        taken.append((np.array(states), np.array(actions), np.array(rewards)))
    return kept(path, env.spec, taken)


def agent_of(dataset: Path, **fields: Any) -> RLPD:
    config = RLPDConfig(dataset=str(dataset), **fields)
    small = PolicyConfig(
        kind="squashed",
        hidden=(16,),
        activation="relu",
        critic_reads=("state",),
        layer_norm="critic",
    )
    policy = make_policy(small, BOX, Key(5, ("policy",)))
    return config.make(policy, [None], GIVEN, Key(5, ("critics",)), torch.device("cpu"))


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in which all numbers are 1."""
    episode = (np.ones((5, OBS)), np.ones((4, DIMS)), np.ones(4))
    return kept(tmp_path_factory.mktemp("rlpd") / "ones", BOX, [episode])


def test_a_share_of_every_batch_is_demonstrated(ones: Path, tmp_path: Path) -> None:
    shape = StoreGeometry(store_specs(BOX), 1, 50)
    own = EpisodeStore.create(tmp_path / "own", shape, Disk())
    states, actions, rewards = np.zeros((5, OBS)), np.zeros((4, DIMS)), np.zeros(4)
    own.append_episode(
        {"state": states.astype(np.float32)},
        actions.astype(np.float32),
        rewards.astype(np.float32),
        True,
    )
    for share, shown in ((0.5, 32), (0.25, 16)):
        agent = agent_of(ones, share=share)
        steps = agent.sample(own, np.random.default_rng(0), 64).steps
        assert float(steps.rewards.sum()) == shown
        assert float(steps.actions.sum()) == shown * DIMS
        assert agent.config.model_copy(update={"batch_size": 64}).replayed == 64 - shown


def recipe_of(dataset: Path, **fields: Any) -> etude.Recipe:
    small = {
        "env": {"kind": "task"},
        "policy__hidden": (32, 32),
        "algorithm__dataset": str(dataset),
        "algorithm__num_critics": 3,
        "algorithm__rollout_steps": 16,
        "algorithm__train_batches": 64,
        "algorithm__actor_interval": 1,
        "algorithm__batch_size": 64,
        "algorithm__learning_rate": 2e-3,
        "algorithm__warmup_steps": 256,
        "algorithm__gamma": 0.95,
        "algorithm__capacity": 10_000,
        "algorithm__alpha": 0.02,
        "clock": {"total_timesteps": 2_048, "cycles": 1, "iterations": 8},
        "evaluation__final_episodes": 0,
    }
    return etude.recipes.rlpd().replace(**{**small, **fields})


@pytest.mark.rotated
def test_a_point_learns_with_demonstrations_and_the_plan_is_kept(tmp_path: Path) -> None:
    clock = {"total_timesteps": 3_072, "cycles": 1, "iterations": 12}
    recipe = recipe_of(straight(tmp_path / "data", 20), clock=clock)
    plan, run = etude.plan(recipe), etude.train(recipe, tmp_path / "run")
    assert run.summary()["counts"]["updates"] == plan.counts["updates"]
    assert run.evaluate(50, checkpoint="latest")["eval/success_rate"] >= 0.9


def test_the_plan_says_how_many_gradient_steps_an_environment_step_has(tmp_path: Path) -> None:
    """The paper takes 20."""
    recipe = recipe_of(straight(tmp_path / "data", 2))
    steps = recipe.collector.num_envs * recipe.algorithm.rollout_steps
    for ratio in (0.25, 1, 20):
        batches = int(ratio * steps)
        notes = " ".join(etude.plan(recipe.replace(algorithm__train_batches=batches)).notes)
        said = f"{ratio:g} gradient steps per environment step"
        assert (said in notes) == (ratio < 20)
        assert (f"--algorithm.train-batches {20 * steps}" in notes) == (ratio < 20)


def test_killed_and_resumed(tmp_path: Path) -> None:
    clock = {"total_timesteps": 1_152, "cycles": 1, "iterations": 1}
    recipe = recipe_of(
        straight(tmp_path / "data", 5),
        clock=clock,
        algorithm__train_batches=4,
        policy__hidden=(16,),
        evaluation__every="4 cycles",
        evaluation__episodes=4,
        evaluation__num_envs=4,
        evaluation__envs_per_group=4,
        checkpoint__every="1 cycle",
    )
    hits = killed_runs(recipe, tmp_path, kills=5, seed=8)
    assert sum(hits.values()) == 5


def test_what_does_not_fit_is_refused(ones: Path, tmp_path: Path) -> None:
    data = straight(tmp_path / "data", 2)
    for fields, said in (
        ({"algorithm__dataset": ""}, "There is no dataset"),
        ({"env": None}, "learns in an environment"),
        ({"policy__layer_norm": "off"}, "need layer norm"),
        ({"algorithm__subset": 5}, "subset 5 is more than the 3 critics"),
        ({"rewards": {"kind": "rrd"}}, "leave it at given"),
        ({"algorithm__dataset": str(ones)}, "The policy reads 'state'"),
    ):
        with pytest.raises(UsageError, match=said):
            etude.plan(recipe_of(data, **fields))
