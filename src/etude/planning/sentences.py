"""The sentence that an environment tells, looked up in what a policy was told."""

from __future__ import annotations

from pathlib import Path

from etude.experience.sentences import vector_of
from etude.planning.loading import policy_parts
from etude.planning.recipe import Recipe


def told(recipe: Recipe, path: str | Path) -> Recipe:
    """The recipe with the vector that the policy at `path` knows its environment's sentence by."""
    if recipe.env is None or not recipe.env.sentence:
        return recipe
    known = policy_parts(Path(path))[1].get("sentences", {})
    return recipe.replace(env__task_vector=vector_of(recipe.env.sentence, known, path))
