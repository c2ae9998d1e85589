"""What a run takes of the machine: the `system/` columns of a log row."""

from __future__ import annotations

import os
import resource
import sys
import time

import torch


class Usage:
    """CPU, memory and GPU use since the last reading. Changes nothing and decides nothing."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, float]:
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
