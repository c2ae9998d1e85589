"""Names of tasks and recipes in captions and folders."""

from __future__ import annotations

from typing import Any

import pytest

from etude.planning import recipes
from etude.runs.folder import default_path


@pytest.mark.parametrize(
    ("recipe", "env", "title"),
    [
        ("reach", {}, "reach"),
        ("hopper", {}, "hopper"),
        ("ppo", {}, "CartPole-v1, ppo"),
        ("ppo", {"kind": "gym", "id": "package:Hopper-v5"}, "Hopper-v5, ppo"),
        ("sac", {"kind": "task", "task": "toy_envs.py:MotionEnv"}, "MotionEnv, sac"),
        ("reach", {"kind": "gym", "id": "Ant-v5"}, "Ant-v5, reach"),
        (
            "ppo",
            {"kind": "pettingzoo", "parallel": "mpe2.simple_spread_v3"},
            "simple_spread_v3, ppo",
        ),
        ("bc", None, "bc"),
    ],
)
def test_a_recipe_for_any_task_is_named_after_its_task(
    recipe: str, env: dict[str, Any] | None, title: str
) -> None:
    made = recipes.find(recipe)
    if env is None:
        assert made.env is None
    elif env:
        made = recipes.validated(made.model_dump(mode="json") | {"env": env}, "the test")
    assert recipes.title(made) == title


def test_runs_of_two_tasks_do_not_share_a_folder() -> None:
    made = recipes.find("ppo").replace(env__id="ALE/Pong-v5")
    assert default_path(recipes.title(made), 3).parent.as_posix() == "runs/ALE-Pong-v5-ppo"


def test_an_own_kind_of_environment_gives_its_class_name() -> None:
    env = recipes.find("reach").task.model_copy(update={"kind": "my_robot.py:Robot"})
    assert env.task_name == "Robot"
