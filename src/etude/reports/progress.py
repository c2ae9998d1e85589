"""How far something is that takes a while, on the standard error, where that is a screen."""

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

from etude.core import progress as waits

Tick = Callable[[float, float], None]
"""Takes how much is done, of how much."""


@contextmanager
def bar(what: str, unit: str) -> Iterator[Tick]:
    """A progress bar on the standard error, where that is a screen; it goes away at the end."""
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
    shown = waits.show_on(None) if console.is_terminal else None  # the bar says it already
    try:
        with progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    finally:
        if console.is_terminal:
            waits.show_on(shown)
