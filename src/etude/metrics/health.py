"""Health: follows the log rows of a run for whoever shows it.

The rules stand with the declarations of metrics; a run that nobody watches loads none of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from etude.metrics.declared import (
    RECENT,
    Metric,
    Metrics,
    Row,
    Warning,
    declares,
    episode_metric,
    trend_of,
)
from etude.metrics.rows import ITERATIONS, step_of


class Evaluated(NamedTuple):
    """The last evaluation of a run and its best one: log rows that hold one."""

    metric: Metric
    """What evaluations are compared by first; the higher, the better."""
    last: Row
    best: Row

    def words(self) -> str:
        """Such as "eval return 12.00 (best 340.10 at 40,960)"."""
        last, best = (format(row[self.metric.name], self.metric.format) for row in self[1:])
        return f"{self.metric.label} {last} (best {best} at {step_of(self.best):,})"


class Health:
    """Follows the log rows of a run: its trend, its best evaluation, and what looks wrong.

    It keeps nothing that the rows do not hold, so a resumed run, given the rows that were kept,
    says the same as one that never stopped.
    """

    def __init__(self, metrics: Metrics, total_iterations: int) -> None:
        self.metrics, self._total = metrics, max(total_iterations, 1)
        self.rows: list[Row] = []
        """Of every log row the counters, and the metrics that are declared."""
        self.progress = 0.0
        """The share of the run's iterations that is done, 0 to 1."""
        self.explored_by = next((m.explored_by for m in metrics if m.explored_by), "")
        self._declares = declares(metrics)
        self._scores = [m for m in metrics if m.score]

    def add(self, row: Row) -> None:
        """Take in a log row."""
        self.progress = row.get(ITERATIONS, 0.0) / self._total
        self.rows.append({name: value for name, value in row.items() if self._declares(name)})

    def series(self, name: str, rows: Sequence[Row] | None = None) -> list[float]:
        """All values of a metric, oldest first; of some rows only, if they are given."""
        return [row[name] for row in (self.rows if rows is None else rows) if name in row]

    def recent(self, name: str) -> list[float]:
        """A metric's values in the last `RECENT` rows; [] if one of these rows has none."""
        values = self.series(name, self.rows[-RECENT:])
        return values if len(values) == RECENT else []

    @property
    def trend(self) -> str:
        """Whether episodes of training get better: "rising", "level", "falling"; "" at first."""
        return trend_of(self.series(episode_metric(self)))

    @property
    def evaluated(self) -> Evaluated | None:
        """The last evaluation, and the one with the highest score; of equals, the later."""
        metric = next((m for m in self._scores if any(m.name in r for r in self.rows)), None)
        if metric is None:
            return None
        rows = [row for row in self.rows if metric.name in row]

        def score(row: Row) -> list[float]:
            return [row.get(m.name, -math.inf) for m in self._scores]

        return Evaluated(metric, rows[-1], max(reversed(rows), key=score))

    @property
    def warnings(self) -> list[Warning]:
        """What the checks of the run's metrics give, in the order of declaration."""
        checks = [metric.check for metric in self.metrics if metric.check and self.rows]
        return [warning for check in checks if (warning := check(self)) is not None]
