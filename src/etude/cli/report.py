"""`etude report`: one HTML page about a run or several, without links to the network."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pydantic import Field

from etude.api import Run
from etude.cli.options import Positional, Trusting, parse
from etude.cli.target import find_target
from etude.cli.train import TrainCommand
from etude.compare import reading
from etude.compare.comparison import Comparison, compare
from etude.compare.html_page import RunPage, page
from etude.compare.sweeps.halving import STATE, Sweep, ordered
from etude.core.errors import EtudeError, UsageError
from etude.core.metrics import COUNTERS, EPISODES, Health
from etude.planning import FREE, among, recipes
from etude.planning.recipe import Recipe, metrics_of
from etude.runs import checkpoint, files
from etude.runs.folder import PLAN_JSON, RECIPE


class ReportCommand(Trusting):
    """One HTML page about a run, about several and their comparison, or about a sweep: recipe,
    plan, curves, evaluations, films, health, machine and the command to repeat it. It needs no
    network."""

    aliases = {"out": "output"}  # noqa: RUF012

    runs: Positional[tuple[str, ...]] = Field(
        description="Folders of runs, folders that hold runs, or patterns: 'runs/reach/*'; or the "
        "folder of a sweep."
    )
    out: str = Field("report.html", description="The file to write; -o is short.")
    films: bool = Field(
        False, description="Include films in full size, which makes the page large."
    )
    at: int | None = Field(None, ge=1, description="Compare several runs at this step.")
    metric: str | None = Field(
        None, description="Compare several runs by this column of metrics.jsonl."
    )


MAX_RUNS = 50


def run(arguments: list[str]) -> None:
    """Write the page."""
    command = parse("report", ReportCommand, arguments)
    sweep, out = _sweep(command), Path(command.out)
    paths = reading.find(command.runs) if sweep is None else _trials(sweep)
    if out.suffix not in (".html", ".htm"):
        raise UsageError(f"'{out}' cannot be written: the name of a page must end in .html.")
    if len(paths) > MAX_RUNS:
        raise UsageError(
            f"A page has at most {MAX_RUNS} runs, and these are {len(paths)}: name fewer."
        )
    pages = [page_of(path, command.trust) for path in paths]
    found, note = None, ""
    if len(pages) > 1 and sweep is None:
        found, note = _compared(command, [each.record for each in pages])
    files.make_folder(out.absolute().parent)
    text = page(pages, found, command.films, note, sweep).encode()
    files.replace_file(out, [text])
    print(f"{out}: {len(text) / 1e6:.2f} MB, {len(pages)} run{'s' if len(pages) > 1 else ''}")
    if note:
        print(f"Without a comparison: {note}")


def _sweep(command: ReportCommand) -> Sweep | None:
    """The sweep that the command names; None if it names runs."""
    folder = Path(command.runs[0])
    if len(command.runs) > 1 or not (folder / STATE).is_file():
        return None
    sweep = Sweep.open(folder, command.trust, write=False)
    if not sweep.trials:
        raise UsageError(f"{folder} is a sweep without trials: `etude sweep --resume` draws them.")
    return sweep


def _trials(sweep: Sweep) -> list[Path]:
    """The runs of a sweep's trials, the best first, as many as a page has."""
    runs = [sweep.path(t) for t in ordered(sweep) if (sweep.path(t) / RECIPE).is_file()]
    if not runs:
        raise UsageError(f"No trial of {sweep.folder} has begun: there is nothing to show yet.")
    return runs[:MAX_RUNS]


def _compared(
    command: ReportCommand, records: list[reading.RunRecord]
) -> tuple[Comparison | None, str]:
    """(comparison, "") or (None, why the runs cannot be compared)."""
    try:
        return compare(records, command.metric, command.at), ""
    except UsageError as error:
        return None, str(error)


def page_of(path: Path, trust: bool = False) -> RunPage:
    """The data of a run's page; files that cannot be read become notes."""
    record = reading.read(path)
    notes, lineage = list[str](), list[str]()
    recipe: Recipe | None = None
    fingerprint = best = None
    try:
        run = Run(path, trust)
        recipe, lineage = run.recipe, run.changes
        best = checkpoint.best(run.folder.checkpoints)
        fingerprint = run.fingerprint()
    except EtudeError as error:
        notes.append(str(error))
    metrics = COUNTERS + EPISODES if recipe is None else metrics_of(recipe)
    health = Health(metrics, _iterations(path))
    health.follow(record.history)
    health.best = best
    evaluated = health.evaluated
    return RunPage(
        record,
        command_of(recipe, path, bool(lineage)),
        record.name if recipe is None else recipes.title(recipe),
        "; ".join([*filter(None, ["" if recipe is None else recipes.changed(recipe)]), *lineage]),
        metrics,
        tuple(health.warnings),
        health.trend,
        "" if evaluated is None else evaluated.words(),
        fingerprint,
        tuple(notes),
    )


def _iterations(path: Path) -> int:
    """The planned iterations of a run; 1 if the plan cannot be read."""
    try:
        document: Any = json.loads((path / PLAN_JSON).read_bytes()[: 1 << 20])
        return int(document["counts"]["iterations"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 1


def command_of(recipe: Recipe | None, path: Path, changed: bool = False) -> str:
    """The command that trains the recipe: by its name if that gives the same, else by its file.

    changed: a resume has changed settings, and the file has those that the run started with.
    """
    by_file = f"etude train {shlex.quote(str(path / RECIPE))}"
    if recipe is None or recipe.name not in recipes.names() or changed:
        return by_file
    named = dict(recipes.fields(recipes.made_by(recipe.name)()))
    words = [recipe.name]
    for name, value in recipes.fields(recipe):
        if named.get(name, "") != value and not among(name, FREE):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    try:
        target, rest = find_target(words)
        made = parse("train", TrainCommand, rest, TrainCommand(recipe=target)).recipe
    except (EtudeError, ValueError):
        return by_file
    same = recipes.digest(made) == recipes.digest(recipe)
    return f"etude train {shlex.join(words)}" if same else by_file
