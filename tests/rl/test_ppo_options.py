"""PPO learns with a squashed actor, with a learning rate that follows the KL divergence, and with
choices that are masked: toys, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
from etude.core.contracts import ActionSpec, Array, Observations
from etude.envs.array_task import ArrayTask, Outcome, State
from etude.planning import recipes


class Masked(ArrayTask):
    """The number that is shown is to be chosen; half of the others are not allowed, and choosing
    one is an error."""

    observations = {"state": 6, "allowed": 6}  # noqa: RUF012  declared once, read only
    action = ActionSpec("discrete", sizes=(6,))
    max_episode_steps = 4
    statistics = ("is_success",)
    shown = State(1, dtype="int64")
    allowed = State(6)
    right = State(1)

    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        self.right[rows] = 1.0
        for row, stream in zip(rows, streams, strict=True):
            self.shown[row] = stream.integers(6)
            self.allowed[row] = stream.permutation(6) < 3
            self.allowed[row, self.shown[row]] = 1.0

    def advance(self, actions: Array) -> Outcome:
        rows = np.arange(self.num_envs)
        assert self.allowed[rows, actions].all(), "a choice that the mask forbids"
        right = actions == self.shown[:, 0]
        self.right *= right[:, None]
        never = np.zeros(self.num_envs, bool)
        return Outcome(right.astype(np.float32), never, {"is_success": self.right[:, 0] > 0})

    def observe(self) -> Observations:
        state = np.eye(6, dtype=np.float32)[self.shown[:, 0]]
        return {"state": state, "allowed": self.allowed.astype(np.float32)}


def trained(folder: Path, steps: int, **fields: Any) -> etude.api.Run:
    small: dict[str, Any] = {
        "env": {"kind": "task"},
        "policy__hidden": (32,),
        "collector": {"num_envs": 32, "envs_per_group": 32},
        "algorithm__rollout_steps": 16,
        "algorithm__minibatch_size": 128,
        "algorithm__update_epochs": 4,
        "algorithm__learning_rate": 3e-3,
        "algorithm__gamma": 0.95,
        "clock": {"total_timesteps": steps, "cycles": 1, "iterations": 10},
        "evaluation": {"episodes": 32, "num_envs": 32, "envs_per_group": 32, "final_episodes": 0},
    }
    return etude.train(recipes.find("ppo").replace(**small | fields), folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy__squash": True, "policy__init_std": 0.5},
        {"algorithm__desired_kl": 0.02, "algorithm__learning_rate": 1e-5},
    ],
    ids=["squash", "desired_kl"],
)
def test_a_point_learns_to_seek(fields: dict[str, Any], tmp_path: Path) -> None:
    """The learning rate that follows the divergence begins where a constant one learns nothing
    (0 % success) and rises to a hundred times that."""
    run = trained(tmp_path / "run", 20_480, **fields)
    rows = run.rows()
    assert rows[0]["rollout/success_rate"] < 0.4
    assert run.evaluate(64)["eval/success_rate"] >= 0.9
    if "algorithm__desired_kl" in fields:
        assert max(row["train/learning_rate"] for row in rows) > 1e-3


def test_allowed_choices_are_learned(tmp_path: Path) -> None:
    env = {"kind": "task", "task": f"{__file__}:Masked"}
    run = trained(tmp_path / "run", 10_240, env=env, policy__action_mask="allowed")
    assert run.rows()[0]["rollout/success_rate"] < 0.8
    assert run.evaluate(64)["eval/success_rate"] >= 0.95
