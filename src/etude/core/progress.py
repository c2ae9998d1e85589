"""Waits: slow work says what it is, and whoever sits in front of a terminal is told.

Work is named by `with waiting("compiling the model"):` wherever it is done. Nothing is printed
unless a program asks for it with `show_on`; then a wait of more than two seconds is shown until it
ends: in a terminal on a line of its own that goes away again, elsewhere by a line of each half
minute.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

SLOW = 2.0
"""Seconds after which a wait is shown."""
AGAIN = 30.0
"""Seconds between the lines of a wait where there is no terminal, and before the first."""
_ERASE = "\r\x1b[K"


@dataclass(eq=False)
class Wait:
    """Work that is going on."""

    text: str
    """What is done, such as "evaluating"."""
    total: int = 0
    """How much there is of it; 0 where nobody knows."""
    unit: str = ""
    done: int = 0
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def words(self) -> str:
        """Such as "evaluating: 37 of 100 episodes, 12 s"."""
        counted = f": {self.done:,} of {self.total:,} {self.unit}" if self.total else ""
        return f"{self.text}{counted}, {self.seconds:.0f} s"


class _Shown:
    """Where waits are shown, and what stands there now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waits: list[Wait] = []
        self.stream: TextIO | None = None
        self.thread: threading.Thread | None = None
        self.line = ""
        self.told: dict[str, float] = {}

    def begin(self, wait: Wait) -> None:
        with self.lock:
            self.waits.append(wait)
            if self.stream is not None and self.thread is None:
                self.thread = threading.Thread(target=self._watch, name="progress", daemon=True)
                self.thread.start()

    def end(self, wait: Wait) -> None:
        with self.lock:
            self.waits.remove(wait)
            self.erase()

    def erase(self) -> None:
        with self.lock:
            if self.line and self.stream is not None:
                _write(self.stream, _ERASE)
            self.line = ""

    def _watch(self) -> None:
        """Look four times a second; nothing is waited for most of the time."""
        while True:
            time.sleep(0.25)
            with self.lock:
                if self.stream is not None and (slow := current()) and slow.seconds >= SLOW:
                    self._tell(self.stream, slow)

    def _tell(self, stream: TextIO, wait: Wait) -> None:
        if stream.isatty():
            if wait.words() != self.line:
                self.line = wait.words()
                _write(stream, f"{_ERASE}{self.line}")
        elif min(wait.seconds, self._since(wait)) >= AGAIN:
            self.told[wait.text] = time.monotonic()
            _write(stream, f"{wait.words()} ...\n")

    def _since(self, wait: Wait) -> float:
        """Seconds since a wait for the same was last told."""
        return time.monotonic() - self.told.get(wait.text, -math.inf)


_shown = _Shown()


def _write(stream: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # A terminal that is gone is no reason to fail.
        stream.write(text)
        stream.flush()


@contextmanager
def waiting(text: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """Name the work inside; with a total, its `done` may be set by any thread."""
    wait = Wait(text, total, unit)
    _shown.begin(wait)
    try:
        yield wait
    finally:
        _shown.end(wait)


def current() -> Wait | None:
    """The innermost work that is going on; the one with a total, where one has."""
    with _shown.lock:
        counted = (wait for wait in reversed(_shown.waits) if wait.total)
        return next(counted, _shown.waits[-1] if _shown.waits else None)


def show_on(stream: TextIO | None) -> TextIO | None:
    """Show slow waits there, or nowhere; where they were shown before."""
    with _shown.lock:
        _shown.erase()
        before, _shown.stream = _shown.stream, stream
        return before


def erase() -> None:
    """Take what is shown off the terminal, before something else is printed."""
    _shown.erase()
