"""Commands of Etude side by side, each a process of its own that ends with the one above it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from etude.building.executing import SUMMARY
from etude.core.errors import UsageError
from etude.planning.recipe import Recipe
from etude.runs.folder import RunFolder
from etude.training.stop import SIGNALS

_WAIT = 30.0
"""Seconds that a run has to be let go by a command that was killed."""
_LOOK = 0.1


class Process(Protocol):
    """Something that runs, here or on another machine."""

    def poll(self) -> int | None:
        """Its exit code, negative where a signal ended it; None while it runs."""

    def send_signal(self, number: int, /) -> None: ...


class Processes:
    """So many at a time; a signal to this process is passed on to them, and begins no more."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.running: dict[int, Process] = {}
        self.signal = 0
        """What asked this process to stop; 0 for nothing."""

    def run(
        self,
        numbers: Iterable[int],
        begin: Callable[[int], Process],
        ended: Callable[[int, int], bool],
    ) -> None:
        """Begin each of them, and wait for all that have begun.

        ended: told a number and its exit code; True where it is to begin once more.
        """
        waiting = list(numbers)
        with self._passing_signals_on():
            while (waiting or self.running) and not (self.signal and not self.running):
                if waiting and len(self.running) < self.at_once and not self.signal:
                    number = waiting.pop(0)
                    self.running[number] = process = begin(number)
                    if self.signal:  # it came before the process was known
                        process.send_signal(self.signal)
                    continue
                time.sleep(_LOOK)
                for number, process in [*self.running.items()]:
                    code = process.poll()
                    if code is not None:
                        del self.running[number]
                        if ended(number, code):
                            waiting.insert(0, number)

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        def pass_on(number: int, frame: FrameType | None) -> None:
            self.signal = self.signal or number
            for process in self.running.values():
                process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def start(verb: list[str], log: Path | None = None) -> Process:
    """`etude VERB ...` in a process of its own; it prints to the end of `log`, or to here."""
    output = None if log is None else log.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "etude", *verb],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            process_group=0,  # signals of the terminal reach it through this process alone
            preexec_fn=_end_with_parent,
        )
    finally:
        if output is not None:
            output.close()


def _end_with_parent() -> None:
    """Linux stops a run with SIGTERM, which saves it, where the command above it is killed."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_for_writer(path: Path) -> None:
    """A run that was stopped a moment ago may still be saving itself."""
    end = time.monotonic() + _WAIT
    while time.monotonic() < end:
        try:
            RunFolder.open(path).close()
        except UsageError as error:
            if "is being written" not in str(error):
                return
            time.sleep(0.5)
        else:
            return


def is_finished(run: Path, recipe: Recipe) -> bool:
    """Whether a run has ended and was evaluated."""
    evaluated = any(run.glob(f"evaluations/*-final/{SUMMARY}"))
    needed = recipe.env is not None and recipe.evaluation.final_episodes > 0
    return (run / SUMMARY).is_file() and (evaluated or not needed)


def last_line(log: Path) -> str:
    """The last line that a process printed to its log."""
    with log.open("rb") as stream:
        stream.seek(max(log.stat().st_size - 4096, 0))
        lines = stream.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output")


def jobs_for(recipe: Recipe) -> int:
    """How many runs of a recipe the cores of this machine allow side by side."""
    if recipe.collector.kind != "local":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max((cores or 1) // threads_of(recipe), 1)


def threads_of(recipe: Recipe) -> int:
    """The cores that a run of a recipe keeps busy."""
    collecting = recipe.collector.threads * recipe.collector.engine_threads
    return max(collecting, recipe.learner.threads, 1)
