"""The live dashboard: training progress, learning curves, and where the time goes.

It takes log rows like any other log, and callbacks for batches and iterations in between. It is
drawn once a second by `rich.live.Live`. The cursor stays visible and the screen the ordinary one:
a process that is killed leaves a terminal that works.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.segment import Segment, Segments

from etude.core import output
from etude.core.clock import Clock
from etude.core.contracts import BatchMetrics, Fragment
from etude.core.history import Row, history_of
from etude.core.metrics import ELAPSED, Health, declares, episode_metric, numbers
from etude.training.logs.console import columns_of, heading_of, line_of, machine, seconds_of
from etude.training.logs.curves import Curve, number, span_of
from etude.training.logs.dashboard_view import Level, Shown, View, draw, table_width
from etude.training.loop import Callback, Context

RECENT_ROWS = 20
MESSAGES = 20
"""Number of messages that are kept for drawing."""
TABLE_ROWS = 40
"""Number of log rows in the table of the last rows."""
_DOING = {"collect": "collecting", "train": "learning", "test": "evaluating", "save": "saving"}
"""The activity shown for a stopwatch phase."""


class TerminalConsole(Console):
    """A console that leaves the cursor visible: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Dashboard:
    """A log writer that draws from `begin` to `close`."""

    def __init__(
        self,
        name: str,
        folder: str,
        health: Health,
        console: Console | None = None,
        facts: Sequence[tuple[str, str]] = (),
    ):
        """`health`: follows the run; its declared metrics that have a curve are drawn.

        facts: names and values that describe the run.
        """
        self._facts = facts
        self._name, self._folder, self._health = name, folder, health
        drawn = [(metric.curve, metric) for metric in health.metrics if metric.curve is not None]
        self._drawn = sorted(drawn, key=lambda pair: pair[0].place)
        self._has_curve = declares(tuple(metric for _, metric in drawn))
        self._console = console or TerminalConsole()
        self._curves: dict[str, Curve] = {}
        self._seconds: deque[dict[str, float]] = deque(maxlen=RECENT_ROWS)
        self._elapsed_row, self._rows = 0.0, 0
        self._last: dict[str, float] = {}
        self._trend = self._evaluated = ""
        self._table: list[str] = []
        self._warnings: Sequence[tuple[str, str]] = ()
        self._messages: list[str] = []
        """Messages, to be printed at the end as well."""
        self._noted: list[str] = []
        """The last messages and lines of standard error."""
        self._clock: Clock | None = None
        self._batches = self._begun_at = 0
        self._activity = "starting"
        self._start = time.perf_counter()
        self._live: LiveDrawing | None = None
        self._ended = False
        self.cost = 0.0
        """Seconds spent in here: drawing (processor time) and taking in rows."""

    def begin(self, history: Iterable[Row]) -> None:
        """Show the curves so far and start drawing."""
        kept = history_of(history).thinned()
        for place, row in kept.numbered():
            self._add_row(numbers(row), place + 1 - self._rows)
        self._health.follow(kept)
        self._elapsed_row = self._last.get(ELAPSED, 0.0)
        self._check_health()
        self._seconds.clear()
        self._start = time.perf_counter()
        self._waits_shown_on = output.show_on(None)  # The dashboard shows waits.
        self._live = LiveDrawing(self._console, self._picture, self._note)
        self._live.start(refresh=True)

    def write(self, row: dict[str, Any]) -> None:
        start = time.perf_counter()
        self._take(row)
        self._check_health()
        self.cost += time.perf_counter() - start

    def close(self) -> None:
        """Leave a last drawing, and below it the messages."""
        if self._live is None:
            return
        live, self._live, self._ended = self._live, None, True
        finished = self._clock is not None and self._clock.finished
        self._activity = "finished" if finished else "stopped"
        messages, self._messages, self._noted = self._messages, [], []
        live.stop()
        output.show_on(self._waits_shown_on)
        self.cost += live.seconds
        for message in messages:
            self._console.out(message, highlight=False)

    def follow(self, clock: Clock) -> None:
        """Read the run's clock whenever the dashboard is drawn."""
        self._clock, self._begun_at = clock, clock.now.iterations
        self._check_health()
        if self._live is not None:
            self._live.refresh()

    def batch(self) -> None:
        """Count a gradient step."""
        self._batches += 1

    def iteration(self) -> None:
        """Start counting gradient steps anew."""
        self._batches = 0

    def activity(self, phase: str) -> None:
        """Show what the run does now. `phase`: of its stopwatch; "" between two phases."""
        if phase:
            self._activity = _DOING.get(phase, phase)

    def say(self, text: str) -> None:
        """Print a message; while the dashboard is up, show it there."""
        if self._live is None:
            self._console.out(text, highlight=False)
        else:
            self._messages = [*self._messages, text]
            self._note(text)

    def _note(self, text: str) -> None:
        self._noted = [*self._noted, text][-MESSAGES:]

    def _take(self, row: dict[str, Any]) -> None:
        values = numbers(row)
        self._add_row(values)
        self._health.add(values)

    def _add_row(self, values: dict[str, float], rows: int = 1) -> None:
        """Add a row to the curves. `rows`: number of rows of the run since the last one."""
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

    def _picture(self) -> Segments:
        """Draw within the terminal; the last time smaller, so that later output fits below."""
        width, height = self._console.size
        if self._ended:
            lines = draw(self._view(), min(width, 100), min(height - 5, 22))
        else:
            lines = draw(self._view(), width, height - 1)
        return Segments([piece for line in lines for piece in (*line, Segment.line())])

    def _view(self) -> View:
        """The content to draw now. It is read by the drawing thread, which changes nothing."""
        elapsed = time.perf_counter() - self._start
        clock, left, progress = self._clock, None, ""
        if clock is not None:
            total, now = clock.loops.total, clock.now
            done = now.iterations - self._begun_at
            if done and not clock.finished and not self._ended:
                left = elapsed / done * (clock.loops.iterations - now.iterations)
            unit, key = ("steps", "timesteps") if total.timesteps else ("updates", "updates")
            done_of = f"{getattr(now, key):,} of {getattr(total, key):,} {unit}"
            progress = f"{done_of} · {clock.progress:.0%}"
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
        """The current activity, with its progress and seconds once it has taken a while."""
        wait = None if self._ended else output.current()
        if wait is None or (wait.seconds < output.SLOW and not wait.total):
            return self._activity
        counted = f" {wait.done:,} of {wait.total:,} {wait.unit}" if wait.total else ""
        lasting = f", {wait.seconds:.0f} s" if wait.seconds >= output.SLOW else ""
        return f"{self._activity}{counted}{lasting}"

    def _scale(self) -> str:
        """The number of steps or updates at the right end of the curves."""
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
    """The four levels of the clock; the share of one includes the progress of those inside."""
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


class LiveDrawing(Live):
    """Draws a terminal's lines in place, and prints standard output and error above them."""

    def __init__(
        self,
        console: Console,
        picture: Callable[[], RenderableType],
        note: Callable[[str], None],
    ) -> None:
        """`note`: gets what is printed to standard error, which may be out of sight at once."""
        super().__init__(
            console=console,
            refresh_per_second=1,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
            get_renderable=picture,
        )
        self.seconds = 0.0
        """Processor time of drawing."""
        self._size = console.size
        self._note = note
        self._replaced: dict[str, TextIO] = {}

    def start(self, refresh: bool = False) -> None:
        for name, note in (("stdout", None), ("stderr", self._note)):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced[name] = stream
                setattr(sys, name, Above(self.console, stream, note))
        super().start(refresh)

    def refresh(self) -> None:
        start = time.thread_time()
        try:
            if self.console.size != self._size:  # the terminal has wrapped what was drawn
                self._size = self.console.size
                self.console.clear()
            super().refresh()
        except OSError:  # the terminal is gone; a console keeps what it could not write
            self.console.quiet = True
        self.seconds += time.thread_time() - start

    def stop(self) -> None:
        for name, stream in self._replaced.items():
            above = getattr(sys, name)
            if isinstance(above, Above):
                above.finish()
                setattr(sys, name, stream)
        self._replaced = {}
        with suppress(OSError):
            super().stop()


class Above(FileProxy):
    """Replaces standard output or error, and prints whole lines above the dashboard."""

    def __init__(
        self, console: Console, stream: TextIO, note: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(console, stream)
        self._console, self._note, self._rest = console, note, ""

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._console.out(lines, highlight=False)
            if self._note is not None:
                self._note(lines)
        return len(text)

    def flush(self) -> None:
        """Half a line waits for its end."""

    def finish(self) -> None:
        """Print a last line that was not ended."""
        if self._rest:
            self.write("\n")


class DashboardCallback(Callback):
    """Reports batches and iterations to a dashboard; log rows come per cycle."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def run_start(self, context: Context) -> None:
        self._dashboard.follow(context.clock)

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        self._dashboard.batch()

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self._dashboard.iteration()
