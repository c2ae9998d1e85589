"""Runs that need more memory than there is: refused or warned of before they begin.

Where nothing else helps, the system ends a process that takes too much without a word. So a plan
that cannot fit is refused, and one that may not is warned of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.core.errors import UsageError
from etude.core.imports import attribute
from etude.planning.page import size
from etude.planning.plan import Plan

FIX = (
    "`etude plan` shows what takes it: fewer collector.num_envs, a shorter rollout, a smaller "
    "minibatch or network need less."
)


def machine_memory() -> tuple[int, int]:
    """Bytes of this machine or container, and those of them that are free; (0, 0) if unknown."""
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    total, free = (int(fields.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        total, free = min(total, int(limit)), min(free, int(limit))
    return total, free


def check_plan(plan: Plan, say: Callable[[str], None]) -> None:
    """Refuse a plan whose buffer alone is more than all memory; warn of one that may not fit."""
    (total, free), peak = machine_memory(), plan.bytes["peak"]
    if not total or peak <= free:
        return
    there = f"this machine has {size(total)} of memory, {size(free)} of it free"
    buffer = plan.bytes.get("buffer", 0)
    if buffer > total:
        raise UsageError(f"The plan has a buffer of {size(buffer)}, and {there}. {FIX}")
    say(f"The plan expects {size(peak)} at the peak, and {there}. {FIX}")


@contextmanager
def explained(run: Path | None = None) -> Iterator[None]:
    """Turn an allocation that was refused into a sentence, with the figure of the run's plan."""
    try:
        yield
    except Exception as error:
        told = attribute("etude.planning.refused_memory:told")(error, run)
        if told is None:
            raise
        raise told from error


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
