"""Progress between log rows, for whatever shows it live."""

from __future__ import annotations

from typing import Protocol

from etude.core.clock import Clock
from etude.core.contracts import BatchMetrics, Fragment
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
