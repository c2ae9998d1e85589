"""Commands that gates run: each in a process group of its own, which ends with the gate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from report import Gate


class CommandFailed(Exception):
    """What was run ended with an error; the message is what it said."""


@contextmanager
def started(command: list[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with whatever it starts; none of it is left afterwards. how: as of `Popen`."""
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


def run(gate: Gate, command: list[str]) -> str:
    """What a command prints; it must end well, and within what is left of the gate's time."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **pipes) as process:
        try:
            told, said = process.communicate(timeout=gate.seconds_left)
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"{_shown(command)}: no end within the gate's time") from error
    if process.returncode:
        words = (said or told)[-2000:]
        raise CommandFailed(f"{_shown(command)} ended with {process.returncode}: {words}")
    return told


def etude(gate: Gate, *arguments: str) -> str:
    """What an etude command prints."""
    return run(gate, [sys.executable, "-m", "etude", *arguments])


def record(
    gate: Gate, folder: Path, episodes: int, image_size: int = 0, task: str = "pick-place"
) -> None:
    """Make a dataset of pick-and-place, successes and failures; 0 pixels record no pictures.

    task: a recipe of pick-and-place.
    """
    command = ["data", "record", task, str(folder), "--episodes", str(episodes)]
    etude(gate, *command, "--image-size", str(image_size))


def _shown(command: list[str]) -> str:
    return " ".join(Path(word).name if word == sys.executable else word for word in command)
