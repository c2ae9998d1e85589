"""The live dashboard: where a run stands, how it learns, and where its time goes.

It takes log rows like any other log, and is told about batches and iterations in between. A thread
draws, at most four times a second and never for more than a hundredth of the time; the run itself
only leaves numbers here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from etude.core.clock import Clock
from etude.logs.curves import Curve, number, span_of
from etude.logs.dashboard_view import Level, Shown, View, draw
from etude.logs.screen import Redirect, Screen
from etude.metrics.rows import Judge, fleet, numbers

INTERVAL = 0.25
MAX_SHARE = 1 / 150
"""Of one core's time, what drawing may take."""
RECENT_ROWS = 20

CURVES: tuple[tuple[str, str, str, str, tuple[float | None, float | None]], ...] = (
    ("return", "rollout/ep_rew_mean", "", "green", (None, None)),
    ("success", "rollout/success_rate", "{:.0%}", "green", (0.0, 1.0)),
    ("eval success", "eval/success_rate", "{:.1%}", "bright_green", (0.0, 1.0)),
    ("eval return", "eval/mean_reward", "", "bright_green", (None, None)),
    ("mpjpe_l, mm", "eval/mpjpe_l", "{:.1f}", "bright_green", (0.0, None)),
    ("motions failing", "curriculum/failing", "{:.0f}", "yellow", (0.0, None)),
    ("largest weight", "curriculum/largest_weight", "{:.1%}", "yellow", (0.0, 1.0)),
    ("style reward", "amp/style_reward", "{:.3f}", "green", (0.0, None)),
    ("told apart", "amp/agent_accuracy", "{:.0%}", "magenta", (0.0, 1.0)),
    ("steps/s", "time/fps", "{:,.0f}", "blue", (0.0, None)),
    ("KL", "train/approx_kl", "{:.4f}", "magenta", (0.0, None)),
    ("explained var.", "train/explained_variance", "{:.2f}", "cyan", (0.0, 1.0)),
)
"""Label, metric, format ("" for any number), style and the ends of the scale."""

SECONDS = {
    "physics": "physics",
    "inference": "inference",
    "environment": "environment",
    "transport": "transport",
    "train": "learning",
    "test": "evaluation",
    "save": "saving",
}
"""Columns under `time/` and what they are called here."""

ACTIVITIES = {
    "collect": "collecting",
    "train": "learning",
    "test": "evaluating",
    "save": "saving",
}


class Dashboard:
    """A log and a display; draws from `begin` to `close`."""

    def __init__(self, name: str, folder: str, judge: Judge, console: Console | None = None):
        self._name, self._folder, self._judge = name, folder, judge
        self._console = console or Console()
        self._curves: dict[str, Curve] = {}
        self._seconds: deque[dict[str, float]] = deque(maxlen=RECENT_ROWS)
        self._elapsed_row, self._rows = 0.0, 0
        self._last: dict[str, float] = {}
        self._phase, self._warnings = "", ()
        self._messages: list[str] = []
        self._clock: Clock | None = None
        self._batches = self._begun_at = 0
        self._activity = "starting"
        self._start = time.perf_counter()
        self._drawing: _Drawing | None = None
        self._ended = False
        self.cost = 0.0
        """Seconds spent in here: drawing (processor time) and taking in rows."""

    _warnings: Sequence[tuple[str, str]]

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Show the curves so far and start drawing."""
        for row in history:
            self._take(row)
        self._judged()
        self._seconds.clear()
        self._elapsed_row, self._start = 0.0, time.perf_counter()
        self._drawing = _Drawing(self._console, self._view)

    def write(self, row: dict[str, Any]) -> None:
        start = time.perf_counter()
        self._take(row)
        self._judged()
        self.cost += time.perf_counter() - start

    def close(self) -> None:
        """Leave a last picture, and below it whatever was said meanwhile."""
        if self._drawing is None:
            return
        drawing, self._drawing, self._ended = self._drawing, None, True
        finished = self._clock is not None and self._clock.finished
        self._activity = "finished" if finished else "stopped"
        messages, self._messages = self._messages, []
        drawing.stop()
        self.cost += drawing.seconds
        for message in messages:
            self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def follow(self, clock: Clock) -> None:
        """The run's clock, which is read whenever something is drawn."""
        self._clock, self._begun_at = clock, clock.now.iterations

    def batch(self) -> None:
        """One gradient step was taken."""
        self._batches += 1

    def iteration(self) -> None:
        """An iteration has ended."""
        self._batches = 0

    def activity(self, phase: str) -> None:
        """What the run does now, by the name of its stopwatch phase; "" between two."""
        if phase:
            self._activity = ACTIVITIES.get(phase, phase)

    def say(self, text: str) -> None:
        """Print a message; while the dashboard is up, it is part of it."""
        if self._drawing is None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._messages = [*self._messages, text]

    def _take(self, row: dict[str, Any]) -> None:
        values = numbers(row)
        for name in values:
            if name not in self._curves and (name.startswith("reward/") or name in METRICS):
                self._curves[name] = Curve(self._rows)
        for name, curve in self._curves.items():
            curve.add(values.get(name))
        self._rows += 1
        self._last = values
        self._seconds.append(self._split(values))
        self._judge.add(values)

    def _judged(self) -> None:
        self._phase = self._judge.phase if self._last else ""
        self._warnings = tuple((w.name, w.text) for w in self._judge.warnings)

    def _split(self, values: dict[str, float]) -> dict[str, float]:
        """Seconds since the last row, by what they went to."""
        parts = {name: values.get(f"time/{key}", 0.0) for key, name in SECONDS.items()}
        inside = sum(parts[name] for name in ("physics", "inference", "environment", "transport"))
        parts["collecting"] = max(values.get("time/collect", 0.0) - inside, 0.0)
        elapsed = values.get("time/time_elapsed", 0.0)
        parts["other"] = max(elapsed - self._elapsed_row - sum(parts.values()), 0.0)
        self._elapsed_row = elapsed
        return parts

    def _view(self) -> View:
        """What is to be drawn now; read by the drawing thread, so nothing here is changed."""
        elapsed = time.perf_counter() - self._start
        clock, left, progress = self._clock, None, ""
        if clock is not None:
            total, now = clock.nest.total, clock.now
            done = now.iterations - self._begun_at
            if done and not clock.finished and not self._ended:
                left = elapsed / done * (clock.nest.iterations - now.iterations)
            unit, key = ("steps", "timesteps") if total.timesteps else ("updates", "updates")
            progress = f"{getattr(now, key):,} of {getattr(total, key):,} {unit}"
            progress += f" · {clock.progress:.0%}"
        levels = _levels(clock, self._batches)
        seconds: dict[str, float] = {}
        for part in list(self._seconds):
            for name, value in part.items():
                seconds[name] = seconds.get(name, 0.0) + value
        return View(
            name=self._name,
            folder=self._folder,
            state=self._activity,
            progress=progress,
            elapsed=elapsed,
            left=left,
            levels=levels[:1] if self._ended else levels,
            phase=self._phase,
            warnings=self._warnings,
            curves=self._shown(),
            seconds=seconds,
            system=_system(self._last),
            messages=self._messages,
        )

    def _shown(self) -> list[Shown]:
        shown = []
        for label, metric, form, style, bounds in CURVES:
            curve = self._curves.get(metric)
            if metric == "eval/mean_reward" and "eval/success_rate" in self._curves:
                continue  # says the same in a unit that needs explaining
            if curve is not None and curve.last is not None:
                value = form.format(curve.last) if form else number(curve.last)
                points, span = self._points(curve)
                shown.append(Shown(label, points, value, style, span, bounds))
        for name in sorted(name for name in list(self._curves) if name.startswith("reward/")):
            points, span = self._points(self._curves[name])
            value = number(self._curves[name].last or 0.0)
            label = f"· {name.removeprefix('reward/')}"
            shown.append(Shown(label, points, value, "yellow", span, is_term=True))
        return shown

    def _points(self, curve: Curve) -> tuple[tuple[float, ...], int]:
        points = curve.points
        rows = self._clock.nest.total.cycles if self._clock is not None else 0
        return points, span_of(len(points), -(-rows // curve.per_point))


METRICS = frozenset(metric for _, metric, *_ in CURVES)


def _system(values: dict[str, float]) -> list[str]:
    """The `system/` columns in words."""
    words = fleet(values)
    if (cores := values.get("system/cpu_cores")) is not None:
        words.append(f"processor {cores:.2f} cores")
    for name, key in (("memory", "system/memory_mib"), ("GPU memory", "system/gpu_memory_mib")):
        if (mib := values.get(key)) is not None:
            words.append(
                f"{name} {mib:,.0f} MiB" if mib < 10_240 else f"{name} {mib / 1024:.1f} GiB"
            )
    return words


def _levels(clock: Clock | None, batches: int) -> list[Level]:
    """Where the four wheels stand; one that contains others moves with them."""
    if clock is None:
        return [Level(name, 0, 0, 0.0) for name in ("epoch", "cycle", "iteration", "batch")]
    nest, now, total = clock.nest, clock.now, clock.nest.total
    per_epoch = nest.cycles_per_epoch * nest.iterations_per_cycle
    # The last epoch and the last cycle may be short.
    at = max(min(now.iterations, total.iterations - 1), 0) if clock.finished else now.iterations
    epoch_start = at // per_epoch * per_epoch
    cycle_start = at // nest.iterations_per_cycle * nest.iterations_per_cycle
    in_epoch = min(per_epoch, total.iterations - epoch_start)
    in_cycle = min(nest.iterations_per_cycle, total.iterations - cycle_start)
    cycles = -(-in_epoch // nest.iterations_per_cycle)
    if clock.finished:
        done = (total.epochs, cycles, in_cycle, nest.batches_per_iteration)
        sizes = (total.epochs, cycles, in_cycle, nest.batches_per_iteration)
        shares = (1.0, 1.0, 1.0, 1.0)
    else:
        part = min(batches / max(nest.batches_per_iteration, 1), 1.0)
        cycle = (at - epoch_start) // nest.iterations_per_cycle
        done = (now.epochs, cycle, at - cycle_start, batches)
        sizes = (total.epochs, cycles, in_cycle, nest.batches_per_iteration)
        shares = (
            (at + part) / total.iterations,
            (at - epoch_start + part) / in_epoch,
            (at - cycle_start + part) / in_cycle,
            part,
        )
    names = ("epoch", "cycle", "iteration", "batch")
    return [Level(*level) for level in zip(names, done, sizes, shares, strict=True)]


class _Drawing:
    """The thread that draws."""

    def __init__(self, console: Console, view: Callable[[], View]) -> None:
        self._console, self._view = console, view
        self._size = console.size
        self._ended = threading.Event()
        self.seconds = 0.0
        """Processor time that it took."""
        self._screen = Screen(console)
        self._redirect = Redirect(self._screen)
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Draw a last time, smaller: there must be room for what is said after the run."""
        self._ended.set()
        self._thread.join()
        self._redirect.end()
        start = time.thread_time()
        width, height = self._console.size
        lines = draw(self._view(), min(width, 100), min(height - 5, 22))
        with suppress(OSError):  # a terminal that is gone is no reason to fail
            self._screen.end(lines, width)
        self.seconds += time.thread_time() - start

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            start = time.thread_time()
            try:
                self._refresh()
            except OSError:
                return
            taken = time.thread_time() - start
            self.seconds += taken
            pause = max(INTERVAL, taken / MAX_SHARE)

    def _refresh(self) -> None:
        size = self._console.size
        if size != self._size:  # the terminal has wrapped what was drawn
            self._size = size
            self._screen.restart()
        width, height = size
        self._screen.show(draw(self._view(), width, height - 1), width)
