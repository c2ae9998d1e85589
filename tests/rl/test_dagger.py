"""DAgger: labels against the teacher's own actions, learning, another teacher, plan, kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bc import recipe_of as cloned
from test_bc import seek_dataset

import etude
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.segments import SegmentGeometry
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.dagger import DAgger, DAggerConfig, Teacher
from etude.tasks.seek import Seek
from test_exact_resume import killed_runs


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a policy that seeks."""
    folder = tmp_path_factory.mktemp("teacher")
    data = seek_dataset(folder / "seek", 60)
    return etude.train(cloned(data), folder / "run").path


def recipe_of(teacher: Path, **fields: Any) -> etude.Recipe:
    small = {
        "env": {"kind": "task"},
        "policy": {"kind": "lstm", "hidden": (32,), "units": 32, "init_std": 0.3},
        "algorithm": {
            "kind": "dagger",
            "teacher": str(teacher),
            "rollout_steps": 16,
            "horizon": 16,
            "minibatch_size": 128,
            "update_epochs": 4,
            "learning_rate": 3e-3,
        },
        "collector": {"num_envs": 32, "envs_per_group": 16},
        "clock": {"total_timesteps": 12_288, "cycles": 1, "iterations": 12},
        "evaluation__final_episodes": 0,
    }
    return etude.recipes.ppo().replace(name="student", **{**small, **fields})


def test_labels_and_loss_by_hand(teacher: Path) -> None:
    spec = Seek(2).spec
    small = PolicyConfig(hidden=(8,), init_std=0.5)
    policy: Any = make_policy(small, spec, Key(1))
    geometry = SegmentGeometry(2, 4, 1, 8, 1, 2)
    agent = DAgger(DAggerConfig(teacher=str(teacher)), policy, geometry, [], torch.device("cpu"))
    states = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    wanted = agent.teacher.actions({"state": states, "other": states})
    alone = etude.load_policy(teacher)
    for env in range(2):
        for step in range(4):
            assert np.allclose(alone.act(states[env, step]), wanted[env, step], atol=1e-6)


def test_a_student_learns_what_the_teacher_does_and_the_plan_is_kept(
    teacher: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(teacher)
    plan, run = etude.plan(recipe), etude.train(recipe, tmp_path / "run")
    assert run.summary()["counts"]["updates"] == plan.counts["updates"]
    assert run.evaluate(50, checkpoint="latest")["eval/success_rate"] >= 0.9
    losses = run.curves("train/imitation_loss")["train/imitation_loss"][1]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.rotated
def test_killed_and_resumed(teacher: Path, tmp_path: Path) -> None:
    recipe = recipe_of(
        teacher,
        clock={"total_timesteps": 8_192, "cycles": 1, "iterations": 1},
        evaluation__every="4 cycles",
        evaluation__episodes=4,
        evaluation__num_envs=4,
        evaluation__envs_per_group=4,
        checkpoint__every="1 cycle",
    )
    hits = killed_runs(recipe, tmp_path, kills=5, seed=9)
    assert sum(hits.values()) == 5


def test_another_teacher_is_noticed(teacher: Path) -> None:
    one = Teacher(teacher, torch.device("cpu"))
    policy: Any = make_policy(PolicyConfig(hidden=(8,)), Seek(2).spec, Key(1))
    geometry = SegmentGeometry(2, 4, 1, 8, 1, 2)
    config = DAggerConfig(teacher=str(teacher))
    agent = DAgger(config, policy, geometry, [], torch.device("cpu"))
    state = agent.state_dict()
    agent.load_state_dict(state)
    assert state["teacher_sha256"] == one.sha256
    with pytest.raises(UsageError, match="not the one this run began with"):
        agent.load_state_dict({**state, "teacher_sha256": "0" * 64})


def test_what_cannot_teach_is_refused(teacher: Path, tmp_path: Path) -> None:
    for fields, said in (
        ({"algorithm__teacher": ""}, "imitates a teacher"),
        ({"learner__shards": 2}, "in one shard"),
        ({"collector__lag": 1}, "in one shard"),
        ({"env": {"kind": "reach"}}, "reads 'state' of shape"),
        ({"algorithm__teacher": str(tmp_path)}, "."),
    ):
        with pytest.raises(UsageError, match=said):
            etude.plan(recipe_of(teacher).replace(**fields))
