"""Errors for the user, whose messages name the fix; errors and exits of user code."""

from __future__ import annotations

import errno
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


class EtudeError(Exception):
    """An error that is shown as one sentence, without a traceback.

    Line breaks and control characters in names are removed from the message.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        shown = (c if c.isprintable() else " " if c.isspace() else "?" for c in message)
        super().__init__("".join(shown))


RESUMABLE = 75
"""Exit code of a run that was ended by a signal and can be resumed (EX_TEMPFAIL of sysexits.h, a
temporary failure for schedulers)."""


class UsageError(EtudeError):
    """Invalid input: something does not exist, or values contradict each other."""

    exit_code = 2


class KindError(ValueError):
    """Invalid config of a kind, with pydantic's error; `explain` makes a sentence of it."""

    def __init__(self, error: Any, model: type) -> None:
        super().__init__(str(error))
        self.error, self.model = error, model


class Damaged(EtudeError):
    """A file is missing, truncated or altered. `path`: the file."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class ProcessLost(EtudeError):
    """The process of some environments has ended; `restore` or `reset` restarts it."""


def _has_room(num_bytes: int = 64 << 20) -> bool:
    """Whether this process can allocate more memory."""
    try:
        bytearray(num_bytes)
    except MemoryError:
        return False
    return True


_REFUSED = (
    *("can't allocate memory", "annot allocate memory", "ould not allocate memory"),
    *("can't start new thread", "failed to map segment"),
)
"""Parts of messages of torch, MuJoCo, Python and the dynamic loader without memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether numpy, torch, MuJoCo, Python or the system raised an error for lack of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, EtudeError):
        return False
    if "unknown exception" in str(error):  # pybind11 without memory for a message
        return not _has_room()
    return any(text in str(error) for text in _REFUSED)


def describe_error(error: BaseException) -> str:
    """An error of user code in a few words, with file and line where they are known."""
    text = " ".join(str(error).split()).rstrip(".") or "no message"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


class NonFinite(EtudeError):
    """A NaN or an infinity, found before it could reach the weights.

    `where`: the first one ("observation 'state', column 4 of environment 17"); `arrays`: a small
    flat tree that reproduces it.
    """

    exit_code = 3

    def __init__(self, where: str, arrays: dict[str, Any] | None = None) -> None:
        super().__init__(f"Not a finite number: {where}.")
        self.where = where
        self.arrays = arrays or {}


class Exited(EtudeError):
    """User code tried to end the process."""


class Exit(BaseException):
    """`os._exit` was called by user code."""

    def __str__(self) -> str:
        return f"os._exit({self.args[0]})"


_mine = threading.local()
_leave = os._exit


def _exit(status: int) -> NoReturn:
    """`os._exit` that raises `Exit` for user code in a thread of this process, not in a child."""
    if getattr(_mine, "process", None) == os.getpid():
        raise Exit(status)
    _leave(status)


def refuse_exits() -> None:
    """Make `os._exit` raise in this thread from now on; for threads that run user code only."""
    os._exit = _exit
    _mine.process = os.getpid()


@contextmanager
def exits_as_errors(what: Callable[[], str]) -> Iterator[None]:
    """Turn attempts of user code to end the process into errors; `what` names the code."""
    before = getattr(_mine, "process", None)
    refuse_exits()
    try:
        yield
    except (SystemExit, KeyboardInterrupt, Exit) as error:
        raise_exited(error, what())
    finally:
        _mine.process = before


def raise_exited(error: BaseException, what: str) -> NoReturn:
    """Raise `Exited` for an attempt to end the process; interrupts of the main thread pass."""
    main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and main:
        raise error
    text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    if not isinstance(error, SystemExit | Exit):
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # Skip hooks in place of sys.exit (W&B's) and of os._exit (ours).
    while len(frames) > 1 and frames[-1].name in ("exit", "_exit"):
        del frames[-1]
    last = frames[-1]
    place = f"{Path(last.filename).name}, line {last.lineno}"
    raise Exited(
        f"{what} called {text} ({place}), which would end the process: raise an exception for an "
        "error, or end the episode."
    ) from error
