"""The progress of a run in one line: what `etude.train` shows in a notebook and on a terminal.

The line takes log rows like any other log, and callbacks for batches and iterations in between. It
is drawn once a second, in a notebook by a thread, on a terminal by `rich.live.Live`.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from typing import Any, NamedTuple, Protocol

from rich.text import Text

from etude.core import output
from etude.core.clock import Clock
from etude.core.contracts import BatchMetrics, Fragment
from etude.core.history import Row, history_of
from etude.core.metrics import Metrics, numbers
from etude.training.logs.console import text_of
from etude.training.logs.curves import bar
from etude.training.logs.dashboard import LiveDrawing, TerminalConsole
from etude.training.loop import Callback, Context

INTERVAL = 1.0
"""Seconds between two drawings, and least between two moments by which the pace is measured."""
MOMENTS = 16
"""Moments, the newest ones, by which the pace is measured."""
METRICS = 3
"""Most metrics of training in the line."""
BAR, NARROW = 24, 80
"""Characters of the bar, and of a terminal in which it is half as wide."""


class Progress(NamedTuple):
    """The content of the line."""

    name: str
    share: float
    """From 0 at the start to 1 at the end of the run."""
    facts: list[str]
    """The most important one first."""
    has_ended: bool = False

    def text(self, width: int) -> Text:
        """One line for a terminal, without facts that do not fit; after the end, all of them."""
        done, rest = bar(self.share, BAR if width >= NARROW else BAR // 2)
        line = Text.assemble((self.name, "bold"), " ", (done, "cyan"), (rest, "dim"))
        if self.has_ended:
            return line.append(f" {', '.join(self.facts)}")
        for number, fact in enumerate(self.facts):
            if line.cell_len + len(fact) + 2 > width:
                break
            line.append(f"{', ' if number else ' '}{fact}")
        line.truncate(width)
        return line

    def bundle(self) -> dict[str, str]:
        """The line by MIME type for a notebook; all text is escaped."""
        facts = ", ".join(self.facts)
        return {
            "text/plain": f"{self.name} {''.join(bar(self.share, BAR))} {facts}",
            "text/html": f"<div><b>{escape(self.name)}</b> "
            f'<progress max="1" value="{self.share:.4f}"></progress> {escape(facts)}</div>',
        }


class Display(Protocol):
    """A place for the line."""

    def start(self, picture: Callable[[], Progress]) -> None: ...

    def stop(self) -> None:
        """Leave a last drawing."""


class TerminalLine:
    """The last line of the terminal, on standard error; what is printed appears above it."""

    def start(self, picture: Callable[[], Progress]) -> None:
        console = TerminalConsole(stderr=True)
        self._live = LiveDrawing(
            console, lambda: picture().text(console.width - 1), lambda line: None
        )
        self._live.start(refresh=True)

    def stop(self) -> None:
        self._live.stop()


class NotebookLine:
    """A display in the output of the cell that trains."""

    def start(self, picture: Callable[[], Progress | None]) -> None:
        """picture: None for no display, or an empty one."""
        self._picture, self._ended = picture, threading.Event()
        self._handle: Any = None
        self._draw()
        # The context names the cell whose output the display is.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=[self._watch], name="line", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(INTERVAL)
        self._draw()

    def _watch(self) -> None:
        with suppress(Exception):  # `stop` draws once more, and its error is reported
            while not self._ended.wait(INTERVAL):
                self._draw()

    def _draw(self) -> None:
        from IPython.display import display  # only where a kernel of Jupyter runs

        progress = self._picture()
        bundle = {"text/plain": ""} if progress is None else progress.bundle()
        if self._handle is not None:
            self._handle.update(bundle, raw=True)
        elif progress is not None:
            self._handle = display(bundle, raw=True, display_id=True)


@contextmanager
def slow_work_shown() -> Iterator[None]:
    """Show work that takes long in a notebook, and on a terminal that is standard error."""
    if not output.in_notebook():
        if not output.can_draw_on(sys.stderr):
            yield
            return
        before = output.show_on(sys.stderr)
        try:
            yield
        finally:
            output.show_on(before)
        return
    ended, line = threading.Event(), NotebookLine()

    def picture() -> Progress | None:
        wait = output.current()
        if wait is None or wait.seconds < output.SLOW or ended.is_set():
            return None
        return Progress(wait.text, wait.done / max(wait.total, 1), [wait.words()])

    line.start(picture)
    try:
        yield
    finally:
        ended.set()
        line.stop()


class _Moment(NamedTuple):
    seconds: float
    iterations: int
    done: int
    """Steps; gradient steps of a run that collects none."""


class ProgressLine(Callback):
    """A log writer and callback that shows the progress of a run from `begin` to `close`."""

    def __init__(self, name: str, folder: str, metrics: Metrics, display: Display) -> None:
        """metrics: declared in the run; those of an epoch's line and of evaluations are shown."""
        self._name = "".join(letter for letter in name if letter.isprintable())[:40]
        self._folder, self._display = folder, display
        epoch = sorted(((m.epoch, m) for m in metrics if m.epoch is not None), key=lambda p: p[0])
        self._training = [metric for _, metric in epoch]
        self._scores = [metric for metric in metrics if metric.score]
        self._newest: dict[str, float] = {}
        self._clock: Clock | None = None
        self._batches = 0
        self._moments: deque[_Moment] = deque(maxlen=MOMENTS)
        self._begun: _Moment | None = None
        self._is_shown = False

    def begin(self, history: Iterable[Row]) -> None:
        """Show the line, with the newest numbers from before a resume."""
        self._newest = numbers(history_of(history).last)
        self._display.start(self.picture)
        self._is_shown = True

    def write(self, row: dict[str, Any]) -> None:
        self._newest = self._newest | numbers(row)

    def close(self) -> None:
        """Leave a last drawing."""
        if self._is_shown:
            self._is_shown = False
            self._display.stop()

    def run_start(self, context: Context) -> None:
        self._clock = context.clock
        self._begun = self._moment(context.clock)
        self._moments.append(self._begun)

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        self._batches += 1

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self._batches = 0
        if time.perf_counter() - self._moments[-1].seconds >= INTERVAL:
            self._moments.append(self._moment(context.clock))

    def picture(self) -> Progress:
        """The line now; called by the drawing thread, which changes nothing."""
        clock, begun = self._clock, self._begun
        if clock is None or begun is None:
            return Progress(self._name, 0.0, ["starting"])
        count = f"{_count(clock):,} of {self._total(clock):,} {self._unit(clock)}"
        newest = [m for m in self._training if m.name in self._newest][:METRICS]
        newest += [m for m in self._scores if m.name in self._newest][:1]
        values = [f"{metric.label} {text_of(metric, self._newest)}" for metric in newest]
        if not self._is_shown:
            return self._last(clock, begun, values)
        per_iteration = max(clock.loops.batches_per_iteration, 1)
        part = 0.0 if clock.finished else min(self._batches / per_iteration, 1.0)
        share = min(clock.progress + part / clock.loops.iterations, 1.0)
        return Progress(
            self._name,
            share,
            [f"{share:.0%}", *self._pace(clock), *values, count, *self._activity()],
        )

    def _last(self, clock: Clock, begun: _Moment, values: list[str]) -> Progress:
        """The line that stays after the end."""
        end = self._moment(clock)
        done, seconds = end.done - begun.done, end.seconds - begun.seconds
        took = f"{done / max(seconds, 1e-9):,.0f} {self._unit(clock)}/s"
        state = "finished" if clock.finished else f"stopped at {clock.progress:.0%}"
        lasting = f"{done:,} {self._unit(clock)} in {output.duration(seconds)}"
        share = 1.0 if clock.finished else clock.progress
        facts = [state, *values, lasting, took, self._folder]
        return Progress(self._name, share, facts, has_ended=True)

    def _pace(self, clock: Clock) -> list[str]:
        """Time left and speed, by the newest moments."""
        first, last = self._moments[0], self._moments[-1]
        if last.iterations == first.iterations:
            return []
        seconds, now = last.seconds - first.seconds, time.perf_counter()
        each = seconds / (last.iterations - first.iterations)
        left = each * (clock.loops.iterations - last.iterations) - (now - last.seconds)
        speed = (last.done - first.done) / seconds
        remaining = f"{output.duration(round(max(left, 0.0)))} left".replace(".0 s", " s")
        return [remaining, f"{speed:,.0f} {self._unit(clock)}/s"]

    def _activity(self) -> list[str]:
        """Work that takes long, for example "evaluating: 37 of 100 episodes, 12 s"."""
        wait = output.current()
        return [wait.words()] if wait is not None and wait.seconds >= output.SLOW else []

    def _moment(self, clock: Clock) -> _Moment:
        return _Moment(time.perf_counter(), clock.now.iterations, _count(clock))

    @staticmethod
    def _total(clock: Clock) -> int:
        return clock.loops.total.timesteps or clock.loops.total.updates

    @staticmethod
    def _unit(clock: Clock) -> str:
        return "steps" if clock.loops.total.timesteps else "updates"


def _count(clock: Clock) -> int:
    return clock.now.timesteps if clock.loops.total.timesteps else clock.now.updates
