"""Commands of etude as a person types them, in processes that start quickly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forks import Forks


def run_all(
    arguments: list[list[str]], folder: Path, environment: Mapping[str, str]
) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of commands of etude, run one after the other in a folder."""
    with Forks(environment, folder) as forks:
        done = [forks.run("etude.cli.main:main", command) for command in arguments]
    return [(each.code, each.out, each.err) for each in done]
