"""How busy this machine is: a timing taken beside other work says nothing."""

from __future__ import annotations

import os
import time

from report import Gate

LIMIT = 0.15
"""Share of all cores that other work may use."""


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores that other work uses, measured over a second of doing nothing."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as stream:
            fields = [int(field) for field in stream.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    before = read()
    time.sleep(seconds)
    after = read()
    total = after[0] - before[0]
    return 1.0 - (after[1] - before[1]) / max(total, 1)


def report_load(gate: Gate) -> None:
    """Print the load, and tell the gate where that is too much for its timings to be judged."""
    share = busy_share()
    print(f"machine: {os.cpu_count()} cores, {share:.0%} busy, load {os.getloadavg()[0]:.2f}")
    if share > LIMIT:
        gate.too_busy(f"since other work used {share:.0%} of the cores (limit {LIMIT:.0%})")
