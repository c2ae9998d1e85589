"""Callbacks: named hooks with a typed context, and those that show progress between log rows."""

from __future__ import annotations

from dataclasses import dataclass

from etude.core.clock import Clock
from etude.core.contracts import Algorithm, BatchMetrics, Fragment
from etude.core.metrics.board import Board
from etude.core.metrics.declared import step_of


@dataclass(frozen=True)
class Context:
    """What a callback may look at, and where it records."""

    clock: Clock
    algorithm: Algorithm
    board: Board

    def stop(self) -> None:
        """End the run at this boundary, with a last evaluation, log row and checkpoint."""
        self.clock.end_here()

    def record(self, name: str, value: float) -> None:
        """Put a number on the board; it is in the next log row."""
        self.board.record({name: value})


class Callback:
    """Does nothing; override what you need. One with memory is also `Stateful`.

    Of several ranks only the first has callbacks; its `fragments` are those of its own groups.
    """

    def run_start(self, context: Context) -> None: ...

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None: ...

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None: ...

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None: ...

    def cycle_end(self, context: Context, row: dict[str, float]) -> None: ...

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None: ...

    def run_end(self, context: Context) -> None: ...


class StopAtSuccess(Callback):
    """Ends the run once an evaluation reaches a success rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        if metrics.get("eval/success_rate", 0.0) >= self.rate:
            context.stop()


class CurveRecorder(Callback):
    """Keeps curves in memory: `recorder.curve("eval/success_rate") -> (steps, values)`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        self.rows.append(row)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps (gradient updates, if nothing is collected) and values of rows with the metric."""
        points = [(float(step_of(row)), row[name]) for row in self.rows if name in row]
        return [x for x, _ in points], [y for _, y in points]
