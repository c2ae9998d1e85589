"""Reports of evaluations: tables for the terminal, CSV files, and metrics for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from etude.core.contracts import KINDS, Array
from etude.core.intervals import wilson
from etude.core.output import csv_text, new_table, rendered
from etude.evaluate import EPISODES
from etude.evaluate.fresh import FreshEpisodes
from etude.runs import files
from etude.training.evaluation import summarise
from etude.training.logs.curves import number, spark

SUCCESS, FAILURE = "success", "failure"
SUMMARY, TEXT = "summary.json", "report.txt"
_MILLIMETRES = ("placement_error", "drop_height", "final_distance")
"""Statistics in metres that the table has in millimetres."""
_MAX_NUMBERS = 8
"""Episode numbers in a line of the table of failures."""
_WIDTH, _HEIGHT = 60, 6
"""Characters of a curve."""


def kinds_of(played: FreshEpisodes) -> list[str]:
    """The outcome of each episode; [] if the environment does not report success."""
    names, episodes = played.spec.outcomes, played.episodes
    if names and "outcome" in episodes:
        return [names[int(number)] for number in episodes["outcome"]]
    if "is_success" in episodes:
        return [SUCCESS if success else FAILURE for success in episodes["is_success"]]
    return []


@dataclass(frozen=True)
class Report:
    """The report of an evaluation."""

    fresh: FreshEpisodes

    @property
    def kinds(self) -> list[str]:
        """The outcome of each episode."""
        return kinds_of(self.fresh)

    @property
    def scenes(self) -> list[str]:
        """The motion, if any, and the outcome of each episode."""
        kinds, motions = self.kinds, self.fresh.motions
        return [f"{m} {k}" for m, k in zip(motions, kinds, strict=True)] if motions else kinds

    @property
    def statistics(self) -> list[str]:
        """Statistics of the task besides success, outcome and reward terms."""
        others = ("return", "length", "is_success", *KINDS)
        names = [name for name in self.fresh.episodes if not name.startswith("reward/")]
        return [name for name in names if name not in others]

    @cached_property
    def motions(self) -> Any:
        """The `MotionReport`; None if the task imitates no motions."""
        if not self.fresh.spec.motions:
            return None
        from etude.evaluate.motion import MotionReport

        return MotionReport(self.fresh)

    def counts(self) -> dict[str, int]:
        """{outcome: episodes}: successes first, then the most frequent."""
        counted = Counter(self.kinds)
        order = sorted(counted, key=lambda kind: (kind != SUCCESS, -counted[kind], kind))
        return {kind: counted[kind] for kind in order}

    def metrics(self) -> dict[str, Any]:
        """Metrics as training logs them, with the interval of the success rate and the counts."""
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
        """A row per episode: number, outcome, motion, and all that the environment reports."""
        played = self.fresh
        named = {"kind": self.kinds, "motion": played.motions}
        named = {title: names for title, names in named.items() if names}
        numbers = [name for name in played.episodes if name not in KINDS]
        rows: list[list[Any]] = [["episode", *named, *numbers]]
        for index in range(played.num_episodes):
            values = [f"{played.episodes[name][index]:.9g}" for name in numbers]
            rows.append([index, *(names[index] for names in named.values()), *values])
        return csv_text(rows)

    def render(self, width: int = 100, color: bool = False) -> str:
        """The report for the terminal."""
        played = self.fresh
        parts: list[Any] = [
            f"{played.num_episodes} fresh episodes of the policy at step {played.step:,}, "
            f"{_drawn(played.stochastic)}, seed {played.seed}"
        ]
        successes = int(played.episodes.get("is_success", np.zeros(0)).sum())
        if "is_success" in played.episodes:
            low, high = wilson(successes, played.num_episodes)
            parts.append(
                f"[bold]success {successes / played.num_episodes:.1%}[/] "
                f"({successes} of {played.num_episodes}; 95 % interval {low:.1%} to {high:.1%})"
            )
        parts.append(self._means())
        if self.motions:
            parts.append(self.motions.table())
        if self.kinds and successes < played.num_episodes:
            parts.append(self._failures())
        return rendered(parts, width, color)

    def _means(self) -> Table:
        """Means over all episodes, and over successes and failures if there are both."""
        episodes = self.fresh.episodes
        masks: dict[str, Array] = {"all": np.ones(self.fresh.num_episodes, np.bool_)}
        success = episodes.get("is_success", np.zeros(0)) > 0
        if success.any() and not success.all():
            masks |= {"successes": success, "failures": ~success}
        table: Table = new_table("mean ± standard deviation", *masks)
        of_motions = self.motions.statistics if self.motions else ()
        for name in ("return", "length", *(n for n in self.statistics if n not in of_motions)):
            title = {"return": "reward", "length": "length, steps"}.get(name, name)
            title, scale = (title, 1.0) if name not in _MILLIMETRES else (f"{title}, mm", 1e3)
            values = (episodes[name][mask] * scale for mask in masks.values())
            spreads = (f"{each.mean():,.2f} ± {each.std():,.2f}" for each in values)
            table.add_row(title.replace("_", " "), *spreads)
        return table

    def _failures(self) -> Table:
        kinds = self.kinds
        table: Table = new_table("failures", "count", "share", "episodes", left=("episodes",))
        for kind, count in self.counts().items():
            if kind != SUCCESS:
                where = [str(index) for index, other in enumerate(kinds) if other == kind]
                more = ["..."] if len(where) > _MAX_NUMBERS else []
                numbers = ", ".join([*where[:_MAX_NUMBERS], *more])
                table.add_row(kind, str(count), f"{count / len(kinds):.1%}", numbers)
        return table

    def write(self, folder: Path) -> None:
        """Write episodes.csv, report.txt, for imitation motions.csv and, last, summary.json."""
        texts = {EPISODES: self.csv(), TEXT: self.render()}
        if self.motions:
            texts["motions.csv"] = self.motions.csv()
        texts[SUMMARY] = json.dumps(self.metrics(), indent=2) + "\n"
        for name, text in texts.items():
            files.replace_file(folder / name, [text.encode()])


def _drawn(stochastic: bool) -> str:
    return "stochastic" if stochastic else "deterministic"


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of one policy, for a table of several."""

    run: Path
    metrics: dict[str, Any]
    is_kept: bool = False
    """Whether training kept the policy as the best of its run."""

    @property
    def step(self) -> int:
        return int(self.metrics.get("policy_step", 0))

    @property
    def score(self) -> tuple[float, float, int]:
        """Success rate, mean return, step; the table marks the largest as the highest."""
        success = self.metrics.get("eval/success_rate", 0.0)
        return success, self.metrics.get("eval/mean_reward", 0.0), self.step


def table(rows: Sequence[Evaluated], width: int = 100, color: bool = False) -> str:
    """A table of several evaluations, and a curve for every run with several checkpoints."""
    first, runs = rows[0].metrics, {row.run for row in rows}
    seeds = ", ".join(sorted({str(row.metrics["seed"]) for row in rows}))
    title = (
        f"{first['eval/episodes']:.0f} fresh episodes each, {_drawn(first['stochastic'])}, "
        f"seed {seeds}"
    )
    highest = max(rows, key=lambda row: row.score)
    with_success = any("eval/success_rate" in row.metrics for row in rows)
    names = ["step", *(["success", "95 % interval"] if with_success else []), "return", "length"]
    shown = new_table("run" if len(runs) > 1 else "", *names, "", left=("",))
    for row in rows:
        mean, spread = (row.metrics.get(f"eval/{n}_reward", 0.0) for n in ("mean", "std"))
        is_marked = row.is_kept and len(runs) < len(rows)
        shown.add_row(
            str(row.run) if len(runs) > 1 else "",
            f"{row.step:,}",
            *(_success(row.metrics) if with_success else []),
            f"{mean:,.2f} ± {spread:,.2f}",
            f"{row.metrics.get('eval/mean_ep_length', 0.0):,.1f}",
            " and ".join([*["highest"] * (row is highest), *["best in training"] * is_marked]),
            style="bold" if row is highest else "",
        )
    parts: list[Any] = [title, shown]
    for run, group in groupby(rows, lambda row: row.run):
        points = list(group)
        if len(points) > 1:
            parts.append(Text("\n".join(_curve(str(run), points))))
    return rendered(parts, width, color)


def _success(metrics: dict[str, Any]) -> list[str]:
    if "eval/success_rate" not in metrics:
        return ["", ""]
    low, high = metrics["eval/success_low"], metrics["eval/success_high"]
    return [f"{metrics['eval/success_rate']:.1%}", f"{low:.0%} to {high:.0%}"]


def _curve(run: str, points: Sequence[Evaluated]) -> list[str]:
    """Success rate, or mean return, over the steps of checkpoints, in characters."""
    name = "eval/success_rate" if "eval/success_rate" in points[0].metrics else "eval/mean_reward"
    title = "success rate" if name == "eval/success_rate" else "mean return"
    first, last = points[0].step, points[-1].step
    values = tuple(
        [float(p.metrics.get(name, 0.0)) for p in points if p.step <= step + 1e-6][-1]
        for step in np.linspace(first, last, _WIDTH)
    )
    bounds = (0.0, 1.0) if name == "eval/success_rate" else (None, None)
    lines, axis = spark(values, _WIDTH, _WIDTH, _HEIGHT, bounds)
    edges = [number(axis.high), *[""] * (_HEIGHT - 2), number(axis.low)]
    wide = max(map(len, edges))
    drawn = [f"{edge:>{wide}} │{line}" for edge, line in zip(edges, lines, strict=True)]
    under = f"{'':>{wide}} └{'─' * _WIDTH}"
    ends = f"{'':>{wide}}  {first:,}{f'{last:,} steps':>{_WIDTH - len(f'{first:,}')}}"
    return ["", f"{title} of {run}", *drawn, under, ends]


def write_curve(run: Path, points: Sequence[Evaluated]) -> Path:
    """Write a row per checkpoint to evaluations/checkpoints/curve.csv of a run.

    If the folder exists, the name of the new one ends in a number.
    """
    names = [
        name
        for name, value in points[0].metrics.items()
        if isinstance(value, float) and all(name in point.metrics for point in points)
    ]
    rows = [[p.step, *(f"{p.metrics[name]:.9g}" for name in names)] for p in points]
    folder = files.free_path(run / "evaluations" / "checkpoints")
    files.make_folder(folder)
    text = csv_text([["step", *names], *rows])
    files.replace_file(folder / "curve.csv", [text.encode()])
    return folder / "curve.csv"
