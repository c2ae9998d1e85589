"""The table of a sweep: its trials, the best first, with their scores at every rung."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.compare.reading import shown
from etude.compare.sweeps.halving import Sweep, Trial, shown_score


def ordered(sweep: Sweep) -> list[Trial]:
    """All trials: those that came further first, then the better ones; refused ones last."""

    def key(trial: Trial) -> tuple[Any, ...]:
        rank = sweep.rank(trial, -1) if trial.scores else (0.0, 0.0, trial.number)
        return bool(trial.refused), -len(trial.scores), *rank

    return sorted(sweep.trials, key=key)


def settings(trial: Trial) -> str:
    """The values of a trial in few words: "learning_rate 0.001, gamma 0.95"."""
    return ", ".join(f"{n.rpartition('.')[2]} {shown(v)}" for n, v in trial.values.items())


def notes(trials: Sequence[Trial]) -> list[str]:
    """Why trials were refused or failed, each sentence once: "t0, t3: ..."."""
    found: dict[str, list[str]] = {}
    for trial in trials:
        if why := trial.refused or trial.failed:
            found.setdefault(why, []).append(trial.name)
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


def heads(sweep: Sweep) -> list[str]:
    """What each rung is called: the steps at its end, or the share of the budget where trials
    differ in those."""
    planned = [trial.steps for trial in sweep.trials if trial.steps and not trial.refused]
    if planned and all(steps == planned[0] for steps in planned):
        return [f"at {step:,}" for step in planned[0]]
    return [f"at {100 * sweep.asked.share(rung):.0f} %" for rung in range(sweep.asked.rungs)]


def to_table(sweep: Sweep, width: int = 100, color: bool = False) -> str:
    """What a person reads in a terminal."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False)
    best = sweep.best()
    rank = "lower is better" if sweep.asked.minimize else "higher is better"
    console.print(
        f"{sweep.metric or 'No scores'}, {rank}; of {len(sweep.trials)} trials the best first"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trial", no_wrap=True)
    for name in sweep.trials[0].values:
        table.add_column(name.rpartition(".")[2], justify="right", overflow="fold")
    for head in heads(sweep):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for trial in ordered(sweep):
        scores = [shown_score(sweep.metric, score) for score in trial.scores]
        word = "best" if trial is best else "refused" if trial.refused else ""
        word = "failed" if trial.failed else word
        cells = [Text(shown(value)) for value in trial.values.values()]
        rungs = [*scores, *[""] * (sweep.asked.rungs - len(scores))]
        table.add_row(trial.name, *cells, *rungs, word, style="bold" if trial is best else "")
    console.print(table)
    for line in notes(sweep.trials):
        console.print(line, markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def to_json(sweep: Sweep) -> dict[str, Any]:
    """The table for programs."""
    best = sweep.best()
    return {
        "metric": sweep.metric,
        "minimize": sweep.asked.minimize,
        "best": None if best is None else str(sweep.path(best)),
        "trials": [
            {
                "trial": trial.number,
                "bracket": trial.bracket,
                "run": None if trial.refused else str(sweep.path(trial)),
                "values": trial.values,
                "steps": trial.steps[: len(trial.scores)],
                "scores": trial.scores,
                "refused": trial.refused,
                "failed": trial.failed,
            }
            for trial in sweep.trials
        ],
    }


def to_csv(sweep: Sweep) -> str:
    """A line for each trial and rung it came to; one without a score for those that have none."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    metric = sweep.metric or "score"
    writer.writerow(["trial", *sweep.trials[0].values, "step", metric, "note"])
    for trial in sweep.trials:
        values = [v if isinstance(v, str) else json.dumps(v) for v in trial.values.values()]
        note = trial.refused or trial.failed
        pairs = zip(trial.steps, trial.scores, strict=False)
        points: list[tuple[Any, Any]] = [*pairs] or [("", "")]
        writer.writerows([trial.name, *values, *point, note] for point in points)
    return stream.getvalue()
