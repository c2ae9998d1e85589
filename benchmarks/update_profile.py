"""Where the time of Etude's gradient steps goes, with the settings that all peers share.

    python benchmarks/update_profile.py [--tasks pick-place-sac halfcheetah]

Times 300 gradient steps, then lets torch's profiler watch 50 more, whose own cost is not in these
times. The figures go to benchmarks/results.json, from which `page.py` makes docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.run import RESULTS, TASKS, Task, fresh, kept, read, report, write  # isort: skip

import torch
from torch.profiler import ProfilerActivity, profile

import etude
from benchmarks.progress import NEVER, Progress
from benchmarks.runners.etude import recipe
from etude.training.loop import Callback, Context

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
SKIPPED, TIMED, WATCHED = 200, 300, 50
"""Gradient steps: the first ones, those that are timed, and those that the profiler watches."""


class Profiled(BaseException):
    """All that was wanted is known."""


class Watching(Callback):
    """Times and profiles the gradient steps of a run, then ends it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.figures: dict[str, float] = {}

    def run_start(self, context: Context) -> None:
        algorithm: Any = context.algorithm
        whole = algorithm.batches
        algorithm.batches = lambda *args: self._watched(whole(*args))

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            if len(self.seconds) == SKIPPED + TIMED:
                self._profile(batches)
            begun = time.perf_counter()
            if (metrics := next(batches, end)) is end:
                return
            self.seconds.append(time.perf_counter() - begun)
            yield metrics

    def _profile(self, batches: Iterator[Any]) -> None:
        """Remaining gradient steps of this iteration, at most WATCHED."""
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            count = sum(1 for _, _ in zip(range(WATCHED), batches, strict=False))
        if not count:
            return
        products = [event for event in watched.key_averages() if event.key in PRODUCTS]
        whole = statistics.median(self.seconds[SKIPPED:])
        inside = sum(event.self_cpu_time_total for event in products) / count * 1e-6
        self.figures = {
            "milliseconds": 1e3 * whole,
            "products": sum(event.count for event in products) / count,
            "products_milliseconds": 1e3 * inside,
        }
        raise Profiled


def measure(task: Task, out: Path) -> dict[str, Any]:
    """One entry of results.json."""
    options = argparse.Namespace(
        **{"task": task, "seed": 0, "out": out, "resume": False, "steps": NEVER, "cap": 600.0},
        **{"target": False, "all_points": False},
    )
    chosen = recipe(Progress(options)).replace(
        evaluation__every="never", clock__total_timesteps=1000 * task.rollout
    )
    watching = Watching()
    with suppress(Profiled):
        etude.train(chosen, out / "run", callbacks=[watching], console=False)
    return {
        **watching.figures,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": report.commit(),
        "machine": report.machine(),
        "begins": [kept(**fresh.about("etude", task.name))],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=["pick-place-sac"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.tasks:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(TASKS[name], Path(scratch))
        results = read(options.out)
        results.setdefault("profiles", {})[name] = found
        write(options.out, results)
        print(name, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
