"""Callbacks: hooks of the training loop with a typed context."""

from __future__ import annotations

from dataclasses import dataclass

from etude.core.clock import Clock
from etude.core.contracts import Algorithm, BatchMetrics, Fragment
from etude.core.metrics.board import Board
from etude.core.metrics.declared import step_of


@dataclass(frozen=True)
class Context:
    """The state of a run that a callback can read, and the board on which it records."""

    clock: Clock
    algorithm: Algorithm
    board: Board

    def stop(self) -> None:
        """End the run at this boundary, with a last evaluation, log row and checkpoint."""
        self.clock.end_here()

    def record(self, name: str, value: float) -> None:
        """Record a number for the next log row."""
        self.board.record({name: value})


class Callback:
    """Base class; override the hooks that you need. A callback with state is also `Stateful`.

    With several ranks only the first one has callbacks; its `fragments` are of its own groups.
    """

    def run_start(self, context: Context) -> None: ...

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None: ...

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None: ...

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None: ...

    def cycle_end(self, context: Context, row: dict[str, float]) -> None: ...

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None: ...

    def run_end(self, context: Context) -> None: ...


class StopAtSuccess(Callback):
    """End the run once an evaluation reaches a success rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        if metrics.get("eval/success_rate", 0.0) >= self.rate:
            context.stop()


class CurveRecorder(Callback):
    """Keep curves in memory: `recorder.curve("eval/success_rate") -> (steps, values)`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        self.rows.append(row)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps (gradient updates if nothing is collected) and values of the rows with a metric."""
        points = [(float(step_of(row)), row[name]) for row in self.rows if name in row]
        return [x for x, _ in points], [y for _, y in points]
