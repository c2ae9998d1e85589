"""Callbacks: named hooks with a typed context."""

from __future__ import annotations

from dataclasses import dataclass

from etude.core.clock import Clock
from etude.core.contracts import Algorithm, BatchMetrics, Fragment
from etude.metrics.board import Board


@dataclass(frozen=True)
class Context:
    """What a callback may look at, and where it records."""

    clock: Clock
    algorithm: Algorithm
    board: Board

    def record(self, name: str, value: float) -> None:
        """Put a number on the board; it is in the next log row."""
        self.board.record({name: value})


class Callback:
    """Does nothing; override what you need. One with memory is also `Stateful`."""

    def run_start(self, context: Context) -> None: ...

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None: ...

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None: ...

    def cycle_end(self, context: Context, row: dict[str, float]) -> None: ...

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None: ...

    def run_end(self, context: Context) -> None: ...
