"""An allocation that was refused, in a sentence; see `out_of_memory.explained`."""

from __future__ import annotations

import json
from pathlib import Path

from etude.core.errors import EtudeError, is_out_of_memory
from etude.planning.out_of_memory import FIX, machine_memory, read
from etude.planning.page import size
from etude.runs.folder import PLAN_JSON


class OutOfMemory(EtudeError):
    """An allocation was refused."""


def told(error: BaseException, run: Path | None) -> OutOfMemory | None:
    """What to say of an error, with the figure of the run's plan; None if memory is not why."""
    if not is_out_of_memory(error):
        return None
    total, free = machine_memory()
    words = " ".join(str(error).split()) or "an allocation was refused"
    peak = "" if run is None else f"The plan expects {_planned(run)} at the peak. {FIX} "
    return OutOfMemory(
        f"Out of memory: {words.rstrip('.')}. This machine has {size(total)}, {size(free)} of it "
        f"free. {peak}Nothing that was saved is lost."
    )


def _planned(run: Path) -> str:
    try:
        return size(json.loads(read(str(run / PLAN_JSON)))["bytes"]["peak"])
    except (ValueError, KeyError, TypeError):
        return "an unknown size"
