"""Errors a person can cause or must be told about; each message names the fix."""

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
    """A mistake or fault that ends in one clear sentence, not in a traceback.

    Whatever a file or a name put into the sentence, it stays one line without control characters.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        shown = (c if c.isprintable() else " " if c.isspace() else "?" for c in message)
        super().__init__("".join(shown))


AGAIN = 75
"""Exit code of a run that a signal has ended and that is saved: `etude resume` goes on (EX_TEMPFAIL
of sysexits.h, by which schedulers and mailers know a failure that passes)."""


class UsageError(EtudeError):
    """What was asked for does not exist or does not add up."""

    exit_code = 2


class KindError(ValueError):
    """A config that its kind refuses, with pydantic's error; `explain` names the fields."""

    def __init__(self, error: Any, model: type) -> None:
        super().__init__(str(error))
        self.error, self.model = error, model


class Damaged(EtudeError):
    """A file is not what was written to it: missing, cut or altered. `path` says which."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class ProcessLost(EtudeError):
    """Environments are gone with the process they ran in; `restore` or `reset` restarts it."""


def _has_room(num_bytes: int = 64 << 20) -> bool:
    """Whether this process is given so much more memory."""
    try:
        bytearray(num_bytes)
    except MemoryError:
        return False
    return True


_REFUSED = (
    *("can't allocate memory", "annot allocate memory", "ould not allocate memory"),
    *("can't start new thread", "failed to map segment"),
)
"""What torch, MuJoCo, Python and the system's loader say in errors of their own types."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is what numpy, torch, MuJoCo, Python or the system raise without memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, EtudeError):
        return False
    if "unknown exception" in str(error):  # pybind11 may have no memory left to say what it caught
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
    """A NaN or an infinity, caught before it could reach the weights.

    `where` names the first culprit ("observation 'state', column 4 of environment 17");
    `arrays` is a small flat tree that reproduces it.
    """

    exit_code = 3

    def __init__(self, where: str, arrays: dict[str, Any] | None = None) -> None:
        super().__init__(f"Not a finite number: {where}.")
        self.where = where
        self.arrays = arrays or {}


class Exited(EtudeError):
    """Foreign code was to end the process."""


class Exit(BaseException):
    """`os._exit` was called where it must not end the process."""

    def __str__(self) -> str:
        return f"os._exit({self.args[0]})"


_mine = threading.local()
_leave = os._exit


def _exit(status: int) -> NoReturn:
    """`os._exit`, but for foreign code, which a thread of this process runs, not a child of it."""
    if getattr(_mine, "process", None) == os.getpid():
        raise Exit(status)
    _leave(status)


def refuse_exits() -> None:
    """From now on this thread runs foreign code alone, whose `os._exit` is an error."""
    os._exit = _exit
    _mine.process = os.getpid()


@contextmanager
def contained(what: Callable[[], str]) -> Iterator[None]:
    """Foreign code that is to end the process raises an error instead; what: names that code."""
    before = getattr(_mine, "process", None)
    refuse_exits()
    try:
        yield
    except (SystemExit, KeyboardInterrupt, Exit) as error:
        raise_ending(error, what())
    finally:
        _mine.process = before


def raise_ending(error: BaseException, what: str) -> NoReturn:
    """Raise what was to end the process as an error; an interrupt of the main thread stays one."""
    main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and main:
        raise error
    text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    if not isinstance(error, SystemExit | Exit):
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # Others put hooks in the place of sys.exit, as W&B does, and here is one for os._exit.
    while len(frames) > 1 and frames[-1].name in ("exit", "_exit"):
        del frames[-1]
    last = frames[-1]
    place = f"{Path(last.filename).name}, line {last.lineno}"
    raise Exited(
        f"{what} called {text} ({place}), which would end the process: raise an exception for an "
        "error, or end the episode."
    ) from error
