"""Evaluations: fresh episodes, played and kept as a table, a row per episode, and a summary."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from etude.core import code_hashes
from etude.core import progress as waits
from etude.core.catalogue import load_attribute
from etude.core.contracts import KINDS, Array
from etude.core.errors import EtudeError, UsageError
from etude.evaluate import OFFLINE, fresh
from etude.evaluate.fresh import FreshEpisodes
from etude.planning.loading import chosen_path
from etude.planning.recipe import Recipe, code_roots, metrics_of
from etude.planning.sentences import told
from etude.runs import files
from etude.runs.folder import RunFolder
from etude.training.evaluation import summarise
from etude.training.logs.outputs import LoggedRun, apart

Say = Callable[[str], None]
BEST = "best"
SUCCESS, FAILURE = "success", "failure"
EPISODES, SUMMARY, TEXT = "episodes.csv", "summary.json", "report.txt"
_Z = 1.959963984540054
"""Standard deviations either side of the middle that hold 95 %."""
_MILLIMETRES = ("placement_error", "drop_height", "final_distance")
"""Statistics in metres that are shown in millimetres."""
_SHOWN = 8


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """The 95 % interval of a success rate after Wilson: right for 0 and for all of them too."""
    if episodes < 1:
        return 0.0, 1.0
    share, spread = successes / episodes, _Z * _Z / episodes
    middle = share + spread / 2
    half = _Z * math.sqrt(share * (1 - share) / episodes + spread / (4 * episodes))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # Rounding must not leave a certainty out of its own interval.
    return min(max(low, 0.0), share), max(min(high, 1.0), share)


def kinds_of(played: FreshEpisodes) -> list[str]:
    """What became of each episode; [] where the environment does not report success."""
    names, episodes = played.spec.outcomes, played.episodes
    if names and "outcome" in episodes:
        return [names[int(number)] for number in episodes["outcome"]]
    if "is_success" in episodes:
        return [SUCCESS if success else FAILURE for success in episodes["is_success"]]
    return []


@dataclass(frozen=True)
class Report:
    """Fresh episodes, and what they show."""

    fresh: FreshEpisodes

    @property
    def kinds(self) -> list[str]:
        return kinds_of(self.fresh)

    @property
    def scenes(self) -> list[str]:
        """What each episode shows: its motion, where there are motions, and its kind."""
        kinds, motions = self.kinds, self.fresh.motions
        return [f"{m} {k}" for m, k in zip(motions, kinds, strict=True)] if motions else kinds

    @property
    def statistics(self) -> list[str]:
        """What the task reports besides success, kind and the terms of its reward."""
        others = ("return", "length", "is_success", *KINDS)
        names = [name for name in self.fresh.episodes if not name.startswith("reward/")]
        return [name for name in names if name not in others]

    @property
    def motions(self) -> Any:
        """A `MotionReport` of statistics per motion, or None where no motions are imitated."""
        if not self.fresh.spec.motions:
            return None
        from etude.evaluate.motion import MotionReport

        return MotionReport(self.fresh)

    def counts(self) -> dict[str, int]:
        """Episodes of each kind that occurred, successes first, then the most frequent."""
        counted = Counter(self.kinds)
        order = sorted(counted, key=lambda kind: (kind != SUCCESS, -counted[kind], kind))
        return {kind: counted[kind] for kind in order}

    def metrics(self) -> dict[str, Any]:
        """For programs: what training logs of its evaluations, the interval, and the kinds."""
        played, metrics = self.fresh, dict[str, Any](summarise(self.fresh.episodes))
        if "is_success" in played.episodes:
            low, high = wilson(int(played.episodes["is_success"].sum()), played.num_episodes)
            metrics |= {"eval/success_low": low, "eval/success_high": high}
            for name in self.statistics:
                values = played.episodes[name][played.episodes["is_success"] > 0]
                if values.size:
                    metrics.setdefault(f"eval/{name}_of_successes", float(values.mean()))
        return {
            **metrics,
            **(self.motions.metrics() if self.motions else {}),
            "kinds": self.counts(),
            "policy_step": played.step,
            "seed": played.seed,
            "stochastic": played.stochastic,
        }

    def csv(self) -> str:
        """A line per episode: its number, kind and motion, and what the environment reports."""
        played = self.fresh
        named = {"kind": self.kinds, "motion": played.motions}
        named = {title: names for title, names in named.items() if names}
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        numbers = [name for name in played.episodes if name not in KINDS]
        writer.writerow(["episode", *named, *numbers])
        for index in range(played.num_episodes):
            values = [f"{played.episodes[name][index]:.9g}" for name in numbers]
            writer.writerow([index, *(names[index] for names in named.values()), *values])
        return stream.getvalue()

    def render(self, width: int = 100, color: bool = False) -> str:
        """The tables a person reads."""
        played, stream = self.fresh, io.StringIO()
        console = Console(file=stream, width=width, force_terminal=color, highlight=False)
        console.print(
            f"{played.num_episodes} fresh episodes of the policy at step {played.step:,}, "
            f"{'stochastic' if played.stochastic else 'deterministic'}, seed {played.seed}"
        )
        if "is_success" in played.episodes:
            won = int(played.episodes["is_success"].sum())
            low, high = wilson(won, played.num_episodes)
            console.print(
                f"[bold]success {won / played.num_episodes:.1%}[/] "
                f"({won} of {played.num_episodes}; 95 % interval {low:.1%} to {high:.1%})"
            )
        console.print(self._numbers())
        if self.motions:
            console.print(self.motions.table())
        if self.kinds and won < played.num_episodes:
            console.print(self._failures())
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"

    def _numbers(self) -> Table:
        """Means over all episodes, and over successes and failures where there are both."""
        episodes = self.fresh.episodes
        parts: dict[str, Array] = {"all": np.ones(self.fresh.num_episodes, np.bool_)}
        success = episodes.get("is_success", np.zeros(0)) > 0
        if success.any() and not success.all():
            parts |= {"successes": success, "failures": ~success}
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("mean ± standard deviation")
        for name in parts:
            table.add_column(name, justify="right")
        apart = self.motions.statistics if self.motions else ()
        for name in ("return", "length", *(n for n in self.statistics if n not in apart)):
            title = {"return": "reward", "length": "length, steps"}.get(name, name)
            title, scale = (title, 1.0) if name not in _MILLIMETRES else (f"{title}, mm", 1e3)
            table.add_row(
                title.replace("_", " "),
                *(_spread(episodes[name][mask] * scale) for mask in parts.values()),
            )
        return table

    def _failures(self) -> Table:
        kinds, table = self.kinds, Table(box=None, pad_edge=False, header_style="dim")
        for name in ("failures", "count", "share", "episodes"):
            table.add_column(name, justify="left" if name in ("failures", "episodes") else "right")
        for kind, count in self.counts().items():
            if kind != SUCCESS:
                where = [index for index, other in enumerate(kinds) if other == kind]
                shown = ", ".join(map(str, where[:_SHOWN]))
                shown += ", ..." if len(where) > _SHOWN else ""
                table.add_row(kind, str(count), f"{count / len(kinds):.1%}", shown)
        return table

    def write(self, folder: Path) -> None:
        """episodes.csv, report.txt, where motions are imitated motions.csv and, once these are
        there, summary.json; the folder exists."""
        texts = {EPISODES: self.csv(), TEXT: self.render()}
        if self.motions:
            texts["motions.csv"] = self.motions.csv()
        texts[SUMMARY] = json.dumps(self.metrics(), indent=2) + "\n"
        for name, text in texts.items():
            files.replace_file(folder / name, [text.encode()])


def _spread(values: Array) -> str:
    return f"{values.mean():,.2f} ± {values.std():,.2f}"


def label_folder(run: Path, step: int, label: str) -> Path:
    """evaluations/<step>-<label> in a run's folder."""
    path = RunFolder(run).evaluation(step)
    return path.with_name(f"{path.name}-{label}")


def new_folder(run: Path, step: int) -> Path:
    """evaluations/<step>-fresh, or with a number after it: none is ever overwritten."""
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
    """Say metrics in the words that their kinds declare, without those `printed` before, and
    keep all of them in a folder's summary."""
    about = {metric.name: metric.about for metric in metrics_of(recipe) if metric.about}
    for name, value in metrics.items():
        if name not in printed:
            say(f"{about.get(name, name):<48}{value:>10.3g}")
    files.replace_file(folder / SUMMARY, [json.dumps(metrics, indent=2).encode()])
    say(f"Kept in {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    return {**metrics, "folder": str(folder)}


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
    """Play fresh episodes of a run's policy into a new folder; its metrics and files.

    checkpoint: "best", "latest" or a step. stochastic: actions are drawn, as in training. A run
    without an environment is evaluated on the episodes held out of its dataset.
    """
    if recipe.env is None:
        if checkpoint != BEST or stochastic:
            raise UsageError(
                f"{path} learned from a dataset and is evaluated on the episodes held out, as it "
                "is: leave --checkpoint and --stochastic out."
            )
        chosen = recipe.algorithm.offline_evaluation
        metrics: dict[str, Any] = load_attribute(OFFLINE.get(chosen, chosen))(recipe, path, say)
        return metrics
    if video:
        # Where nothing is filmed, nothing that draws is loaded.
        from etude.evaluate import film

        film.check(recipe)
    policy = chosen_path(path, checkpoint)
    recipe = told(recipe, policy)
    report = played(recipe, policy, episodes, seed, stochastic)
    say(_shown(report))
    for name in _changed_code(recipe, path):
        say(f"The code {name} has changed since this run began: these are episodes of the new one.")
    folder = new_folder(path, report.fresh.step)
    report.write(folder)
    made = []
    if video:
        size = film.SMALL if small else film.SIZE
        say(f"Filming: {', '.join(dict.fromkeys(report.scenes)) or 'an episode'}.")
        made = film.film(recipe, policy, report.fresh, report.scenes, folder, size)
    say(f"Kept in {folder}: {', '.join(sorted(name.name for name in folder.iterdir()))}")
    return {**report.metrics(), "folder": str(folder), "films": [str(name) for name in made]}


def _changed_code(recipe: Recipe, path: Path) -> list[str]:
    """Names of code that the run began with and that is not the same now."""
    try:
        was = RunFolder(path).manifest().get("code", {})
    except EtudeError:  # damaged, or a policy that was taken out of its run
        return []
    return code_hashes.differing(was, code_hashes.compute_hashes(code_roots(recipe)))


def finish(recipe: Recipe, path: Path, say: Say) -> None:
    """The evaluation at the end of training, as the recipe says; a policy has it once.

    That of a run which had ended before is shown again as it was: it would be the same.
    """
    episodes = recipe.evaluation.final_episodes
    if not episodes or recipe.env is None:
        return
    folder = label_folder(path, fresh.step_of(path), "final")
    if (folder / SUMMARY).is_file() and (folder / TEXT).is_file():  # it was written whole
        say(f"{(folder / TEXT).read_text()}Played when the run ended; kept in {folder}")
        _log_final(recipe, path, folder, say)
        return
    report = played(recipe, path, episodes)
    say(_shown(report))
    files.make_folder(folder)
    if recipe.evaluation.final_video:
        _film_final(recipe, path, report, folder, say)
    report.write(folder)
    say(f"Kept in {folder}")
    _log_final(recipe, path, folder, say)


def _film_final(recipe: Recipe, path: Path, report: Report, folder: Path, say: Say) -> None:
    """Film the final evaluation; the run has ended well even where it cannot be filmed."""
    from etude.evaluate import film

    try:
        film.check(recipe)
        say(f"Filming: {', '.join(dict.fromkeys(report.scenes)) or 'an episode'}.")
        film.film(recipe, path, report.fresh, report.scenes, folder, film.SMALL)
    except EtudeError as error:
        say(f"The final evaluation was not filmed. {error}")


def _log_final(recipe: Recipe, path: Path, folder: Path, say: Say) -> None:
    """Put the figures of an evaluation into the logs of its run, which have been closed."""
    found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    numbers = {k: v for k, v in found.items() if k.startswith("eval/")}
    metrics = {f"final/{name.removeprefix('eval/')}": v for name, v in numbers.items()}
    pictures = {f"final/{file.stem}": file for file in sorted(folder.glob("*.png"))}
    run = LoggedRun(path, recipe.model_dump(mode="json"), say)
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
    """Fresh episodes of the policy at a path, with a progress bar where there is a screen.

    check: called after every step of a group, by the thread that plays it; may raise to end it.
    """
    with bar("Evaluating", "episodes") as show:

        def tick(done: float, total: float) -> None:
            check()
            show(done, total)

        return Report(fresh.play(recipe, path, episodes, seed, stochastic, tick))


def _shown(report: Report) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    return report.render(width, color=sys.stdout.isatty())


Tick = Callable[[float, float], None]
"""Takes how much is done, of how much."""


@contextmanager
def bar(what: str, unit: str) -> Iterator[Tick]:
    """A progress bar on the standard error, where that is a screen; it goes away at the end."""
    console = Console(file=sys.stderr)
    progress = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    shown = waits.show_on(None) if console.is_terminal else None  # the bar says it already
    try:
        with progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    finally:
        if console.is_terminal:
            waits.show_on(shown)
