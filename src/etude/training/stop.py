"""Signals: stop at the next boundary if it comes soon, otherwise just exit. Only time is lost."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

GRACE_SECONDS = 5.0


class StopRequest:
    """Turns SIGTERM and SIGINT into a request the loop reads at iteration boundaries.

    If no boundary comes within 5 seconds, or a second signal does, the process ends where it
    stands: whatever was going on is recomputed, bit for bit, from the last checkpoint.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._exit()
        self.signal = number
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self._exit()

    def _exit(self) -> None:
        print(
            "Stopped before a boundary; resume continues from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + (self.signal or signal.SIGTERM))
