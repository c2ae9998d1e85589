"""What a recipe must be like where motions are imitated."""

from __future__ import annotations

from etude.core.errors import UsageError
from etude.planning.recipe import Recipe


def check_motions(recipe: Recipe, num: int) -> None:
    """Refuse evaluations in which some motions would be played more often than others."""
    config = recipe.evaluation
    if config.envs_per_group % num:
        group = num * max(1, round(config.envs_per_group / num))
        num_envs = group * max(1, round(config.num_envs / group))
        episodes = num_envs * (config.episodes // config.num_envs)
        raise UsageError(
            f"Evaluation plays each of the {num} motions equally often, and "
            f"evaluation.envs_per_group {config.envs_per_group} is no multiple of that: use "
            f"--evaluation.envs-per-group {group} --evaluation.num-envs {num_envs} "
            f"--evaluation.episodes {episodes}."
        )
    if config.final_episodes % num:
        near = num * max(1, round(config.final_episodes / num))
        raise UsageError(
            f"The {num} motions are each played equally often, and evaluation.final_episodes "
            f"{config.final_episodes} is no multiple of that: use --evaluation.final-episodes "
            f"{near}, or 0 for none."
        )
