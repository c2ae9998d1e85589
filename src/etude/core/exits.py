"""Foreign code that would end this process raises an error instead: an environment, its module."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from etude.core.errors import EtudeError


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
