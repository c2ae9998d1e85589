"""The live dashboard: where a run stands, how it learns, and where its time goes.

It takes log rows like any other log, and callbacks for batches and iterations in between. A thread
draws, at most four times a second and never for more than a hundredth of the time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from etude.core import progress
from etude.core.clock import Clock
from etude.core.history import Row, history_of
from etude.core.metrics.declared import ELAPSED, Health, declares, episode_metric, numbers
from etude.core.metrics.usage import machine, seconds_of
from etude.training.logs.console import columns_of, heading_of, line_of
from etude.training.logs.curves import Curve, number, span_of
from etude.training.logs.dashboard_view import Level, Shown, View, draw, table_width
from etude.training.logs.screen import Redirect, Screen

INTERVAL = 0.25
MAX_SHARE = 1 / 150
"""Of one core's time, what drawing may take."""
RECENT_ROWS = 20
MESSAGES = 20
"""Of those that are shown, the last so many are kept."""
TABLE_ROWS = 40
"""Of the table of the last rows."""
_DOING = {"collect": "collecting", "train": "learning", "test": "evaluating", "save": "saving"}
"""What the dashboard says of a stopwatch phase."""


class Dashboard:
    """A log and a display; draws from `begin` to `close`."""

    def __init__(
        self,
        name: str,
        folder: str,
        health: Health,
        console: Console | None = None,
        facts: Sequence[tuple[str, str]] = (),
    ):
        """`health`: follows the run; of its declared metrics those with a curve are drawn.

        facts: what the run is, as names and values.
        """
        self._facts = facts
        self._name, self._folder, self._health = name, folder, health
        drawn = [(metric.curve, metric) for metric in health.metrics if metric.curve is not None]
        self._drawn = sorted(drawn, key=lambda pair: pair[0].place)
        self._has_curve = declares(tuple(metric for _, metric in drawn))
        self._console = console or Console()
        self._curves: dict[str, Curve] = {}
        self._seconds: deque[dict[str, float]] = deque(maxlen=RECENT_ROWS)
        self._elapsed_row, self._rows = 0.0, 0
        self._last: dict[str, float] = {}
        self._trend = self._evaluated = ""
        self._table: list[str] = []
        self._warnings = ()
        self._messages: list[str] = []
        """What was said, to be printed at the end as well."""
        self._noted: list[str] = []
        """The same, and what was printed to standard error."""
        self._clock: Clock | None = None
        self._batches = self._begun_at = 0
        self._activity = "starting"
        self._start = time.perf_counter()
        self._drawing: _Drawing | None = None
        self._ended = False
        self.cost = 0.0
        """Seconds spent in here: drawing (processor time) and taking in rows."""

    _warnings: Sequence[tuple[str, str]]

    def begin(self, history: Iterable[Row]) -> None:
        """Show the curves so far and start drawing."""
        kept = history_of(history).thinned()
        for place, row in kept.numbered():
            self._draw(numbers(row), place + 1 - self._rows)
        self._health.follow(kept)
        self._elapsed_row = self._last.get(ELAPSED, 0.0)
        self._check_health()
        self._seconds.clear()
        self._start = time.perf_counter()
        self._waits_shown_on = progress.show_on(None)  # The picture shows them.
        self._drawing = _Drawing(self._console, self._view, self._note)

    def write(self, row: dict[str, Any]) -> None:
        start = time.perf_counter()
        self._take(row)
        self._check_health()
        self.cost += time.perf_counter() - start

    def close(self) -> None:
        """Leave a last picture, and below it whatever was said meanwhile."""
        if self._drawing is None:
            return
        drawing, self._drawing, self._ended = self._drawing, None, True
        finished = self._clock is not None and self._clock.finished
        self._activity = "finished" if finished else "stopped"
        messages, self._messages, self._noted = self._messages, [], []
        drawing.stop()
        progress.show_on(self._waits_shown_on)
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
            self._activity = _DOING.get(phase, phase)

    def say(self, text: str) -> None:
        """Print a message; while the dashboard is up, it is part of it."""
        if self._drawing is None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._messages = [*self._messages, text]
            self._note(text)

    def _note(self, text: str) -> None:
        self._noted = [*self._noted, text][-MESSAGES:]

    def _take(self, row: dict[str, Any]) -> None:
        values = numbers(row)
        self._draw(values)
        self._health.add(values)

    def _draw(self, values: dict[str, float], rows: int = 1) -> None:
        """Add a row to the curves; `rows`: how many it stands for, those before it included."""
        for name in values:
            if name not in self._curves and self._has_curve(name):
                self._curves[name] = Curve(self._rows)
        for name, curve in self._curves.items():
            curve.add(values.get(name), rows)
        self._rows += rows
        self._last = values
        self._seconds.append(seconds_of(values, self._elapsed_row))
        self._elapsed_row = values.get(ELAPSED, 0.0)

    def _check_health(self) -> None:
        health = self._health
        metric = next((m for m in health.metrics if m.name == episode_metric(health)), None)
        if metric is not None and health.trend:
            value = format(health.series(metric.name)[-1], metric.format)
            self._trend = f"{metric.label} {value} {health.trend}"
        seen = {name: value for row in health.rows[-TABLE_ROWS:] for name, value in row.items()}
        columns = columns_of(health.metrics, seen, table_width(self._console.width))
        lines = [line_of(columns, row) for row in health.rows[-TABLE_ROWS:]]
        self._table = [heading_of(columns), *lines]
        self._evaluated = evaluated.words() if (evaluated := health.evaluated) else ""
        self._warnings = tuple(health.warnings)

    def _view(self) -> View:
        """What is to be drawn now; read by the drawing thread, so nothing here is changed."""
        elapsed = time.perf_counter() - self._start
        clock, left, progress = self._clock, None, ""
        if clock is not None:
            total, now = clock.loops.total, clock.now
            done = now.iterations - self._begun_at
            if done and not clock.finished and not self._ended:
                left = elapsed / done * (clock.loops.iterations - now.iterations)
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
            state=self._state(),
            progress=progress,
            elapsed=elapsed,
            left=left,
            levels=levels[:1] if self._ended else levels,
            trend=self._trend,
            evaluated=self._evaluated,
            rows=self._table,
            facts=self._facts,
            scale=self._scale(),
            warnings=self._warnings,
            curves=self._shown(),
            seconds=seconds,
            system=machine(self._last),
            messages=self._noted,
        )

    def _state(self) -> str:
        """What the run does now; how far and for how long, once that has taken a while."""
        wait = None if self._ended else progress.current()
        if wait is None or (wait.seconds < progress.SLOW and not wait.total):
            return self._activity
        counted = f" {wait.done:,} of {wait.total:,} {wait.unit}" if wait.total else ""
        lasting = f", {wait.seconds:.0f} s" if wait.seconds >= progress.SLOW else ""
        return f"{self._activity}{counted}{lasting}"

    def _scale(self) -> str:
        """What the right end of the curves stands for."""
        clock, curve = self._clock, next(iter(self._curves.values()), None)
        if clock is None or curve is None:
            return ""
        loops, points = clock.loops, len(curve.points)
        rows = span_of(points, -(-loops.total.cycles // curve.per_point)) * curve.per_point
        steps, updates = loops.steps_per_iteration, loops.batches_per_iteration
        per_row = loops.iterations_per_cycle * (steps or updates)
        return f"{rows * per_row:,} {'steps' if steps else 'updates'}"

    def _shown(self) -> list[Shown]:
        shown = []
        for (_, style, bounds, title), metric in self._drawn:
            terms = metric.name.endswith("/")
            inside = sorted(name for name in list(self._curves) if name.startswith(metric.name))
            for name in inside if terms else [metric.name]:
                curve = self._curves.get(name)
                if curve is None or curve.last is None:
                    continue
                fits = bounds == (None, None)
                value = number(curve.last) if fits else format(curve.last, metric.format)
                label = f"· {name.removeprefix(metric.name)}" if terms else title or metric.label
                points = curve.points
                rows = self._clock.loops.total.cycles if self._clock is not None else 0
                span = span_of(len(points), -(-rows // curve.per_point))
                shown.append(Shown(label, points, value, style, span, bounds, terms))
        return shown


def _levels(clock: Clock | None, batches: int) -> list[Level]:
    """Where the four levels of the clock stand; one that contains others moves with them."""
    if clock is None:
        return [Level(name, 0, 0, 0.0) for name in ("epoch", "cycle", "iteration", "batch")]
    loops, now, total = clock.loops, clock.now, clock.loops.total
    per_epoch = loops.cycles_per_epoch * loops.iterations_per_cycle
    # The last epoch and the last cycle may be short.
    at = max(min(now.iterations, total.iterations - 1), 0) if clock.finished else now.iterations
    epoch_start = at // per_epoch * per_epoch
    cycle_start = at // loops.iterations_per_cycle * loops.iterations_per_cycle
    in_epoch = min(per_epoch, total.iterations - epoch_start)
    in_cycle = min(loops.iterations_per_cycle, total.iterations - cycle_start)
    cycles = -(-in_epoch // loops.iterations_per_cycle)
    sizes = done = (total.epochs, cycles, in_cycle, loops.batches_per_iteration)
    shares = (1.0, 1.0, 1.0, 1.0)
    if not clock.finished:
        part = min(batches / max(loops.batches_per_iteration, 1), 1.0)
        cycle = (at - epoch_start) // loops.iterations_per_cycle
        done = (now.epochs, cycle, at - cycle_start, batches)
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

    def __init__(
        self, console: Console, view: Callable[[], View], note: Callable[[str], None]
    ) -> None:
        self._console, self._view = console, view
        self._size = console.size
        self._ended = threading.Event()
        self.seconds = 0.0
        """Processor time that it took."""
        self._screen = Screen(console)
        self._redirect = Redirect(self._screen, note)
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
            size = width, height = self._console.size
            try:
                if size != self._size:  # the terminal has wrapped what was drawn
                    self._size = size
                    self._screen.restart()
                self._screen.show(draw(self._view(), width, height - 1), width)
            except OSError:
                return
            taken = time.thread_time() - start
            self.seconds += taken
            pause = max(INTERVAL, taken / MAX_SHARE)
