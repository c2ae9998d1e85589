"""Count the calls that a training makes: unlike seconds, they are the same on a busy machine."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

LIBRARIES = ("numpy", "torch", "mujoco")


def run(module: str, file: Path | None) -> None:
    """Run a module as a command; write {function: calls} of all its threads to a file.

    Functions of NumPy, torch and MuJoCo are counted by name, all Python functions of Etude together
    as "etude: functions".
    """
    calls: Counter[CodeType | tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1
        elif event == "c_call":
            owner = getattr(what, "__module__", None) or type(what.__self__).__module__
            calls[owner.partition(".")[0], what.__qualname__] += 1

    if file is not None:
        threading.setprofile(count)
        sys.setprofile(count)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if file is not None:
            file.write_text(json.dumps(_by_name(calls)))


def _by_name(calls: Counter[CodeType | tuple[str, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for what, times in list(calls.items()):
        if isinstance(what, tuple):
            if what[0] in LIBRARIES:
                found[f"{what[0]}: {what[1]}"] += times
        elif "etude" in Path(what.co_filename).parts:
            found["etude: functions"] += times
    return found
