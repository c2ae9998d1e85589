"""Runs that are rewarded for their style: planned, exact, refused where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
import glide
from etude.api import train
from etude.core.clock import ClockConfig
from etude.core.errors import UsageError
from etude.envs.named_task import TaskConfig
from etude.models.policies import PolicyConfig, make_policy
from etude.planning import recipes
from etude.planning.loading import policy_parts
from etude.planning.plan import render
from etude.planning.recipe import LearnerConfig
from etude.planning.recipes import Recipe
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.amp import AMPConfig
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig
from rank_runs import shared_run
from run_hash import run_hash
from toys import changed

TASK = f"{glide.__file__}:Glide"


def styled(iterations: int = 8, **sections: dict[str, Any]) -> Recipe:
    """Everything that has state at once: LSTM, two shards, collection ahead, a discriminator."""
    recipe = Recipe(
        name="glide",
        env=TaskConfig(task=TASK),
        collector=CollectorConfig(num_envs=16, envs_per_group=4, threads=2, lag=1),
        policy=PolicyConfig(kind="lstm", hidden=(8,), units=8),
        algorithm=PPOConfig(
            rollout_steps=16, horizon=8, minibatch_size=64, update_epochs=2, advantages="vtrace"
        ),
        rewards=AMPConfig(
            task_weight=0.0,
            hidden=(16,),
            updates=3,
            batch_size=32,
            replay_capacity=256,
            replay_per_iteration=64,
        ),
        learner=LearnerConfig(shards=2),
        clock=ClockConfig(total_timesteps=256 * iterations, iterations=2, cycles=1),
        evaluation=EvaluationConfig(every="2 cycles", episodes=8, num_envs=8, envs_per_group=8),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )
    return changed(recipe, **sections) if sections else recipe


def test_a_run_does_what_its_plan_says(tmp_path: Path) -> None:
    recipe = styled()
    run = train(recipe, tmp_path / "run")
    plan = etude.plan(recipe)
    assert run.summary()["counts"] == plan.to_json()["counts"]
    assert plan.levels["batches_per_iteration"] == 3 + 2 * 4
    # The first two of 8 iterations only collect.
    assert plan.counts["updates"] == 6 * (3 + 2 * 4)
    assert plan.data["gradient_samples"] == 6 * 2 * 256
    final = (run.path / "checkpoints" / "final").resolve()
    on_disk = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
    assert plan.bytes["checkpoint"] == pytest.approx(on_disk, rel=0.01)
    text = " ".join(render(plan).replace("│", " ").split())
    assert "before it, 3 gradient steps of the discriminator: 32 windows of the policy" in text
    assert "4 frames x 1 features" in text
    names = {f"amp/{n}" for n in ("loss", "style_reward", "agent_accuracy", "demo_accuracy")}
    assert names | {"amp/agent_logit", "amp/demo_logit", "amp/gradient_penalty"} <= set(
        run.rows()[-1]
    )


def test_the_policy_knows_nothing_of_style(tmp_path: Path) -> None:
    run = train(styled(2), tmp_path / "run")
    arrays, contract = policy_parts(run.path)
    assert set(contract["observations"]) == {"state"}
    alone = make_policy(styled().policy, glide.Glide(1).spec, None).state_dict()
    assert arrays.keys() == alone.keys()


@pytest.mark.parametrize("lag", [0, 1])
def test_threads_change_nothing(lag: int, tmp_path: Path) -> None:
    hashes = [
        run_hash(train(styled(6, collector={"threads": n, "lag": lag}), tmp_path / f"{n}").path)
        for n in (1, 3)
    ]
    assert hashes[0] == hashes[1]


def test_what_has_no_style_is_refused() -> None:
    with pytest.raises(UsageError, match=r"an observation 'style' and the method style_windows"):
        etude.plan(styled(env={"task": "etude.tasks.seek:Seek"}))
    with pytest.raises(UsageError, match="use algorithm ppo"):
        etude.plan(changed(recipes.find("sac"), rewards={"kind": "amp"}))
    with pytest.raises(UsageError, match="use algorithm sac or td3"):
        etude.plan(changed(recipes.find("reach"), rewards={"kind": "rrd"}))
    with pytest.raises(UsageError, match=r"rewards\.batch_size 33 does not divide over 2 shards"):
        etude.plan(styled(rewards={"batch_size": 33}))


def test_a_reference_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = glide.Glide(1).style_windows()
    for wrong, why in (
        (windows[:, 1:], r"gives \[197, 3, 1\]"),
        (windows[:0], r"gives \[0, 4, 1\]"),
        (windows.astype(np.float64), "float32"),
        (windows * np.float32(np.nan), "finite"),
    ):
        monkeypatch.setattr(
            "etude.rl.rewards.amp._reference",
            lambda config, wrong=wrong: (wrong, None),
        )
        with pytest.raises(UsageError, match=why):
            etude.plan(styled())


def test_style_alone_teaches_a_point_the_speed_of_the_reference(tmp_path: Path) -> None:
    recipe = styled(
        60,
        collector={"num_envs": 32, "envs_per_group": 16, "lag": 0, "threads": 1},
        policy={"kind": "mlp", "hidden": (32,), "init_std": 0.3},
        algorithm={
            "horizon": 1,
            "minibatch_size": 256,
            "update_epochs": 4,
            "advantages": "gae",
            "learning_rate": 2e-3,
            "gamma": 0.9,
        },
        rewards={"hidden": (32,), "updates": 4, "batch_size": 128, "learning_rate": 1e-3},
        learner={"shards": 1},
        clock={"total_timesteps": 512 * 60, "iterations": 5, "cycles": 1},
        evaluation={"every": "never", "episodes": 32, "num_envs": 32, "envs_per_group": 16},
        checkpoint={"every": "never"},
    )
    rows = train(recipe, tmp_path / "run").rows()
    assert abs(rows[0]["rollout/speed"]) < 0.25
    assert rows[-1]["eval/speed"] == pytest.approx(glide.SPEED, abs=0.06)


def test_ranks_that_share_a_discriminator_change_nothing(tmp_path: Path) -> None:
    shared_run(styled(4, learner={"shards": 4}), tmp_path, kills=0, seed=0)
