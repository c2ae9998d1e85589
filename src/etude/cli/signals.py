"""Signals that end a command."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self


class Signals:
    """Catch the first SIGINT or SIGTERM; a second one has its usual effect."""

    def __init__(self) -> None:
        self.received: int | None = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()

    def __enter__(self) -> Self:
        caught = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._receive) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
