"""Commands of etude as a person types them, in processes that start at once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from forks import Forks


@cache
def _forks() -> Forks:
    """With the libraries loaded: one for all tests of this process."""
    forks = Forks()
    atexit.register(forks.close)
    return forks


def run(
    arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """(exit code, output, errors) of a command of etude in a folder.

    environment: instead of today's, but for variables that the libraries read when they are loaded.
    """
    known = os.environ if environment is None else environment
    done = _forks().run("etude.cli.main:main", arguments, folder=folder, environment=known)
    return done.code, done.out, done.err


def run_all(
    arguments: list[list[str]], folder: Path, environment: Mapping[str, str]
) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of commands of etude, run one after the other in a folder."""
    return [run(command, folder, environment) for command in arguments]
