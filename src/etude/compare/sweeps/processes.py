"""Commands of Etude in parallel: as processes on this machine, or as tasks on a Ray cluster."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from etude.building.build import SUMMARY
from etude.core.errors import UsageError
from etude.planning.recipe import Recipe
from etude.runs.folder import RunFolder
from etude.training.stop import SIGNALS

_WAIT = 30.0
"""Seconds to wait for the lock of a run whose process was killed."""
_POLL = 0.1
"""Seconds between two looks at the processes."""
_STORE = 1 << 27
"""Bytes of the object store of a local Ray cluster; tasks hardly need it."""


class Process(Protocol):
    """A process on this machine or another."""

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""

    def send_signal(self, number: int, /) -> None: ...


class Processes:
    """Runs commands, a limited number at a time.

    A signal to this process is passed on to them, and no further ones are started.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.running: dict[int, Process] = {}
        self.signal = 0
        """The signal that stopped this process; 0 for none."""

    def run(
        self,
        numbers: Iterable[int],
        begin: Callable[[int], Process],
        ended: Callable[[int, int], bool],
    ) -> None:
        """Start a process for each number, and wait for all.

        ended: called with a number and its exit code; returns True to start it again.
        """
        waiting = list(numbers)
        with self._passing_signals_on():
            while (waiting or self.running) and not (self.signal and not self.running):
                if waiting and len(self.running) < self.at_once and not self.signal:
                    number = waiting.pop(0)
                    self.running[number] = process = begin(number)
                    if self.signal:  # it came while the process was starting
                        process.send_signal(self.signal)
                    continue
                time.sleep(_POLL)
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
    """Start `etude VERB ...`; its output is appended to `log`, or printed."""
    output = None if log is None else log.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "etude", *verb],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            process_group=0,  # so that only this process gets the signals of the terminal
            preexec_fn=_end_with_parent,
        )
    finally:
        if output is not None:
            output.close()


def _end_with_parent() -> None:
    """Let Linux send SIGTERM, which saves a run, when the parent process is killed."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_for_writer(path: Path) -> None:
    """Wait until a run that was just stopped has saved itself."""
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
    """Whether a run has ended and was evaluated, if its recipe asks for that."""
    evaluated = any(run.glob(f"evaluations/*-final/{SUMMARY}"))
    needed = recipe.env is not None and recipe.evaluation.final_episodes > 0
    return (run / SUMMARY).is_file() and (evaluated or not needed)


def last_line(log: Path) -> str:
    """The last line of a log."""
    with log.open("rb") as stream:
        stream.seek(max(log.stat().st_size - 4096, 0))
        lines = stream.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output")


def jobs_for(recipe: Recipe) -> int:
    """The number of runs of a recipe that the cores of this machine allow in parallel."""
    if recipe.collector.kind != "local":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max((cores or 1) // threads_of(recipe), 1)


def threads_of(recipe: Recipe) -> int:
    """The number of cores that a run of a recipe uses."""
    collecting = recipe.collector.threads * recipe.collector.engine_threads
    return max(collecting, recipe.learner.threads, 1)


def connected(address: str, cpus: int, threads: int) -> Callable[[list[str], Path], Process]:
    """Connect to a Ray cluster, or start one on this machine ("local").

    Returns the function that starts `etude VERB RUN ...` there, in the current folder. cpus: of a
    local cluster. threads: cores per command.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray needs Ray: `pip install etude[ray]`, or leave it out.")
    from etude.rollout import ray as clusters  # loads torch

    clusters.check(address)
    clusters.connect(address, cpus, _STORE)
    import ray

    # No retries: the sweep starts a lost task again from its checkpoint.
    there = {"env_vars": clusters.environment()}
    task = ray.remote(num_cpus=threads, max_retries=0, runtime_env=there)(_run)

    def start_there(verb: list[str], log: Path) -> Process:
        name, run, *options = verb
        absolute = [name, str(Path(run).absolute()), *options]
        return Task(ray, task.remote(absolute, str(log.absolute()), os.getcwd()))

    return start_there


class Task:
    """A command on a Ray cluster."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:  # the machine or the process is lost
            return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        self._ray.cancel(self._reference, force=False)


def _run(verb: list[str], log: str, folder: str) -> int:
    """Run a command on the cluster; save the run if the task is cancelled."""
    with suppress(OSError):  # environments of the user are imported from there
        os.chdir(folder)
    process = start(verb, Path(log))
    assert isinstance(process, subprocess.Popen)
    try:
        while process.poll() is None:
            time.sleep(_POLL)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return int(process.returncode)
