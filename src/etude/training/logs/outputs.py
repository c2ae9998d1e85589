"""The logs of a run: their configs, how they are opened, and how their errors are contained.

No log may end a run. `metrics.jsonl` is part of the run and has all rows. A log that fails is
reported once and closed; later it is begun again with these rows, as after a resume, so no row is
missing from it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec

from pydantic import BeforeValidator, Field, SerializeAsAny

from etude.core.config import Config
from etude.core.contracts import BatchMetrics, Fragment, LogWriter, Stateful
from etude.core.errors import EtudeError, describe_error
from etude.core.history import History, Row
from etude.core.metrics import Health, Metrics
from etude.core.output import can_draw_on, in_notebook, notices, waiting
from etude.core.registry import Registry
from etude.runs.folder import METRICS, REPORTING
from etude.runs.metrics_log import DiskHistory
from etude.training.loop import Callback, Context

Say = Callable[[str], None]
LOSS_BATCHES, LOSS_BATCHES_OF_PICTURES = 25, 100
"""Batches per line of `logs.losses batches`."""
FAULTS = (Exception, SystemExit)
"""Exceptions of a log that do not end the run; an interrupt is not one of them."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
"""Seconds from a failure of a log until it is begun again, doubled after each failure."""
P = ParamSpec("P")


class LoggedRun(NamedTuple):
    """The run that a log is opened for."""

    folder: Path
    recipe: dict[str, Any]
    """As plain data."""
    say: Callable[[str], None]
    """Prints a line on the run's console."""
    title: str = ""
    """Task and recipe, for example "Hopper-v5, ppo"."""


class OpenLog(NamedTuple):
    """A log, and the callbacks that it needs in addition to rows."""

    writer: LogWriter
    callbacks: tuple[Callback, ...] = ()


class LogConfig(Config):
    """Base config of log writers; `kind` is the name in a recipe."""

    kind: str

    def check(self) -> None:
        """Raise an error if this log cannot be written, before training starts."""

    @abstractmethod
    def open(self, run: LoggedRun) -> OpenLog:
        """Open the log of a run; nothing is written before its `begin`."""

    def add_final(
        self, run: LoggedRun, step: int, metrics: dict[str, float], pictures: dict[str, Path]
    ) -> None:
        """Add the evaluation after the end of a run, of the policy of `step`, to its closed log.

        metrics: {"final/mean_reward": ...}. pictures: {"final/success": file}, each a PNG of one
        episode, where `evaluation.final_video` asks for them.
        """


LOGS: Registry[LogConfig] = Registry("logs", "etude.training.logs.outputs:LogConfig")


def _by_name(value: Any) -> LogConfig:
    """Validate a log config; the name of a kind stands for {"kind": name}."""
    return LOGS.validate({"kind": value} if isinstance(value, str) else value)


class LogsConfig(Config):
    """Logs and console of a run. No field changes results."""

    tensorboard: bool = Field(True, description="Write curves for TensorBoard.")
    wandb: bool = Field(False, description="Send rows and the final policy to W&B.")
    wandb_project: str | None = Field(
        None, description="The W&B project; default: the variable WANDB_PROJECT, else etude."
    )
    wandb_mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline keeps rows in the run's folder until `wandb sync`; default: the "
        "variable WANDB_MODE, else online.",
    )
    console: Literal["auto", "dashboard", "table", "none"] = Field(
        "auto",
        description="Display while training; auto is the dashboard in a terminal, else the table.",
    )
    losses: Literal["cycle", "iteration", "batches"] = Field(
        "cycle",
        description="How often the loss of a learned reward is printed: per log row, also per "
        "iteration, or also every 25 batches, of pictures every 100.",
    )
    writers: tuple[Annotated[SerializeAsAny[LogConfig], BeforeValidator(_by_name)], ...] = Field(
        (), description="Further log writers: kinds of other packages, or module:Class."
    )

    def kinds(self) -> list[LogConfig]:
        """Configs of all logs except metrics.jsonl."""
        wandb = {"kind": "wandb", "project": self.wandb_project, "mode": self.wandb_mode}
        asked: list[dict[str, Any]] = [{"kind": "tensorboard"}] if self.tensorboard else []
        # W&B's own switch, which a recipe may overrule.
        disabled = self.wandb_mode is None and os.environ.get("WANDB_MODE") == "disabled"
        asked += [wandb] if self.wandb and not disabled else []
        return [*map(LOGS.validate, asked), *self.writers]


@dataclass
class Outputs:
    """The logs of a run, its callbacks and its output."""

    say: Say
    on_phase: Callable[[str], None]
    logs: list[LogWriter] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)
    filming: Callable[[Path, str], Callback] | None = None
    """Makes the callback that films a run: (its folder, `evaluation.film_every`)."""


def check(config: LogsConfig) -> None:
    """Raise an error if a log cannot be written, before training starts."""
    for kind in config.kinds():
        kind.check()


def open_logs(
    config: LogsConfig,
    folder: Path,
    recipe: dict[str, Any],
    metrics: Metrics,
    iterations: int,
    console: bool | None,
    outputs: Outputs,
    changed: Callable[[], str] = lambda: "",
    loss_batches: int = LOSS_BATCHES,
    title: str = "",
) -> Outputs:
    """Open the logs of a recipe; those in `outputs` come after them.

    metrics: declared in the run. iterations: of the whole run. console: True shows the run as the
    recipe's `logs.console` says, None shows a line of progress, False nothing. changed: describes
    the settings that differ from the named recipe. loss_batches: batches per line of `logs.losses
    batches`. title: task and recipe, by default the name of the recipe.
    """
    title = title or recipe.get("name", "")
    notices.keep_in(folder / REPORTING)
    out = Outputs(outputs.say, outputs.on_phase)
    screen: list[LogWriter] = []
    shown: list[Callback] = []
    if console is None and config.console != "none":
        screen, shown = progress_line(title, folder, metrics)
    elif console and config.console != "none":
        from etude.training.logs.console import ConsoleTable, EpochLines, LossLines

        health = Health(metrics, iterations)
        shown.append(BestCallback(health))
        if config.console != "table" and can_draw_on(sys.stdout):
            from etude.training.logs.dashboard import Dashboard, DashboardCallback

            facts = [("seed", str(recipe["seed"])), ("changed", changed() or "nothing")]
            dashboard = Dashboard(title, str(folder), health, facts=facts)
            screen = [dashboard]

            def on_phase(phase: str) -> None:
                dashboard.activity(phase)
                outputs.on_phase(phase)

            out.say, out.on_phase = apart("The dashboard", dashboard.say), on_phase
            shown.append(DashboardCallback(dashboard))
        else:
            table = ConsoleTable(health)
            screen = [table]
            shown.append(EpochLines(table.epoch))
        if config.losses != "cycle":
            every = loss_batches if config.losses == "batches" else None
            shown += [LossLines(out.say, m, every) for m in metrics if m.losses]
    out.callbacks = [*outputs.callbacks, *(ApartCallback(each, "The screen") for each in shown)]

    def rows() -> History:
        return DiskHistory.so_far(folder / METRICS)

    for kind in config.kinds():
        try:
            log = kind.open(LoggedRun(folder, recipe, out.say, title))
        except FAULTS as error:
            notices.add(f"The log {kind.kind} cannot be opened and is omitted: {words(error)}")
            continue
        out.logs.append(ApartLog(log.writer, kind.kind, rows))
        out.callbacks += [_reporting(each, kind.kind) for each in log.callbacks]
    # The screen is last, so that messages of other logs come before its first drawing.
    out.logs += [ApartScreen(each) for each in screen]
    out.logs += [ApartLog(each, type(each).__name__, rows) for each in outputs.logs]
    if outputs.filming is not None and recipe["env"] is not None:
        every = recipe["evaluation"]["film_every"]
        if every != "never":
            out.callbacks.append(ApartCallback(outputs.filming(folder, every), "Filming"))
    return out


def _reporting(callback: Callback, log: str) -> Callback:
    """Contain the errors of a log's callback, unless it has state: that is part of the run."""
    if isinstance(callback, Stateful):
        return callback
    return ApartCallback(callback, f"A callback of the log {log}")


def progress_line(
    name: str, folder: Path, metrics: Metrics
) -> tuple[list[LogWriter], list[Callback]]:
    """The line of a run in a notebook, or on a terminal that is standard error; else nothing."""
    if not (in_notebook() or can_draw_on(sys.stderr)):
        return [], []
    from etude.training.logs.progress import NotebookLine, ProgressLine, TerminalLine

    display = NotebookLine() if in_notebook() else TerminalLine()
    line = ProgressLine(name, str(folder), metrics, display)
    return [line], [line]


def words(error: BaseException) -> str:
    """An error as a sentence."""
    return str(error) if isinstance(error, EtudeError) else f"{describe_error(error)}."


class BestCallback(Callback):
    """Gives the run's best evaluation to its health."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def run_start(self, context: Context) -> None:
        self._health.best = context.best

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        self._health.best = context.best


class Apart:
    """Calls functions that only report; of their errors the first is reported, others ignored."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported = False

    def __call__(self, report: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            report(*args, **kwargs)
        except FAULTS as error:
            if not self._reported:
                self._reported = True
                notices.add(f"{self._name} failed, and the run goes on: {words(error)}")


def apart(name: str, report: Callable[P, object]) -> Callable[P, None]:
    """Contain the errors of a function that only reports, for example `say`."""
    guard = Apart(name)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        guard(report, *args, **kwargs)

    return call


class ApartCallback(Callback):
    """Contains the errors of a callback that only reports."""

    def __init__(self, callback: Callback, name: str) -> None:
        self._to, self._guard = callback, Apart(name)

    def run_start(self, context: Context) -> None:
        self._guard(self._to.run_start, context)

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        self._guard(self._to.batch_end, context, metrics)

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self._guard(self._to.iteration_end, context, fragments)

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        self._guard(self._to.evaluation_end, context, metrics)

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        self._guard(self._to.cycle_end, context, row)

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None:
        self._guard(self._to.epoch_end, context, summary)

    def run_end(self, context: Context) -> None:
        self._guard(self._to.run_end, context)


class ApartScreen:
    """Contains the errors of a screen; a row that it could not show is skipped."""

    def __init__(self, screen: LogWriter) -> None:
        self._to, self._guard = screen, Apart("The screen")

    def begin(self, history: Iterable[Row]) -> None:
        self._guard(self._to.begin, history)

    def write(self, row: Row) -> None:
        self._guard(self._to.write, row)

    def close(self) -> None:
        self._guard(self._to.close)


class ApartLog:
    """A log that is closed when it fails, and later begun again with all rows."""

    def __init__(self, log: LogWriter, name: str, rows: Callable[[], History]) -> None:
        """rows: of metrics.jsonl, up to the one that is being written."""
        self._log, self._name, self._rows = log, name, rows
        self._open = True
        self._fails = False
        """Whether the last report about it was a failure."""
        self._pause = FIRST_PAUSE
        self._due = 0.0

    def begin(self, history: Iterable[Row]) -> None:
        self._try(lambda: self._log.begin(history))

    def write(self, row: Row) -> None:
        if self._open:
            self._try(lambda: self._log.write(row))
        elif time.monotonic() >= self._due:
            self._begin_again()

    def close(self) -> None:
        if not self._open:
            self._begin_again()
        if self._open:
            self._try(self._log.close)

    def _begin_again(self) -> None:
        begun, self._open = time.monotonic(), True
        self._try(lambda: self._log.begin(self._rows()), succeeds=False)
        # Limits the cost to 1 % of the time, for any number of rows.
        self._due = max(self._due, time.monotonic() + 100 * (time.monotonic() - begun))

    def _try(self, report: Callable[[], object], succeeds: bool = True) -> None:
        """succeeds: whether success means that the log is written again."""
        try:
            report()
        except FAULTS as error:
            self._suspend()
            if not self._fails:
                self._fails = True
                notices.add(
                    f"The log {self._name} failed, and the run goes on without it: {words(error)} "
                    "It is tried again, and then gets every row of metrics.jsonl."
                )
        else:
            if succeeds and self._fails and getattr(self._log, "idle", True):
                self._fails = False
                notices.add(f"The log {self._name} is written again, and has all rows.")

    def _suspend(self) -> None:
        self._open = False
        with suppress(*FAULTS):
            self._log.close()
        self._due = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class Background:
    """A log in its own thread, so that the run does not wait for a network.

    An error of the log is raised by the next call. A hanging thread is abandoned.
    """

    def __init__(
        self, make: Callable[[], Any], patience: float, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """make: constructs the log each time it is begun. patience: seconds that one row, and the
        end, may take. give_up: called when that was exceeded."""
        self._make, self._patience, self._give_up = make, patience, give_up
        self._at: _Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all calls so far are done without an error."""
        return self._at is None or self._at.idle

    def start(self) -> None:
        self._at = _Thread(self._make())

    def begin(self, history: Iterable[Row]) -> None:
        self.start()
        self.call("begin", history)

    def write(self, row: Row) -> None:
        self.call("write", dict(row))

    def call(self, method: str, *args: Any) -> None:
        """Call a method of the log after all earlier calls."""
        if self._at is None:
            raise EtudeError("It has not been begun.")
        if (error := self._at.error(self._patience)) is not None:
            self._abandon()
            raise error
        self._at.put(method, *args)

    @waiting("waiting for the log to be sent")
    def close(self) -> None:
        if (at := self._at) is None:
            return
        at.put("close")
        at.ended.wait(self._patience)
        error = at.error(0.0)
        self._abandon()
        if error is not None:
            raise error

    def _abandon(self) -> None:
        at, self._at = self._at, None
        if at is not None and not at.ended.is_set():
            self._give_up()


class _Thread:
    """A log with the thread that calls it."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._jobs: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._put = self._done = 0
        self._since = 0.0
        self._error: BaseException | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, method: str, *args: Any) -> None:
        if self.idle:
            self._since = time.monotonic()
        self._put += 1
        self._jobs.put((method, args))

    @property
    def idle(self) -> bool:
        return self._done == self._put and self._error is None

    def error(self, patience: float) -> BaseException | None:
        """The error of the log, or one for a call that has taken longer than `patience`."""
        seconds = time.monotonic() - self._since
        if self._error is None and self._done < self._put and seconds > patience:
            return EtudeError(f"It has not answered for {seconds:.0f} s.")
        return self._error

    def _run(self) -> None:
        method = ""
        while method != "close" and self._error is None:
            method, args = self._jobs.get()
            try:
                getattr(self._log, method)(*args)
            except BaseException as error:
                self._error = error
                if method != "close":
                    with suppress(BaseException):
                        self._log.close()
            self._since = time.monotonic()
            self._done += 1
        self.ended.set()
