"""Output of commands: streams that never end a run, notices, progress of slow work, units.

The reader of a run's output may go away (`| head`), stop reading (a pager, a stopped terminal), or
be a full disk. `nonblocking_output` replaces both streams by an `OutputStream`, which neither
raises nor waits. `notices` reports each failure once, and also writes it to the run's folder, for
a user who looks hours later.

Slow work is named by `with waiting("compiling the model"):`. Nothing is printed unless a program
calls `show_on`; then work that takes more than two seconds is shown until it ends: in a terminal on
a line that is erased afterwards, elsewhere by a line every half minute.
"""

from __future__ import annotations

import csv
import errno
import io
import math
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TextIO

from etude.core.errors import EtudeError

LARGEST = 1 << 20
"""Most bytes in the buffer for a slow reader; more are left out."""
PATIENCE = 5.0
"""Seconds that the end of a command waits for a reader that does not read."""
MOST_NOTICES = 100
"""Most notices kept for a file that cannot be written."""
_LOCK = threading.RLock()
"""One lock for all streams, because a failure of one is reported on another."""
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENXIO)
_PIECE = 1 << 16


class Notices:
    """Notices about outputs that failed, on standard error and in a file of the run."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._kept: list[str] = []

    def keep_in(self, path: Path) -> None:
        """Set the file for all notices, earlier ones included."""
        with _LOCK:
            self._path = path
            self._keep()

    def add(self, sentence: str) -> None:
        """Print a notice if that is still possible, and write it to the file."""
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {sentence}"
        with _LOCK:
            self._kept = [*self._kept, line][-MOST_NOTICES:]
            self._keep()
        for stream in (sys.stderr, sys.stdout):
            if stream is None or getattr(stream, "failed", False):
                continue
            with suppress(OSError, ValueError):  # for example a terminal that is gone
                print(sentence, file=stream, flush=True)
                if not getattr(stream, "failed", False):
                    return

    def _keep(self) -> None:
        if self._path is None or not self._kept:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):  # retried with the next notice
            with os.fdopen(os.open(self._path, flags, 0o666), "a") as file:
                file.write("".join(f"{line}\n" for line in self._kept))
            self._kept = []


notices = Notices()


class OutputLost(EtudeError):
    """The output of a command cannot be written."""

    def __init__(self, name: str, error: OSError) -> None:
        gone = error.errno == errno.EPIPE  # for example `| head`, which prints no error
        super().__init__("" if gone else f"{name} cannot be written: {error.strerror}.")
        if gone:
            self.exit_code = 128 + signal.SIGPIPE


class OutputStream:
    """A stream with a bounded buffer for a slow reader; what does not fit is left out.

    With `strict`, for commands whose result is their output, it waits for its reader and raises
    `OutputLost`.
    """

    def __init__(self, stream: TextIO, name: str, strict: bool = False) -> None:
        stream.flush()
        self._stream, self._name, self._strict = stream, name, strict
        self._text, self._waiting = "", bytearray()
        self._left_out = 0
        self._gone = self._reported = False
        self.failed = False
        """Whether the last attempt to write failed."""
        self._send = _sender(stream.fileno())

    def write(self, text: str) -> int:
        with _LOCK:
            lines, newline, rest = text.rpartition("\n")
            self._text += lines + newline
            if newline:
                self._push()
            self._text += rest
        return len(text)

    def flush(self) -> None:
        with _LOCK:
            self._push()

    def end(self) -> None:
        """Write the buffer, for as long as the reader reads."""
        with _LOCK:
            self._push()
            since, size = time.monotonic(), len(self._waiting)
            while self._waiting and not self.failed and time.monotonic() - since < PATIENCE:
                select.select([], [self._stream.fileno()], [], 0.1)
                self._drain()
                if len(self._waiting) < size:
                    since, size = time.monotonic(), len(self._waiting)
            if self._waiting and not self.failed:
                self._report("was not read to its end")
            self._waiting.clear()

    def _push(self) -> None:
        text, self._text = self._text, ""
        if self._gone:
            return
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        if len(self._waiting) + len(data) <= LARGEST or self._strict:
            self._waiting += data
        else:
            self._left_out += text.count("\n") or 1
            if not self.failed:
                self._report("is not being read, and lines of it are left out")
        self._drain()

    def _drain(self) -> None:
        """Write as much of the buffer as the reader takes now."""
        while self._waiting:
            try:
                del self._waiting[: self._send(bytes(self._waiting[:_PIECE]))]
                self.failed = False
            except BlockingIOError:
                if not self._strict:
                    return
                select.select([], [self._stream.fileno()], [])
            except OSError as error:
                return self._fail(error)
            if not self._waiting and self._left_out:
                note, self._left_out = f"... {self._left_out:,} lines are left out ...\n", 0
                self._waiting += note.encode()

    def _fail(self, error: OSError) -> None:
        self.failed = True
        self._gone = error.errno in _GONE or (error.errno == errno.EIO and self._stream.isatty())
        if self._gone:
            self._waiting.clear()
        if self._strict:
            self._gone = True
            self._waiting.clear()
            raise OutputLost(self._name, error)
        self._report(f"cannot be written ({error.strerror})")

    def _report(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            notices.add(f"{self._name} {what}: the command goes on without it.")

    def forget(self) -> None:
        """Clear the buffer in a forked process; its parent writes it."""
        self._text = ""
        self._waiting.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _sender(fd: int) -> Callable[[bytes], int]:
    """A function that writes to a descriptor, and raises BlockingIOError instead of waiting.

    The descriptor may be shared with the shell, so O_NONBLOCK is not set on it.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        own = socket.socket(fileno=os.dup(fd))
        return lambda data: own.send(data, socket.MSG_DONTWAIT)
    if not (stat.S_ISFIFO(mode) or os.isatty(fd)):
        return partial(os.write, fd)
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return partial(os.write, os.open(f"/proc/self/fd/{fd}", flags))
    except OSError:  # another system, a terminal of another user, or no reader
        return partial(_write_if_ready, fd)


def _write_if_ready(fd: int, data: bytes) -> int:
    if not select.select([], [fd], [], 0.0)[1]:
        raise BlockingIOError
    return os.write(fd, data[: select.PIPE_BUF])


_open: list[OutputStream] = []


def _in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    for outlet in _open:
        outlet.forget()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def nonblocking_output(strict: bool) -> Iterator[None]:
    """Replace standard output and error by `OutputStream`s; `strict`: for standard output."""
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    put: list[OutputStream] = []
    for name, stream in before.items():
        opened: Any = stream
        if opened is None:  # It was closed; its descriptor must not be reused for another file.
            opened = open(os.devnull, "w")  # noqa: SIM115
        with suppress(
            OSError, ValueError, AttributeError
        ):  # for example the streams of a notebook or a test
            what = "output" if name == "stdout" else "error"
            opened = OutputStream(opened, f"Standard {what}", strict and name == "stdout")
            put.append(opened)
        setattr(sys, name, opened)
    _open.extend(put)
    try:
        yield
    finally:
        try:
            for outlet in put:
                outlet.end()
        finally:
            _open[:] = [outlet for outlet in _open if outlet not in put]
            for name, stream in before.items():
                setattr(sys, name, stream)


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


def in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this code; IPython is not imported for that."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def can_draw_on(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can be drawn on."""
    if stream is None or not stream.isatty():
        return False
    from rich.console import Console

    console = Console(file=stream)
    return console.encoding.startswith("utf") and not console.is_dumb_terminal


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Format bytes: 524 B, 1.4 MiB."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} {_UNITS[unit]}" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format seconds: 41.0 s, 3 min 20 s, 5 h 12 min, 12 d 3 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for upper, lower, high, low in ((3600, 60, "min", "s"), (86400, 3600, "h", "min")):
        if seconds < upper:
            rest = int(seconds % lower) if low == "s" else int(seconds % lower) // 60
            return f"{int(seconds // lower)} {high} {rest} {low}"
    return f"{int(seconds // 86400)} d {int(seconds % 86400) // 3600} h"


def amount(count: int, what: str) -> str:
    """Format a count with its unit: 1 cycle, 2,048 cycles."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def rendered(parts: Iterable[Any], width: int = 100, color: bool = False) -> str:
    """Lines and tables of `rich` as a text, the same in a terminal and in a notebook."""
    from rich.console import Console  # only commands that print tables load it

    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        force_jupyter=False,  # which would display the text in a notebook instead of writing it
        highlight=False,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def new_table(*columns: str, left: Sequence[str] = (), **options: Any) -> Any:
    """An empty table; the first column and those of `left` are aligned to the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", **options)
    for index, name in enumerate(columns):
        if not index or name in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def html_table(title: str, facts: Mapping[str, object], below: str = "") -> str:
    """Names and values as a table for notebooks; all text is escaped. below: HTML under it."""
    cells = "".join(
        f'<tr><td style="text-align: left">{escape(name)}</td>'
        f'<td style="text-align: left">{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table>{below}</div>"


def html_text(title: str, text: str, unfolded: bool = False) -> str:
    """A text of fixed width under its title for notebooks; both are escaped."""
    style = "font-family: monospace; line-height: 1.2; white-space: pre"
    return (
        f"<details{' open' * unfolded}><summary>{escape(title)}</summary>"
        f'<pre style="{style}">{escape(text)}</pre></details>'
    )


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
