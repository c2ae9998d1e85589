"""What a recipe must fulfil beyond its own sizes: ranks and curricula."""

from __future__ import annotations

from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.planning.kinds import kinds_with
from etude.planning.recipe import Recipe
from etude.training.curriculum import Curriculum, NoCurriculum, SuccessCurriculum


def check_ranks(recipe: Recipe, size: int) -> None:
    """Refuse a number of ranks that cannot share the recipe's shards."""
    if size == 1:
        return
    shards = recipe.learner.shards
    if shards % size:
        fitting = [str(n) for n in range(1, shards + 1) if shards % n == 0]
        several = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if fitting[1:] else fitting[0]
        raise UsageError(
            f"{size:,} ranks cannot share learner.shards {shards:,} evenly: start {several} of "
            "them (torchrun --nproc-per-node), or train a run of other --learner.shards, which "
            "is another result."
        )
    if not recipe.algorithm.takes_ranks:
        raise UsageError(
            f"{recipe.algorithm.kind} learns in one process, and {size:,} ranks were started: "
            f"start it without torchrun, or use algorithm {kinds_with('takes_ranks', True)}."
        )
    if recipe.collector.kind != "local":
        raise UsageError(
            f"Each of {size:,} ranks collects with threads of its own: use --collector.kind local, "
            f"or one process with --collector.kind {recipe.collector.kind}."
        )


def make_curriculum(recipe: Recipe, spec: EnvSpec) -> Curriculum:
    """The curriculum a recipe asks for."""
    if recipe.motions.enabled:
        if recipe.curriculum.enabled:
            raise UsageError(
                "A run has one curriculum: leave out --curriculum.enabled or --motions.enabled."
            )
        if not spec.motions:
            raise UsageError(
                "This environment has no motions to choose from: leave out --motions.enabled."
            )
        if not {"motion", "is_success"} <= set(spec.statistics):
            raise UsageError(
                'This environment does not report "motion" and "is_success" of its episodes, which '
                "--motions.enabled goes by: add them to its statistics."
            )
        from etude.training.motion_curriculum import MotionCurriculum

        return MotionCurriculum(recipe.motions, len(spec.motions))
    if not recipe.curriculum.enabled:
        return NoCurriculum()
    if "is_success" not in spec.statistics:
        raise UsageError("This environment does not report success, which a curriculum goes by.")
    return SuccessCurriculum(recipe.curriculum)
