"""Standard output and error that never end a run, and notices about outputs that failed.

The reader of a run's output may go away (`| head`), stop reading (a pager, a stopped terminal), or
be a full disk. `nonblocking_output` replaces both streams by an `OutputStream`, which neither
raises nor waits. `notices` reports each failure once, and also writes it to the run's folder, for
a user who looks hours later.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
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
