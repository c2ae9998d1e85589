"""Logs and screens that fail apart from their run."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from etude.api import Run, resume, train
from etude.core.errors import EtudeError
from etude.core.output import notices
from etude.core.trees import Tree
from etude.runs.folder import REPORTING
from etude.training.logs import outputs as module
from etude.training.logs.outputs import (
    ApartLog,
    Background,
    LogConfig,
    LoggedRun,
    LogsConfig,
    OpenLog,
    Outputs,
    apart,
    open_logs,
)
from etude.training.loop import Callback, Context
from log_points import row_points, rows_like_a_run, single, tensorboard_points
from toys import tiny_reach

ROWS = rows_like_a_run(6)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(notices, "add", sentences.append)
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    return sentences


class Log:
    """Keeps rows; fails as long as it is asked to."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failing: BaseException | None = None

    def begin(self, history: list[dict[str, Any]]) -> None:
        self._fail()
        self.rows = list(history)

    def write(self, row: dict[str, Any]) -> None:
        self._fail()
        self.rows.append(row)

    def close(self) -> None:
        self._fail()

    def _fail(self) -> None:
        if self.failing is not None:
            raise self.failing


@pytest.mark.parametrize("error", [OSError(28, "no space"), SystemExit(3), MemoryError("none")])
def test_a_log_that_comes_back_has_every_row(told: list[str], error: BaseException) -> None:
    log, written = Log(), list[dict[str, Any]]()
    guarded = ApartLog(log, "mine", lambda: written)
    guarded.begin([])
    for i, row in enumerate(ROWS):
        written.append(row)  # as metrics.jsonl has it before any log
        log.failing = error if i in (1, 2) else None
        guarded.write(row)
    guarded.close()
    assert log.rows == ROWS
    assert [sentence.split(":")[0] for sentence in told] == [
        "The log mine failed, and the run goes on without it",
        "The log mine is written again, and has all rows.",
    ]


def test_a_log_that_fails_at_every_row_is_told_once(told: list[str]) -> None:
    log = Log()
    guarded = ApartLog(log, "mine", lambda: [])
    guarded.begin([])
    for row in ROWS:
        log.failing = ValueError("locked")
        guarded.write(row)
        log.failing = None  # it can be begun, and not be written
    log.failing = ValueError("locked")
    guarded.close()
    assert len(told) == 1


def test_pauses_grow(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now, begun = [0.0], list[float]()
    monkeypatch.setattr(module, "FIRST_PAUSE", 5.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = Log()
    log.failing = ValueError("locked")
    guarded = ApartLog(log, "mine", lambda: begun.append(now[0]) or [])  # type: ignore[func-returns-value]
    guarded.begin([])
    for second in range(3600):
        now[0] = float(second)
        guarded.write(ROWS[0])
    assert begun == [5.0, 15.0, 35.0, 75.0, 155.0, 315.0, 635.0, 1235.0, 1835.0, 2435.0, 3035.0]


def test_an_interrupt_is_not_an_error_of_the_log(told: list[str]) -> None:
    log = Log()
    log.failing = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ApartLog(log, "mine", lambda: []).begin([])


def test_what_reports_and_raises_ends_no_run_and_a_callback_of_the_users_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    untouched = train(tiny_reach(4), tmp_path / "untouched")
    log = Log()
    log.failing = ValueError("the database is locked")

    def raises(text: str) -> None:
        raise RuntimeError("nobody listens")

    run = train(tiny_reach(4), tmp_path / "run", logs=[log], say=raises, on_phase=raises)
    assert run.fingerprint() == untouched.fingerprint()
    kept = (run.path / REPORTING).read_text()
    assert kept.count("\n") == 3  # say, on_phase and the log, each once
    assert "The log Log failed, and the run goes on without it: ValueError: the datab" in kept
    assert capsys.readouterr().err.count("nobody listens") == 2

    class Raises(Callback):
        def cycle_end(self, context: Context, row: dict[str, float]) -> None:
            raise RuntimeError("this one acts on training")

    with pytest.raises(RuntimeError, match="acts on training"):
        train(tiny_reach(4), tmp_path / "other", callbacks=[Raises()])


class Unready(LogConfig):
    """A log that cannot be opened, or whose callbacks raise."""

    kind: str = "unready"
    opens: bool = False

    def open(self, run: LoggedRun) -> OpenLog:
        if not self.opens:
            raise RuntimeError("no display")
        return OpenLog(Log(), (Raising(), Remembering()))


class Raising(Callback):
    def epoch_end(self, context: Context, summary: dict[str, float]) -> None:
        raise RuntimeError("no epochs here")


class Remembering(Callback):
    """Has memory, so it is part of the run's state."""

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        """Nothing."""


def test_logs_of_other_packages_are_held_apart(tmp_path: Path, told: list[str]) -> None:
    config = LogsConfig(tensorboard=False).model_copy(
        update={"writers": (Unready(), Unready(opens=True))}
    )
    asked = Outputs(lambda text: None, lambda phase: None)
    out = open_logs(config, tmp_path, {}, (), 1, False, asked)
    assert len(out.logs) == 1
    guarded, remembering = out.callbacks
    for _ in range(2):
        guarded.epoch_end(None, {})  # type: ignore[arg-type]
    assert isinstance(remembering, Remembering)
    assert told == [
        "The log unready cannot be opened and is omitted: RuntimeError: no display "
        f"({Path(__file__).name}, line {line_of('no display')}).",
        "A callback of the log unready failed, and the run goes on: RuntimeError: no epochs here "
        f"({Path(__file__).name}, line {line_of('no epochs here')}).",
    ]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, start=1) if f'("{text}")' in line)


class FillsTheDisk(Callback):
    """From a cycle on, the file of curves is on a disk without room."""

    def __init__(self, cycle: int, run: Path) -> None:
        self._cycle, self._run = cycle, run

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        if row["cycle"] != self._cycle:
            return
        full = os.open("/dev/full", os.O_WRONLY)
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{self._run}/events."):
                    os.dup2(full, int(fd))
        os.close(full)


def test_curves_are_whole_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    path = tmp_path / "run"
    run = train(tiny_reach(12), path, callbacks=[FillsTheDisk(2, path)])
    assert tensorboard_points(path) == single(row_points(run.rows()))
    told = (path / REPORTING).read_text()
    assert told.count("The log tensorboard failed, and the run goes on without it") == 1
    assert told.count("The log tensorboard is written again, and has all rows.") == 1


def test_a_background_log_holds_up_nothing(told: list[str]) -> None:
    gate, log = threading.Event(), Log()

    class Slow(Log):
        def begin(self, history: list[dict[str, Any]]) -> None:
            gate.wait()
            log.begin(history)

        def write(self, row: dict[str, Any]) -> None:
            log.write(row)

    slow, begin = Background(Slow, patience=10.0), time.monotonic()
    slow.begin(ROWS[:2])
    for row in ROWS[2:]:
        slow.write(row)
    assert time.monotonic() - begin < 1.0
    assert not slow.idle
    gate.set()
    slow.close()
    assert log.rows == ROWS


def test_a_background_log_that_hangs_is_abandoned() -> None:
    gate, ended = threading.Event(), list[bool]()

    class Hangs(Log):
        def write(self, row: dict[str, Any]) -> None:
            gate.wait()

    log = Background(Hangs, patience=0.2, give_up=lambda: ended.append(True))
    log.begin([])
    log.write(ROWS[0])
    time.sleep(0.4)
    with pytest.raises(EtudeError, match="It has not answered for 0 s"):
        log.write(ROWS[1])
    assert ended == [True]
    log.close()  # nothing is left of it
    gate.set()


def test_an_error_in_the_background_is_raised_by_the_next_call() -> None:
    class Fails(Log):
        def begin(self, history: list[dict[str, Any]]) -> None:
            raise ValueError("no network")

    log = Background(Fails, patience=5.0)
    log.begin([])
    with pytest.raises(ValueError, match="no network"):
        log.close()


def test_a_function_that_reports_keeps_its_errors(told: list[str]) -> None:
    def say(text: str) -> None:
        raise OSError(5, "gone")

    guarded = apart("say", say)
    for _ in range(3):
        guarded("hello")
    assert len(told) == 1
    assert told[0].startswith("say failed, and the run goes on: OSError: ")


def test_a_resume_keeps_what_was_told(tmp_path: Path) -> None:
    log = Log()
    log.failing = ValueError("locked")
    train(tiny_reach(4), tmp_path / "run", logs=[log])
    resume(tmp_path / "run", total_timesteps=6 * 256, logs=[log])
    assert (tmp_path / "run" / REPORTING).read_text().count("The log Log failed") == 2
    assert Run(tmp_path / "run").rows()[-1]["iterations"] == 6
