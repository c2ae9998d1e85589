"""Read untrusted files in a subprocess with memory and time limits.

The parent starts `python -P -m MODULE ORDER` and reads frames from its standard output: the length
of a JSON header, the header, and the bytes that the header announces. It never receives more than
numbers and text, so that it need not trust the reader. The reader limits its own memory and CPU
time before it opens a file, cannot write files, and should not import large packages.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from etude.core.trees import Tree

_START_SECONDS = 10.0
"""Added to the time limit for the start of the process."""
_LENGTH = struct.Struct("<I")
_MAX_HEADER = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Memory and time limits of a reader."""

    memory: int = 4 << 30
    """Bytes in addition to the reader's memory at its start."""
    seconds: float = 60.0
    """CPU seconds, and seconds of waiting for the next part of its answer."""


class ReaderEnded(Exception):
    """A reader ended, or was ended, before its answer; the message is the end of a sentence."""

    def __init__(self, why: Literal["slow", "crashed", "early", "broken"], words: str) -> None:
        super().__init__(words)
        self.why, self.words = why, words


class LimitedProcess:
    """A reader process, used by its parent; leaving the `with` statement ends it."""

    def __init__(
        self, module: str, order: Tree, limits: Limits, data: Iterable[memoryview | bytes] = ()
    ) -> None:
        """order: JSON for the reader's `run`; data: bytes for its standard input."""
        self.limits = limits
        # -P: files in the working directory are not importable.
        command = [sys.executable, "-P", "-m", module, json.dumps(order | asdict(limits))]
        few = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HDF5_PLUGIN_PRELOAD": "::"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **few},
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        try:
            self._give(data)
        except BaseException:
            self.close()
            raise

    def _give(self, data: Iterable[memoryview | bytes]) -> None:
        assert self._process.stdin is not None
        try:
            for part in data:
                rest = memoryview(part)
                while len(rest):
                    rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            self._process.stdin.close()
        except BrokenPipeError:
            raise self._ended() from None

    def header(self) -> Tree:
        """Read the next header."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _MAX_HEADER:
            raise ReaderEnded("broken", "was described absurdly")
        header: Tree = json.loads(bytes(self.read(length)))
        return header

    def read(self, size: int) -> bytearray:
        """Read the next `size` bytes; raises `ReaderEnded` when a part of them is late."""
        data = bytearray(size)
        rest = memoryview(data)
        while len(rest):
            if not select.select([self._pipe], [], [], self.limits.seconds + _START_SECONDS)[0]:
                self._process.kill()
                raise ReaderEnded("slow", f"took longer than {self.limits.seconds:g} s to read")
            count = os.readv(self._pipe, [rest])
            if not count:
                raise self._ended()
            rest = rest[count:]
        return data

    def _ended(self) -> ReaderEnded:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == -signal.SIGXCPU:
            return ReaderEnded("slow", f"took more than {self.limits.seconds:g} s of computing")
        if code < 0:
            return ReaderEnded("crashed", f"crashed its reader ({signal.Signals(-code).name})")
        return ReaderEnded("early", f"its reader ended early (exit code {code})")

    def close(self) -> None:
        """Kill the reader."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FrameWriter:
    """The reader's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "wb", buffering=1 << 16)

    def send(self, kind: str, data: Iterable[memoryview | bytes] = (), **content: Any) -> None:
        """Send a header and the bytes that it announces."""
        header = json.dumps({"kind": kind, **content}).encode()
        self._stream.write(_LENGTH.pack(len(header)))
        self._stream.write(header)
        for part in data:
            self._stream.write(part)
        self._stream.flush()


def serve(run: Callable[[Tree, FrameWriter], None]) -> None:
    """Main function of a reader: apply the limits, then run."""
    order = json.loads(sys.argv[1])
    # A separate descriptor, so that output of libraries does not mix with the frames.
    writer = FrameWriter(os.dup(1))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limit_memory(int(order["memory"]))
    limit_seconds(float(order["seconds"]))
    run(order, writer)


def limit_memory(num_bytes: int) -> None:
    """Allow `num_bytes` beyond the present address space; forbid core dumps and writing files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc") else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + num_bytes
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def limit_seconds(seconds: float) -> None:
    """Allow `seconds` of CPU time from now on; then the system ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted, hard))
