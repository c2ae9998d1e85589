"""The progress bar of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from etude.core import output

Tick = Callable[[float, float], None]
"""Called with the amount that is done, and the total."""


@contextmanager
def bar(what: str, unit: str) -> Iterator[Tick]:
    """A progress bar on the standard error if that is a terminal; it is removed at the end."""
    console = Console(file=sys.stderr)
    progress = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    before = output.show_on(None) if console.is_terminal else None  # the bar shows it
    try:
        with progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    finally:
        if console.is_terminal:
            output.show_on(before)
