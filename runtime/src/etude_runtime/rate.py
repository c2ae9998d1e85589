"""A loop at a fixed rate that says what it missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Timing:
    """How long steps took."""

    period: float
    """s: what a step may take."""
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    missed: int = 0
    """Steps that ended after their period."""

    def percentile(self, share: float) -> float:
        """s: what a share of steps, in percent, took at most."""
        return float(np.percentile(self.seconds, share)) if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.seconds):,} steps of {self.period * 1e3:g} ms: median "
            f"{self.percentile(50) * 1e3:.3f} ms, 99.9 % {self.percentile(99.9) * 1e3:.3f} ms, "
            f"{self.missed} missed deadlines"
        )


class FixedRate:
    """`for step in FixedRate(policy.period, 500): ...` begins each step when it is due.

    A step that took too long is counted, and those that it made late begin at once; the clock is
    not moved, so a single slow step does not shift the ones after it.
    """

    def __init__(
        self,
        period: float,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timing = Timing(period)
        self._steps, self._clock, self._sleep = steps, clock, sleep

    def __iter__(self) -> Iterator[int]:
        timing, start = self.timing, self._clock()
        for step in range(self._steps):
            due = start + step * timing.period
            wait = due - self._clock()
            if wait > 0.0:
                self._sleep(wait)
            begin = self._clock()
            yield step
            end = self._clock()
            timing.seconds.append(end - begin)
            timing.missed += end > due + timing.period
