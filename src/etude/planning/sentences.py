"""The sentence that an environment tells, looked up in what a policy was told."""

from __future__ import annotations

from pathlib import Path

from etude.data.sentences import vector_of
from etude.envs.config import EnvConfig
from etude.planning.loading import policy_parts
from etude.planning.recipe import Recipe


def told(recipe: Recipe, path: str | Path) -> Recipe:
    """The recipe with the vector that the policy at `path` knows its environment's sentence by."""
    if recipe.env is None:
        return recipe
    return recipe.replace(env=telling(recipe.env, path))


def telling(env: EnvConfig, path: str | Path) -> EnvConfig:
    """The same of an environment alone."""
    if not env.sentence:
        return env
    known = policy_parts(Path(path))[1].get("sentences", {})
    return env.replace(task_vector=vector_of(env.sentence, known, path))
