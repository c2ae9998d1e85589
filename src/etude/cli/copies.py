"""Runs in object stores, for commands that read folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.core.errors import UsageError
from etude.runs import stored
from etude.runs.files import store_url


@contextmanager
def downloaded(arguments: list[str]) -> Iterator[list[str]]:
    """The arguments with folders of this machine in place of URLs of runs, or of places that hold
    runs; what the command adds to a run is published after it."""
    copies: list[Path] = []
    words: list[str] = []
    for argument in arguments:
        found = _copies(url) if (url := store_url(argument)) else []
        copies += [folder for folder, _ in found]
        words += [str(folder / inside) for folder, inside in found] or [argument]
    yield words
    for folder in dict.fromkeys(copies):
        stored.copy_of(folder).publish()


def _copies(url: str) -> list[tuple[Path, str]]:
    """(folder, path inside) of the runs at or below a URL, or of a checkpoint in a run."""
    run, _, inside = url.partition("/checkpoints/")
    found = stored.find_runs(run)
    if not found:
        raise UsageError(f"There are no runs in {url}.")
    return [(stored.mirror(each), f"checkpoints/{inside}" if inside else "") for each in found]
