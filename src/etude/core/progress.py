"""Progress of slow work, shown in a terminal.

Work is named by `with waiting("compiling the model"):`. Nothing is printed unless a program calls
`show_on`; then work that takes more than two seconds is shown until it ends: in a terminal on a
line that is erased afterwards, elsewhere by a line every half minute.
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
"""Seconds after which work is shown."""
INTERVAL = 30.0
"""Seconds before the first line and between lines, without a terminal."""
_ERASE = "\r\x1b[K"


@dataclass(eq=False)
class Wait:
    """Work in progress."""

    text: str
    """Name of the work, for example "evaluating"."""
    total: int = 0
    """Amount of work; 0 if unknown."""
    unit: str = ""
    done: int = 0
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def words(self) -> str:
        """Progress in words, for example "evaluating: 37 of 100 episodes, 12 s"."""
        counted = f": {self.done:,} of {self.total:,} {self.unit}" if self.total else ""
        return f"{self.text}{counted}, {self.seconds:.0f} s"


class _Display:
    """The stream on which waits are shown, and its current line."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waits: list[Wait] = []
        self.stream: TextIO | None = None
        self.thread: threading.Thread | None = None
        self.line = ""
        self.printed: dict[str, float] = {}

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
        """Show slow work, four times a second."""
        while True:
            time.sleep(0.25)
            with self.lock:
                if self.stream is not None and (slow := current()) and slow.seconds >= SLOW:
                    self._show(self.stream, slow)

    def _show(self, stream: TextIO, wait: Wait) -> None:
        if stream.isatty():
            if wait.words() != self.line:
                self.line = wait.words()
                _write(stream, f"{_ERASE}{self.line}")
        elif min(wait.seconds, self._since(wait)) >= INTERVAL:
            self.printed[wait.text] = time.monotonic()
            _write(stream, f"{wait.words()} ...\n")

    def _since(self, wait: Wait) -> float:
        """Seconds since the last line for work of the same name."""
        return time.monotonic() - self.printed.get(wait.text, -math.inf)


_display = _Display()


def _write(stream: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # The terminal may be gone.
        stream.write(text)
        stream.flush()


@contextmanager
def waiting(text: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """Name the work in the `with` block; with a total, any thread may set `done`."""
    wait = Wait(text, total, unit)
    _display.begin(wait)
    try:
        yield wait
    finally:
        _display.end(wait)


def current() -> Wait | None:
    """The innermost work in progress; work with a total first."""
    with _display.lock:
        counted = (wait for wait in reversed(_display.waits) if wait.total)
        return next(counted, _display.waits[-1] if _display.waits else None)


def show_on(stream: TextIO | None) -> TextIO | None:
    """Show slow work on a stream, or not at all; returns the previous stream."""
    with _display.lock:
        _display.erase()
        before, _display.stream = _display.stream, stream
        return before


def erase() -> None:
    """Erase the line in the terminal, before other output is printed."""
    _display.erase()
