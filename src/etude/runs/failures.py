"""Failure reports: the error, its context, and the arrays to reproduce it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, NonFinite
from etude.core.trees import Tree, is_array
from etude.runs import files, tensors
from etude.runs.folder import RunFolder, pretty


def report_failure(
    error: BaseException, counters: Tree, run: RunFolder, say: Callable[[str], None]
) -> None:
    """Write and announce a failure report; a full disk must not hide the failure itself."""
    arrays = error.arrays if isinstance(error, NonFinite) else {}
    context = {"counters": counters, "error": type(error).__name__}
    see = replay_command(error, counters, run)
    context |= {"replay": see} if see else {}
    try:
        report = f"Report: {write_failure(run, error, arrays, context)}"
    except EtudeError as fault:
        report = f"No report: {fault}"
    say(f"The run failed; the last good checkpoint is untouched. {report}")
    if see:
        say(f"See what led to it: {see}")


def replay_command(error: BaseException, counters: Tree, run: RunFolder) -> str:
    """The command that shows the iteration in which a number was not finite; "" for other errors.

    counters: the clock's state at the beginning of the iteration.
    """
    if not isinstance(error, NonFinite):
        return ""
    now, env = counters["now"], re.search(r"environment (\d+)", error.where)
    verb, step = ("replay", now["timesteps"]) if env else ("inspect", now["timesteps"])
    if now["iterations"] and not step:  # learns from a dataset
        verb, step = "inspect", now["updates"]
    of = f" --env {env[1]}" if env and verb == "replay" else ""
    return f"etude {verb} {run.path} --at {step}{of}"


def write_failure(run: RunFolder, exception: BaseException, arrays: Tree, context: Tree) -> Path:
    """Write a failure report: traceback, arrays and context; returns its folder."""
    moment = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = files.free_path(run.current_path / "failures" / moment)
    files.make_folder(folder)
    report = "".join(traceback.format_exception(exception))
    files.write_file(folder / "error.txt", [report.encode(errors="replace")])
    files.write_file(folder / "context.json", [pretty(context).encode()])
    storable = _storable(arrays)
    layout = tensors.layout(storable)
    files.write_file(folder / "reproduction.safetensors", tensors.chunks(storable, layout))
    files.fsync_folder(folder)
    return folder


def _storable(arrays: Tree, prefix: str = "") -> dict[str, Any]:
    """{path: array} of the arrays in a tree that can be saved."""
    kept: dict[str, Any] = {}
    for name, leaf in arrays.items():
        if isinstance(leaf, dict):
            kept |= _storable(leaf, f"{prefix}{name}/")
        elif is_array(leaf):
            try:
                tensors.layout({f"{prefix}{name}": leaf})
            except TypeError:
                continue
            kept[f"{prefix}{name}"] = leaf
    return kept
