"""Callbacks that show a run on the screen while it trains."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Protocol

from etude.core.clock import Clock
from etude.core.contracts import BatchMetrics, Fragment
from etude.core.metrics.declared import Metric
from etude.training.callbacks import Callback, Context


class Display(Protocol):
    """Shows where a run stands; `logs.dashboard.Dashboard` is one."""

    def follow(self, clock: Clock) -> None: ...

    def batch(self) -> None: ...

    def iteration(self) -> None: ...


class DashboardCallback(Callback):
    """Tells a display about the levels below a cycle, which no log row shows."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def run_start(self, context: Context) -> None:
        self._display.follow(context.clock)

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        self._display.batch()

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self._display.iteration()


class EpochLines(Callback):
    """Hands every epoch's number and the means of its metrics to whoever prints a line of it."""

    def __init__(self, show: Callable[[int, dict[str, float]], None]) -> None:
        self._show = show

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None:
        self._show(context.clock.now.epochs, summary)


class LossLines(Callback):
    """Says what a loss was, on average, in every iteration.

    With `every`, also in every so many batches of the run.
    """

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
