"""Evaluations of a run's policy on fresh episodes, with their reports and films."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from etude.core import user_code
from etude.core.catalogue import load_attribute
from etude.core.errors import EtudeError, UsageError
from etude.core.progress_bar import bar
from etude.evaluate import OFFLINE, fresh
from etude.evaluate.report import SUMMARY, TEXT, Report
from etude.planning import recipes
from etude.planning.loading import chosen_path, recipe_with_sentence
from etude.planning.recipe import Recipe, code_roots, metrics_of
from etude.runs import files
from etude.runs.folder import RunFolder
from etude.training.logs.outputs import LoggedRun, apart

Say = Callable[[str], None]
BEST = "best"


def label_folder(run: Path, step: int, label: str) -> Path:
    """evaluations/<step>-<label> in the folder of a run."""
    path = RunFolder(run).evaluation(step)
    return path.with_name(f"{path.name}-{label}")


def new_folder(run: Path, step: int) -> Path:
    """Make evaluations/<step>-fresh, with a number after it if the folder exists."""
    folder, number = label_folder(run, step, "fresh"), 1
    files.make_folder(folder.parent)
    while True:
        try:
            files.new_folder(folder)
        except files.DiskFault:
            if not folder.exists():
                raise
            number += 1
            folder = label_folder(run, step, f"fresh-{number}")
        else:
            files.fsync_folder(folder.parent)
            return folder


def keep_metrics(
    recipe: Recipe,
    metrics: dict[str, Any],
    folder: Path,
    say: Say,
    printed: Collection[str] = (),
) -> dict[str, Any]:
    """Print the metrics that are not in `printed`, and write all of them to summary.json."""
    about = {metric.name: metric.about for metric in metrics_of(recipe) if metric.about}
    for name, value in metrics.items():
        if name not in printed:
            say(f"{about.get(name, name):<48}{value:>10.3g}")
    files.replace_file(folder / SUMMARY, [json.dumps(metrics, indent=2).encode()])
    _say_kept(folder, say)
    return {**metrics, "folder": str(folder)}


def _say_kept(folder: Path, say: Say) -> None:
    say(f"Kept in {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


def examine(
    recipe: Recipe,
    path: Path,
    episodes: int | None,
    seed: int | None,
    video: bool,
    say: Say,
    checkpoint: str = BEST,
    stochastic: bool = False,
    small: bool = False,
) -> dict[str, Any]:
    """Evaluate a policy of a run, keep the report in a new folder, and return its metrics.

    seed: default `fresh.new_seed`. checkpoint: "best", "latest" or a step. stochastic: sample
    actions, as in training. small: small films. A run without an environment is evaluated on its
    held-out episodes.
    """
    if recipe.env is None:
        if checkpoint != BEST or stochastic:
            raise UsageError(
                f"{path} learned from a dataset and is evaluated on the episodes held out, as it "
                "is: leave --checkpoint and --stochastic out."
            )
        kind = recipe.algorithm.offline_evaluation
        metrics: dict[str, Any] = load_attribute(OFFLINE.get(kind, kind))(recipe, path, say)
        return metrics
    if video:
        from etude.evaluate import film  # loads what draws

        film.check(recipe)
    policy = chosen_path(path, checkpoint)
    recipe = recipe_with_sentence(recipe, policy)
    seed = fresh.new_seed(recipe) if seed is None else seed
    report = played(recipe, policy, episodes, seed, stochastic)
    say(_for_terminal(report))
    for name in _changed_code(recipe, path):
        say(f"The code {name} has changed since this run began: these are episodes of the new one.")
    folder = new_folder(path, report.fresh.step)
    report.write(folder)
    films = []
    if video:
        films = film_report(recipe, policy, report, folder, say, small)
    _say_kept(folder, say)
    return {**report.metrics(), "folder": str(folder), "films": [str(name) for name in films]}


def _changed_code(recipe: Recipe, path: Path) -> list[str]:
    """Names of code that has changed since the run began."""
    try:
        was = RunFolder(path).manifest().get("code", {})
    except EtudeError:  # damaged, or a policy that was copied out of its run
        return []
    return user_code.differing(was, user_code.compute_hashes(code_roots(recipe)))


def film_report(
    recipe: Recipe,
    policy: Path,
    report: Report,
    folder: Path,
    say: Say,
    small: bool = True,
    title: str = "",
) -> list[Path]:
    """Film typical episodes of an evaluation into its folder; return the files."""
    from etude.evaluate import film

    film.check(recipe)
    say(f"Filming: {', '.join(dict.fromkeys(report.scenes)) or 'an episode'}.")
    if formats := film.formats():
        say(formats)
    size = film.SMALL if small else film.SIZE
    return film.film(recipe, policy, report.fresh, report.scenes, folder, size, title)


def finish(recipe: Recipe, path: Path, say: Say) -> None:
    """Evaluate the best policy at the end of training, once, as the recipe says.

    If this was done before, show the report again.
    """
    episodes = recipe.evaluation.final_episodes
    if not episodes or recipe.env is None:
        return
    folder = label_folder(path, fresh.step_of(path), "final")
    if (folder / SUMMARY).is_file() and (folder / TEXT).is_file():  # it is complete
        say(f"{(folder / TEXT).read_text()}Played when the run ended; kept in {folder}")
        _log_final(recipe, path, folder, say)
        return
    report = played(recipe, path, episodes)
    say(_for_terminal(report))
    files.make_folder(folder)
    if recipe.evaluation.final_video:
        try:
            film_report(recipe, path, report, folder, say)
        except EtudeError as error:
            say(f"The final evaluation was not filmed. {error}")
    report.write(folder)
    say(f"Kept in {folder}")
    _log_final(recipe, path, folder, say)


def _log_final(recipe: Recipe, path: Path, folder: Path, say: Say) -> None:
    """Add the metrics of the final evaluation to the logs of its run, which are closed."""
    found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    numbers = {k: v for k, v in found.items() if k.startswith("eval/")}
    metrics = {f"final/{name.removeprefix('eval/')}": v for name, v in numbers.items()}
    pictures = {f"final/{file.stem}": file for file in sorted(folder.glob("*.png"))}
    run = LoggedRun(path, recipe.model_dump(mode="json"), say, recipes.title(recipe))
    for kind in recipe.logs.kinds():
        apart(f"The log {kind.kind}", kind.add_final)(
            run, int(found["policy_step"]), metrics, pictures
        )


def played(
    recipe: Recipe,
    path: Path,
    episodes: int | None,
    seed: int | None = None,
    stochastic: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Report:
    """Play fresh episodes of the policy at a path, with a progress bar in a terminal.

    check: called after every step of a group, in its thread; may raise to end the evaluation.
    """
    with bar("Evaluating", "episodes") as show:

        def tick(done: float, total: float) -> None:
            check()
            show(done, total)

        return Report(fresh.play(recipe, path, episodes, seed, stochastic, tick))


def _for_terminal(report: Report) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    return report.render(width, color=sys.stdout.isatty())
