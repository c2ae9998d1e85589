"""The hard part of a motion is learned by practice in steps that uniform starts waste."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.api import train
from etude.planning import recipes
from etude.planning.recipe import Recipe
from toys import changed


def balancing(seed: int, **motions: Any) -> Recipe:
    content = recipes.find("ppo").model_dump(mode="json")
    content["env"] = {
        "kind": "task",
        "task": "balancing:Balancing",
        "evaluation_options": {"in_turn": True},
    }
    return changed(
        recipes.validated(content, "a test"),
        seed=seed,
        policy={"hidden": [32, 32]},
        collector={"num_envs": 64, "envs_per_group": 64, "threads": 1},
        algorithm={
            "rollout_steps": 16,
            "minibatch_size": 256,
            "update_epochs": 4,
            "learning_rate": 5e-4,
            "gamma": 0.95,
        },
        clock={"total_timesteps": 40_960, "cycles": 4, "iterations": 2},
        motions=motions,
        evaluation={
            "every": "1 cycle",
            "episodes": 64,
            "num_envs": 64,
            "envs_per_group": 64,
            "final_episodes": 0,
        },
        checkpoint={"every": "never"},
    )


@pytest.mark.rotated
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_hard_part_is_learned_with_practice(seed: int, tmp_path: Path) -> None:
    """Of 20 evaluations, those in which all eight motions are followed to their end."""
    whole = {}
    for enabled in (True, False):
        run = train(balancing(seed, enabled=enabled), tmp_path / str(enabled))
        success = [row["eval/success_rate"] for row in run.rows()]
        assert max(success[-4:]) >= 7 / 8  # the easy motions are learned either way
        whole[enabled] = sum(rate > 0.99 for rate in success)
    assert whole[True] >= 6
    assert whole[False] <= 2
