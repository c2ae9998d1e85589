"""The plain table: a heading now and then, one line per cycle, a summary per epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, TextIO

from etude.core.contracts import BatchMetrics, Fragment
from etude.core.history import Row as LogRow
from etude.core.metrics import (
    ELAPSED,
    Health,
    Metric,
    Metrics,
    Row,
    episode_metric,
    is_offline,
    numbers,
)
from etude.training.loop import Callback, Context

ROWS_PER_HEADING = 20


class ConsoleTable:
    """Prints log rows as a table; values that a row does not have stay empty."""

    def __init__(self, health: Health, stream: TextIO | None = None) -> None:
        """health: follows the run; its declared metrics with a column are shown."""
        self._health = health
        epoch = [(m.epoch, m) for m in health.metrics if m.epoch is not None]
        self._epoch = sorted(epoch, key=lambda pair: pair[0])
        self._stream = stream or sys.stdout
        self._rows = 0
        self._last: Mapping[str, float] = {}
        self._explained: set[str] = set()

    def begin(self, history: Iterable[LogRow]) -> None:
        """Rows from before a resume are not printed again."""
        self._health.begin(history)

    def write(self, row: dict[str, Any]) -> None:
        """Print the line of a finished cycle, below a heading every `ROWS_PER_HEADING` rows."""
        values = numbers(row)
        columns = columns_of(self._health.metrics, values)
        if self._rows % ROWS_PER_HEADING == 0:
            print(heading_of(columns), file=self._stream)
        self._rows += 1
        print(line_of(columns, values), file=self._stream, flush=True)
        self._last = values
        self._health.add(values)

    def epoch(self, number: int, summary: Mapping[str, float]) -> None:
        """Print the line of a finished epoch. summary: means of its metrics.

        It has results with their trend, the last evaluation and the best, and warnings (the first
        time with advice).
        """
        values = {**self._last, **summary}
        shown = [metric for _, metric in self._epoch if metric.name in values]
        trend = {episode_metric(self._health): f" {self._health.trend}".rstrip()}
        parts = [f"{m.label} {text_of(m, values)}{trend.get(m.name, '')}" for m in shown]
        parts += [evaluated.words()] if (evaluated := self._health.evaluated) else []
        parts += fleet(values)
        warnings = self._health.warnings
        for name, text in warnings:
            parts.append(f"WARNING {name}" + ("" if name in self._explained else f" ({text})"))
        self._explained = {name for name, _ in warnings}
        parts = parts or ["no episode has ended yet"]
        print(f"  epoch {number}: {', '.join(parts)}", file=self._stream, flush=True)

    def close(self) -> None: ...


Columns = list[tuple[Metric, int]]
"""The columns of a table with their widths in characters."""


def columns_of(metrics: Metrics, row: Row, most: int | None = None) -> Columns:
    """The columns of a table for rows like this; with `most`, those with a value that fit into this
    number of characters."""
    runs = ("all", "offline" if is_offline(row) else "online")
    placed = [(m.column, m) for m in metrics if m.column and m.column.runs in runs]
    columns = [
        (metric, max(column.width, len(metric.label) + 1))
        for column, metric in sorted(placed, key=lambda pair: pair[0].place)
    ]
    if most is None:
        return columns
    chosen: Columns = []
    for metric, width in columns:
        if metric.name in row and sum(w for _, w in chosen) + width <= most:
            chosen.append((metric, width))
    return chosen


def heading_of(columns: Columns) -> str:
    return "".join(f"{metric.label:>{width}}" for metric, width in columns)


def line_of(columns: Columns, row: Row) -> str:
    """A row of the table; missing values stay empty."""
    return "".join(f"{text_of(metric, row):>{width}}" for metric, width in columns).rstrip()


def text_of(metric: Metric, row: Row) -> str:
    return format(row[metric.name], metric.format) if metric.name in row else ""


class EpochLines(Callback):
    """Calls `show` with the number of every epoch and the means of its metrics."""

    def __init__(self, show: Callable[[int, dict[str, float]], None]) -> None:
        self._show = show

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None:
        self._show(context.clock.now.epochs, summary)


class LossLines(Callback):
    """Prints the mean of a loss in every iteration; with `every`, also in every `every` batches."""

    def __init__(
        self, say: Callable[[str], None], metric: Metric, every: int | None = None
    ) -> None:
        self._say, self._metric, self._every = say, metric, every
        self._iteration: list[float] = []
        self._recent: list[float] = []

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if self._metric.name not in metrics.values:
            return
        self._iteration.append(metrics.values[self._metric.name])
        self._recent.append(metrics.values[self._metric.name])
        batch = context.clock.now.updates + len(self._iteration)
        if self._every and batch % self._every == 0:
            self._say(f"    batch {batch:,}: {self._metric.label} {fmean(self._recent):.4g}")
            self._recent = []

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        if self._iteration:
            count, mean = len(self._iteration), fmean(self._iteration)
            number, label = context.clock.now.iterations, self._metric.label
            self._say(f"  iteration {number:,}: {label} {mean:.4g}, mean of {count:,} batches")
        self._iteration = []


_PHASES = {"transport": "transport", "train": "learning", "test": "evaluation", "save": "saving"}
"""{column under `time/`: its displayed name}"""


def seconds_of(row: Mapping[str, float], before: float) -> dict[str, float]:
    """{activity: seconds} since the row before, at which `before` seconds had passed."""
    parts = {name: row.get(f"time/{name}", 0.0) for name in ("physics", "inference", "environment")}
    parts |= {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    inside = sum(parts[name] for name in ("physics", "inference", "environment", "transport"))
    parts["collecting"] = max(row.get("time/collect", 0.0) - inside, 0.0)
    return parts | {"other": max(row.get(ELAPSED, 0.0) - before - sum(parts.values()), 0.0)}


def machine(row: Mapping[str, float]) -> list[str]:
    """The `system/` columns in words."""
    words = fleet(row)
    if (cores := row.get("system/cpu_cores")) is not None:
        words.append(f"processor {cores:.2f} cores")
    for name, key in (("memory", "system/memory_mib"), ("GPU memory", "system/gpu_memory_mib")):
        if (mib := row.get(key)) is not None:
            size = f"{mib:,.0f} MiB" if mib < 10_240 else f"{mib / 1024:.1f} GiB"
            words.append(f"{name} {size}")
    return words


def fleet(row: Mapping[str, float]) -> list[str]:
    """Workers in other processes or on other machines, in words; [] without workers."""
    if "system/workers" not in row:
        return []
    workers, restarts = int(row["system/workers"]), int(row.get("system/restarts", 0))
    rate = row.get("system/bytes_per_second", 0.0) / 1e6
    many = "" if workers == 1 else "s"
    return [
        f"{workers:,} worker{many}, {row['system/groups']:,.0f} groups, {restarts:,} restarts",
        f"{rate:,.1f} MB/s, bottleneck {bottleneck(row)}",
    ]


def bottleneck(row: Mapping[str, float]) -> str:
    """The activity that took most of the time."""
    parts = {"collection": row.get("time/collect", 0.0) - row.get("time/transport", 0.0)}
    parts |= {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    return max(parts, key=lambda name: parts[name])
