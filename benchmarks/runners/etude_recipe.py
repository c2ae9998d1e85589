"""Etude's own recipes for the tasks, as they are: other settings than those that all share."""

from __future__ import annotations

import etude
from benchmarks.progress import Progress, main
from benchmarks.runners.etude import RESUMES, run
from etude.planning.recipe import Recipe

RECIPES = {
    "halfcheetah": lambda: etude.recipes.halfcheetah(),
    "ant": lambda: etude.recipes.ant(),
    "pick-place": lambda: etude.recipes.pick_place_sac(),
    "walk-go1": lambda: etude.recipes.walk_go1(),
}


def recipe(progress: Progress) -> Recipe:
    return RECIPES[progress.task.name]()


if __name__ == "__main__":
    raise SystemExit(
        main(
            lambda progress: run(progress, recipe(progress)),
            package="",
            resumes=RESUMES,
            note="the recipe as it is: its value function also reads what the policy may not",
        )
    )
