"""Signals: stop at the end of the iteration if it comes soon, otherwise exit without a save."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from etude.core import output
from etude.core.errors import RESUMABLE, EtudeError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run, from users, closing terminals and schedulers at their time limits."""
LEAST_GRACE = 5.0
"""Seconds that a run has at least to finish its iteration."""
ITERATIONS = 3
"""The grace is this factor times the longest iteration so far, its save included, if longer."""

SAME = 1.0
"""Seconds in which a repeated signal is ignored: a scheduler may send it to all processes, and the
parent process passes it on."""
LOOK = 1.0
"""Seconds between checks for a signal that the main thread could not handle."""
_HANGS = "; its disk hangs, and the system lets the process go only when the disk answers"


class StopRequest:
    """Turns signals into a request that the loop reads at the ends of iterations.

    If the iteration does not end within the grace, or a second signal comes, the process exits: a
    resume recomputes the lost steps from the last checkpoint, bit for bit. A separate thread
    responds, since the training thread may be in a library or wait for the disk.
    """

    def __init__(
        self, grace: float | None = None, doing: Callable[[], str] = lambda: "training"
    ) -> None:
        """grace: seconds until the process exits within an iteration; None: by the duration of
        iterations. doing: describes the present activity and its duration."""
        self.signal: int | None = None
        self.pause_after: int | None = None
        """Iterations after which the run pauses; None for a run that goes on to its end."""
        self._given = grace
        self._doing = doing
        self._longest = 0.0
        self._boundary = time.monotonic()
        self._saved = (0, self._boundary)
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def is_due(self, iterations: int) -> bool:
        """Whether a run stops after this number of iterations, by a signal or for a pause."""
        return self.requested or self.pauses(iterations)

    def pauses(self, iterations: int) -> bool:
        """Whether a run pauses after this number of iterations."""
        return self.pause_after is not None and iterations >= self.pause_after

    @property
    def grace(self) -> float:
        """Seconds from a signal to the exit of the process, if the iteration does not end."""
        by_iterations = max(LEAST_GRACE, ITERATIONS * self._longest)
        return by_iterations if self._given is None else self._given

    def boundary(self, step: int, saved: bool) -> None:
        """Record the end of an iteration, and whether it was saved."""
        now = time.monotonic()
        self._longest, self._boundary = max(self._longest, now - self._boundary), now
        if saved:
            self._saved = (step, now)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self  # Only the main thread receives signals.
        self._boundary = time.monotonic()
        self._saved = (self._saved[0], self._boundary)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # Started by nohup: it continues when its terminal closes.
            self._previous[number] = signal.signal(number, self._on_signal)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=[self._pipe[0]], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._pipe[1])  # Ends the thread, which closes the other end.
        self._pipe = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number

    def _watch(self, pipe: int) -> None:
        """Acknowledge the first signal; exit after a second one, or at the deadline."""
        deadline: float | None = None
        first = 0.0
        while True:
            left = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
            ready = select.select([pipe], [], [], max(0.0, left))[0]
            came = os.read(pipe, 64) if ready else _not_taken()
            if ready and not came:
                os.close(pipe)
                return
            for number in came:
                if number not in SIGNALS:
                    continue
                now = time.monotonic()
                if deadline is not None and number == self.signal and now - first < SAME:
                    continue
                if deadline is not None:
                    self._exit()
                first, deadline = now, now + self.grace
                self.signal = self.signal or number
                _tell(f"{signal.Signals(number).name}: {self._answer()}")
            if deadline is not None and time.monotonic() >= deadline:
                self._exit()

    def _answer(self) -> str:
        """The message about the consequences of a signal."""
        return (
            f"the run is saved at the end of this iteration if that comes within {self.grace:.0f} "
            f"s; a second signal ends it at once. It has been {self._doing()}."
        )

    def _exit(self) -> None:
        step, since = self._saved
        _tell(
            f"Stopped without saving: the {time.monotonic() - since:.0f} s of work since step "
            f"{step:,} are lost, and `etude resume` does them again. It had been {self._doing()}"
            f"{_HANGS if _disk_hangs() else ''}."
        )
        os._exit(128 + (self.signal or signal.SIGTERM))


class _Asked(BaseException):
    """A signal before the first iteration; not an `Exception`, so that no handler catches it."""


class _Start(StopRequest):
    """Interrupts the main thread, or exits after the grace."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            raise _Asked

    def _answer(self) -> str:
        return "the run is not continued; its checkpoint is unchanged."

    def _exit(self) -> None:
        os._exit(RESUMABLE)


@contextmanager
def starting(error: EtudeError) -> Iterator[None]:
    """Until the loop handles signals: raise `error` at the first one, since nothing is lost yet."""
    try:
        with _Start():
            yield
    except _Asked:
        raise error from None


def _not_taken() -> bytes:
    """The number of a signal that the main thread cannot handle while it waits for the disk."""
    taken = signal.sigtimedwait(SIGNALS, 0) if hasattr(signal, "sigtimedwait") else None
    return b"" if taken is None else bytes([taken.si_signo])


def _disk_hangs() -> bool:
    """Whether the main thread is in an uninterruptible system call."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/stat") as stream:
        return stream.read().rpartition(")")[2].split()[0] == "D"
    return False


def _tell(text: str) -> None:
    """Print a message to standard error; the terminal may be gone."""
    output.erase()
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
