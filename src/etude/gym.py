"""Etude's tasks in Gymnasium's registry: `import etude.gym; gymnasium.make("etude/Reach-v0")`.

`gymnasium.make("etude.gym:etude/Reach-v0")` imports this module itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.envs.adapters.as_gym import AsGymnasium, AsVectorEnv
    from etude.envs.config import EnvConfig
    from etude.planning.recipe import Recipe

TASKS = {
    "Reach": "reach",
    "PickPlace": "pick-place",
    "PickPlaceAnywhere": "pick-place-anywhere",
    "ImitateWalk": "imitate-walk",
    "WalkGo1": "walk-go1",
    "WalkGo1Rough": "walk-go1-rough",
}
"""{name in Gymnasium: recipe with the environment}."""
STATE = ("state",)


def register_tasks() -> None:
    """Register every task as etude/NAME-v0, single and vectorised."""
    from gymnasium.envs.registration import register

    for name, recipe in TASKS.items():
        register(
            id=f"etude/{name}-v0",
            entry_point=f"{__name__}:make",
            vector_entry_point=f"{__name__}:make_vec",
            kwargs={"task": recipe},
        )


def task_config(task: str | EnvConfig | Recipe, **options: Any) -> EnvConfig:
    """Config of the environment of a recipe or a kind, with changed options."""
    from etude.core.catalogue import RECIPES
    from etude.core.errors import UsageError
    from etude.core.explain import nearest
    from etude.envs.config import ENVS, EnvConfig
    from etude.planning import recipes
    from etude.planning.recipe import Recipe

    if isinstance(task, EnvConfig):
        config = task
    elif isinstance(task, Recipe):
        config = task.task
    elif task in RECIPES.names():
        config = recipes.find(task).task
    elif ENVS.has(task):
        config = ENVS.make(task)
    else:
        near = nearest(task, [*RECIPES.names(), *ENVS.names()])
        hint = f"did you mean '{near}'? " if near else ""
        raise UsageError(
            f"There is no task '{task}'; {hint}`etude list` shows the recipes, whose tasks can be "
            "made; use gymnasium.make for tasks of Gymnasium."
        )
    return config.replace(**options)


def make_vec(
    task: str | EnvConfig | Recipe,
    num_envs: int = 1,
    observations: Sequence[str] | None = STATE,
    threads: int = 1,
    **options: Any,
) -> AsVectorEnv:
    """Make a `gymnasium.vector.VectorEnv` of `num_envs` environments, with automatic resets.

    task: a recipe or its name ("walk-go1"), a kind of environment, module:Class, or a config.
    observations: names to return, None for all; by default "state" alone.
    threads: of the physics. options: fields of the task's config, such as max_episode_steps=100.
    """
    from etude.envs.adapters.as_gym import AsVectorEnv

    return AsVectorEnv(task_config(task, **options).make(num_envs, threads), observations)


def make(
    task: str | EnvConfig | Recipe, observations: Sequence[str] | None = STATE, **options: Any
) -> AsGymnasium:
    """Make a `gymnasium.Env` of a task; see `make_vec`."""
    from etude.envs.adapters.as_gym import AsGymnasium

    return AsGymnasium(task_config(task, **options), observations)


__all__ = ["TASKS", "make", "make_vec", "register_tasks"]

register_tasks()
