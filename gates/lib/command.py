"""Run commands from gates, each in its own process group, which ends with the gate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from etude.planning import recipes
from etude.planning.recipes import Recipe


class Timed(Protocol):
    """A command's time limit, for example the remaining time of a gate."""

    @property
    def seconds_left(self) -> float: ...


class CommandFailed(Exception):
    """The command ended with an error; the message is its output."""


@contextmanager
def started(command: list[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process; afterwards kill its process group. how: arguments of `Popen`."""
    process = subprocess.Popen(command, text=True, start_new_session=True, **how)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run(gate: Timed, command: list[str]) -> str:
    """Return the output of a command, which must succeed within the gate's remaining time."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **pipes) as process:
        try:
            out, err = process.communicate(timeout=gate.seconds_left)
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"{_shown(command)}: did not end within the gate's time") from error
    if process.returncode:
        words = (err or out)[-2000:]
        raise CommandFailed(f"{_shown(command)} ended with {process.returncode}: {words}")
    return out


def etude(gate: Timed, *arguments: str) -> str:
    """Return the output of an `etude` command."""
    return run(gate, [sys.executable, "-m", "etude", *arguments])


def record(
    gate: Timed, folder: Path, episodes: int, image_size: int = 0, task: str = "pick-place"
) -> None:
    """Record a dataset of pick-and-place with successes and failures; image_size 0: no images.

    task: a recipe of pick-and-place.
    """
    command = ["data", "record", task, str(folder), "--episodes", str(episodes)]
    etude(gate, *command, "--image-size", str(image_size))


def changed(name: str, changes: list[str]) -> Recipe:
    """A recipe with changed fields, for example "policy.kind=mlp"."""
    content: dict[str, Any] = recipes.find(name).model_dump(mode="json")
    for change in changes:
        path, _, value = change.partition("=")
        *parents, field = path.split(".")
        node = content
        for parent in parents:
            node = node[parent]
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
        node[field] = value
    return recipes.validated(content, "--set")


def _shown(command: list[str]) -> str:
    return " ".join(Path(word).name if word == sys.executable else word for word in command)
