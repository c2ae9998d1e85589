"""A loop at a fixed rate: deadlines that were missed, and a clock that does not drift."""

from __future__ import annotations

from etude_runtime import FixedRate


class Clock:
    """Time that passes only when someone sleeps or works."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_missed_deadlines_are_counted_and_do_not_shift_the_clock() -> None:
    clock = Clock()
    rate = FixedRate(0.1, 10, clock, clock.sleep)
    begins = []
    for step in rate:
        begins.append(round(clock.now - 5.0, 6))
        clock.now += 0.25 if step == 3 else 0.01
    assert rate.timing.missed == 2  # the slow step, and the next one, which began late
    assert begins == [0.0, 0.1, 0.2, 0.3, 0.55, 0.56, 0.6, 0.7, 0.8, 0.9]
    assert abs(rate.timing.percentile(50) - 0.01) < 1e-9
    assert abs(max(rate.timing.seconds) - 0.25) < 1e-9
    assert "10 steps of 100 ms: median 10.000 ms" in str(rate.timing)
