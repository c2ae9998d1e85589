"""Evaluations a person asks for, and the one that ends a training: played, shown and kept."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.planning.recipe import Recipe
from etude.reports import evaluation, fresh
from etude.reports.evaluation import Report
from etude.runs import files

Say = Callable[[str], None]


def examine(
    recipe: Recipe, path: Path, episodes: int | None, seed: int | None, video: bool, say: Say
) -> dict[str, Any]:
    """Play fresh episodes of a run's best policy into a new folder; its metrics and files.

    A run without an environment is judged on the episodes that were held out of its dataset.
    """
    if recipe.env is None:
        module, _, function = recipe.algorithm.report.partition(":")
        metrics: dict[str, Any] = getattr(import_module(module), function)(recipe, path, say)
        return metrics
    if video:
        # Where nothing is filmed, nothing that draws is loaded.
        from etude.reports import film

        film.check(recipe)
    report = Report(fresh.play(recipe, path, episodes, seed))
    say(_shown(report))
    folder = evaluation.new_folder(path, report.fresh.step)
    report.write(folder)
    made: list[Path] = []
    if video:
        made = film.film(recipe, path, report.fresh, report.scenes, folder)
    say(f"Kept in {folder}: {', '.join(sorted(name.name for name in folder.iterdir()))}")
    return {**report.metrics(), "folder": str(folder), "films": [str(name) for name in made]}


def finish(recipe: Recipe, path: Path, say: Say) -> None:
    """The evaluation at the end of training, as the recipe says; a policy has it once.

    That of a run which had ended before is shown again as it was: it would be the same.
    """
    episodes = recipe.evaluation.final_episodes
    if not episodes or recipe.env is None:
        return
    folder = evaluation.label_folder(path, fresh.step_of(path), "final")
    known = evaluation.stored(folder)
    if known is not None:
        say(f"{known}Played when the run ended; kept in {folder}")
        return
    report = Report(fresh.play(recipe, path, episodes))
    say(_shown(report))
    files.make_folder(folder)
    report.write(folder)
    say(f"Kept in {folder}")


def _shown(report: Report) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    return report.render(width, color=sys.stdout.isatty())
