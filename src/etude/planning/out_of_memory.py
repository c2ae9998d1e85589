"""Runs that need more memory than there is: refused or warned of before they begin.

Where nothing else helps, the system ends a process that takes too much without a word. So a plan
that cannot fit is refused, and one that may not is warned of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from etude.core.errors import EtudeError, UsageError
from etude.planning.page import size
from etude.planning.plan import Plan
from etude.runs.folder import PLAN_JSON

_FIX = (
    "`etude plan` shows what takes it: fewer collector.num_envs, a shorter rollout, a smaller "
    "minibatch or network need less."
)


class OutOfMemory(EtudeError):
    """An allocation was refused."""


def machine_memory() -> tuple[int, int]:
    """Bytes of this machine or container, and those of them that are free; (0, 0) if unknown."""
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    total, free = (int(fields.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
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
        raise UsageError(f"The plan has a buffer of {size(buffer)}, and {there}. {_FIX}")
    say(f"The plan expects {size(peak)} at the peak, and {there}. {_FIX}")


@contextmanager
def explained(run: Path | None = None) -> Iterator[None]:
    """Turn an allocation that was refused into a sentence, with the figure of the run's plan."""
    try:
        yield
    except Exception as error:
        if not is_refusal(error):
            raise
        total, free = machine_memory()
        words = " ".join(str(error).split()) or "an allocation was refused"
        peak = "" if run is None else f"The plan expects {_planned(run)} at the peak. {_FIX} "
        raise OutOfMemory(
            f"Out of memory: {words.rstrip('.')}. This machine has {size(total)}, {size(free)} of "
            f"it free. {peak}Nothing that was saved is lost."
        ) from error


def _planned(run: Path) -> str:
    try:
        return size(json.loads(_read(str(run / PLAN_JSON)))["bytes"]["peak"])
    except (ValueError, KeyError, TypeError):
        return "an unknown size"


def is_refusal(error: BaseException) -> bool:
    """Whether this is what numpy, torch or Python raise where there is no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no type of its own for the memory of a CPU.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
