"""The declarations of all metrics that a run may log."""

from __future__ import annotations

from etude.metrics.declared import COUNTERS, EPISODES, Metrics
from etude.planning.recipe import Recipe


def metrics_of(recipe: Recipe) -> Metrics:
    """What the kinds in a recipe declare, and what every run and every environment logs."""
    played = () if recipe.env is None else EPISODES + recipe.env.metrics
    curricula = recipe.curriculum.metrics + recipe.motions.metrics
    return recipe.algorithm.metrics + COUNTERS + played + recipe.rewards.metrics + curricula
