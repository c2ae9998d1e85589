"""Trials as Ray tasks: each is the same command in a process of its own, on some machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.compare.sweeps.processes import Process
from etude.compare.sweeps.processes import start as start_here
from etude.core.errors import UsageError
from etude.rollout import ray as clusters

_STORE = 1 << 27
"""Bytes of the object store of a cluster that is started here; tasks pass it next to nothing."""
_LOOK = 0.2


def connected(address: str, cpus: int, threads: int) -> Callable[[list[str], Path], Process]:
    """Connect to a cluster, or start one here ("local"); what then begins `etude VERB RUN ...` on
    it, in this process's folder.

    cpus: of a cluster that is started here. threads: cores that a command takes.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray needs Ray: `pip install etude[ray]`, or leave it out.")
    clusters.check(address)
    clusters.connect(address, cpus, _STORE)
    import ray

    # A task that is lost is begun again by the sweep, which knows of its checkpoint.
    there = {"env_vars": clusters.environment()}
    task = ray.remote(num_cpus=threads, max_retries=0, runtime_env=there)(_run)

    def start(verb: list[str], log: Path) -> Process:
        name, run, *options = verb
        absolute = [name, str(Path(run).absolute()), *options]
        return Task(ray, task.remote(absolute, str(log.absolute()), os.getcwd()))

    return start


class Task:
    """A command on a cluster, seen from here."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._reference))
        except self._ray.exceptions.RayError:  # its machine or its process is gone
            return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        self._ray.cancel(self._reference, force=False)


def _run(verb: list[str], log: str, folder: str) -> int:
    """On the cluster: run a command to its end; a cancelled one is asked to save itself."""
    with suppress(OSError):  # Tasks of the user are imported from there.
        os.chdir(folder)
    process = start_here(verb, Path(log))
    assert isinstance(process, subprocess.Popen)
    try:
        while process.poll() is None:
            time.sleep(_LOOK)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return int(process.returncode)
