"""Where the time goes, and what a run takes of the machine.

Nothing in here may decide anything but when to save.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from etude.core.progress import waiting

_WORDS = {
    "collect": "collecting",
    "train": "updating",
    "test": "evaluating",
    "save": "writing a checkpoint to the disk",
    "": "writing logs and calling callbacks",
}
"""What a phase does; "" is what is between them."""


class Stopwatch:
    """Seconds per phase (collect, train, test, save) since the last reading."""

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._splits: dict[tuple[str, str], float] = {}
        self._phase, self._phase_start = "", time.perf_counter()
        self._start = time.perf_counter()
        self._steps_read = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._phase, self._phase_start = name, start
        self._on_phase(name)
        try:
            with waiting(_WORDS.get(name, name)):
                yield
        finally:
            self._on_phase("")
            self._phase, self._phase_start = "", time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def doing(self) -> str:
        """What is going on, and for how long, in words; any thread may ask."""
        name, since = self._phase, self._phase_start
        return f"{_WORDS.get(name, name)} for {time.perf_counter() - since:.0f} s"

    def split(self, phase: str, seconds: dict[str, float]) -> None:
        """What a phase was spent on, by the threads that worked in it."""
        for name, value in seconds.items():
            key = (phase, name)
            self._splits[key] = self._splits.get(key, 0.0) + value

    def begin(self, timesteps: int, elapsed: float = 0.0) -> None:
        """Steps are counted from here; `elapsed` was spent before a resume."""
        self._start = time.perf_counter() - elapsed
        self._steps_read = timesteps

    def read(self, timesteps: int, iterations: int) -> dict[str, float]:
        """The `time/` columns of a log row.

        `time/fps` is steps per second of collecting and training: an evaluation, a checkpoint or
        a callback among them does not make it lower. `time/collect_fps` is of collecting alone.
        """
        steps, self._steps_read = timesteps - self._steps_read, timesteps
        collect, train = (self._seconds.get(name, 0.0) for name in ("collect", "train"))
        row = {
            "time/fps": steps / max(collect + train, 1e-9),
            "time/collect_fps": steps / max(collect, 1e-9),
            "time/total_timesteps": float(timesteps),
            "time/iterations": float(iterations),
            "time/time_elapsed": time.perf_counter() - self._start,
        }
        row |= {f"time/{name}": seconds for name, seconds in sorted(self._seconds.items())}
        for (phase, name), seconds in sorted(self._splits.items()):
            # Threads work side by side: their seconds are scaled to those on the wall.
            together = sum(s for (other, _), s in self._splits.items() if other == phase)
            row[f"time/{name}"] = seconds / max(together, 1e-9) * self._seconds.get(phase, 0.0)
        self._seconds, self._splits = {}, {}
        return row


class Usage:
    """CPU, memory and GPU use since the last reading. Changes nothing and decides nothing."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, float]:
        """The `system/` columns of a log row."""
        wall, cpu = time.perf_counter(), _cpu_seconds()
        cores = (cpu - self._cpu) / max(wall - self._wall, 1e-9)
        self._wall, self._cpu = wall, cpu
        row = {"system/cpu_cores": cores, "system/memory_mib": _resident_bytes() / 2**20}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            row["system/gpu_memory_mib"] = (total - free) / 2**20
        return row


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _resident_bytes() -> int:
    """Resident memory now; where there is no /proc, its peak."""
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
