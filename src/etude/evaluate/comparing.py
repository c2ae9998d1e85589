"""Evaluations side by side: several runs in one table, and the checkpoints of a run as a curve."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.planning.loading import policies
from etude.runs import files
from etude.training.logs.curves import number, spark

ALL = "all"
_WIDTH, _HEIGHT = 60, 6


@dataclass(frozen=True)
class Evaluated:
    """One policy of a run, and what its fresh episodes showed."""

    run: Path
    metrics: dict[str, Any]
    is_kept: bool = False
    """Whether training kept it as the best of its run."""

    @property
    def step(self) -> int:
        return int(self.metrics.get("policy_step", 0))

    @property
    def score(self) -> tuple[float, float, int]:
        """Success rate, then mean return, then the later one: the largest is the best."""
        success = self.metrics.get("eval/success_rate", 0.0)
        return success, self.metrics.get("eval/mean_reward", 0.0), self.step


def checkpoints(run: Path, which: str) -> list[str]:
    """The checkpoints of a run that were asked for: "best", "latest" or a step, or all of them."""
    return [str(step) for step in policies(run)] if which == ALL else [which]


def table(rows: Sequence[Evaluated], width: int = 100, color: bool = False) -> str:
    """A line for each evaluation, the best of all marked; below it the curve of every run of which
    several checkpoints were evaluated."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False)
    several = len({row.run for row in rows}) < len(rows)
    first = rows[0].metrics
    how = "stochastic" if first["stochastic"] else "deterministic"
    seeds = ", ".join(sorted({str(row.metrics["seed"]) for row in rows}))
    console.print(f"{first['eval/episodes']:.0f} fresh episodes each, {how}, seed {seeds}")
    best, runs = max(rows, key=lambda row: row.score), {row.run for row in rows}
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("run" if len(runs) > 1 else "", overflow="fold")
    with_success = any("eval/success_rate" in row.metrics for row in rows)
    names = ["step", *(["success", "95 % interval"] if with_success else []), "return", "length"]
    for name in (*names, ""):
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        success = _success(row.metrics) if with_success else []
        mean, spread = (row.metrics.get(f"eval/{n}_reward", 0.0) for n in ("mean", "std"))
        shown.add_row(
            str(row.run) if len(runs) > 1 else "",
            f"{row.step:,}",
            *success,
            f"{mean:,.2f} ± {spread:,.2f}",
            f"{row.metrics.get('eval/mean_ep_length', 0.0):,.1f}",
            "best" if row is best else "best in training" if row.is_kept and several else "",
            style="bold" if row is best else "",
        )
    console.print(shown)
    for run, group in groupby(rows, lambda row: row.run):
        points = list(group)
        if len(points) > 1:
            console.print("\n".join(_curve(str(run), points)), markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _success(metrics: dict[str, Any]) -> list[str]:
    if "eval/success_rate" not in metrics:
        return ["", ""]
    low, high = metrics["eval/success_low"], metrics["eval/success_high"]
    return [f"{metrics['eval/success_rate']:.1%}", f"{low:.0%} to {high:.0%}"]


def _curve(title: str, points: Sequence[Evaluated]) -> list[str]:
    """Success, or else return, over the steps of checkpoints, in characters."""
    name = "eval/success_rate" if "eval/success_rate" in points[0].metrics else "eval/mean_reward"
    what = "success rate" if name == "eval/success_rate" else "mean return"
    first, last = points[0].step, points[-1].step
    at = [first + (last - first) * column / (_WIDTH - 1) for column in range(_WIDTH)]
    values = tuple(
        [float(p.metrics.get(name, 0.0)) for p in points if p.step <= step + 1e-6][-1]
        for step in at
    )
    bounds = (0.0, 1.0) if name == "eval/success_rate" else (None, None)
    lines, axis = spark(values, _WIDTH, _WIDTH, _HEIGHT, bounds)
    edges = [number(axis.high), *[""] * (_HEIGHT - 2), number(axis.low)]
    wide = max(map(len, edges))
    drawn = [f"{edge:>{wide}} │{line}" for edge, line in zip(edges, lines, strict=True)]
    under = f"{'':>{wide}} └{'─' * _WIDTH}"
    ends = f"{'':>{wide}}  {first:,}{f'{last:,} steps':>{_WIDTH - len(f'{first:,}')}}"
    return ["", f"{what} of {title}", *drawn, under, ends]


def write_curve(run: Path, points: Sequence[Evaluated]) -> Path:
    """evaluations/checkpoints/curve.csv of a run, a line for each checkpoint; the folder has a
    number after its name where there is one already."""
    names = [
        name
        for name, value in points[0].metrics.items()
        if isinstance(value, float) and all(name in point.metrics for point in points)
    ]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["step", *names])
    for point in points:
        writer.writerow([point.step, *(f"{point.metrics[name]:.9g}" for name in names)])
    folder = files.free_path(run / "evaluations" / "checkpoints")
    files.make_folder(folder)
    files.replace_file(folder / "curve.csv", [stream.getvalue().encode()])
    return folder / "curve.csv"
