"""Signals: acknowledged at once, obeyed at a boundary, and final when no boundary comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.api import Interrupted, Run, resume, train
from etude.core.contracts import BatchMetrics
from etude.core.errors import RESUMABLE
from etude.runs import checkpoint
from etude.training import stop as module
from etude.training.loop import Callback, Context
from etude.training.stop import SIGNALS, StopRequest
from toys import tiny_reach


@pytest.fixture(autouse=True)
def _signals_arrive() -> Iterator[None]:
    """Also where the tests are run by nohup, or after Ray has left its own handler."""
    numbers = signal.SIGTERM, signal.SIGHUP
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Strike(Callback):
    """Sends this process a signal in the middle of an update."""

    def __init__(self, number: int) -> None:
        self.number, self.done = number, False

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if not self.done and context.clock.now.iterations == 3:
            os.kill(os.getpid(), self.number)
            self.done = True


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_every_signal_saves_and_the_run_goes_on(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    untouched = train(tiny_reach(6), tmp_path / "untouched")
    with pytest.raises(Interrupted) as caught:
        train(tiny_reach(6), tmp_path / "run", callbacks=[Strike(number)])
    assert caught.value.exit_code == RESUMABLE
    assert f"{number.name}: the run is saved at the end of this iteration" in capfd.readouterr().err
    assert Run(tmp_path / "run").rows()[-1]["iterations"] == 4
    assert resume(tmp_path / "run").fingerprint() == untouched.fingerprint()


class NoLog:
    """A log that keeps nothing."""

    def begin(self, history: object) -> None: ...

    def write(self, row: object) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("place", ["start", "history"])
def test_a_signal_while_a_resume_starts_loses_nothing(place: str, tmp_path: Path) -> None:
    """Before the first iteration nothing is done and nothing lost; later the iteration is saved."""
    untouched = train(tiny_reach(6), tmp_path / "untouched")
    with pytest.raises(Interrupted):
        train(tiny_reach(6), tmp_path / "run", callbacks=[Strike(signal.SIGTERM)])

    before = checkpoint.resumable(tmp_path / "run" / "checkpoints")

    def say(text: str) -> None:
        if place == "start" and text.startswith("Resuming"):
            os.kill(os.getpid(), signal.SIGTERM)

    class Slow(NoLog):
        def begin(self, history: object) -> None:
            if place == "history":
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="etude resume") as caught:
        resume(tmp_path / "run", say=say, logs=[Slow()])
    assert caught.value.exit_code == RESUMABLE
    assert ("nothing is lost" in str(caught.value)) == (place == "start")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert checkpoint.resumable(tmp_path / "run" / "checkpoints") != before or place == "start"
    assert resume(tmp_path / "run").fingerprint() == untouched.fingerprint()


def test_a_run_under_nohup_goes_on_when_its_terminal_closes(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    train(tiny_reach(4), tmp_path / "run", callbacks=[Strike(signal.SIGHUP)])
    assert Run(tmp_path / "run").rows()[-1]["iterations"] == 4


BUSY = """
import hashlib, sys
from etude.training.stop import StopRequest
with StopRequest(grace=float(sys.argv[1])) as stop:
    stop.boundary(512, saved=True)
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)  # minutes in C, deaf to Python's handlers
"""


def busy(grace: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(grace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


def test_a_process_that_is_busy_in_a_library_answers_and_ends() -> None:
    process, start = busy(grace=2.0), time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "SIGTERM: the run is saved" in process.stderr.readline()
    assert time.monotonic() - start < 1.5
    _, err = process.communicate(timeout=30)
    assert 1.5 < time.monotonic() - start < 8
    assert process.returncode == 128 + signal.SIGTERM
    assert "s of work since step 512 are lost" in err


def test_a_second_signal_ends_it_at_once() -> None:
    process, start = busy(grace=300.0), time.monotonic()
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert process.returncode == 128 + signal.SIGUSR1


def test_the_same_signal_from_two_sides_is_one_request() -> None:
    """A scheduler sends it to all processes, and the batch script passes its own on."""
    process = busy(grace=2.0)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - start > 1.5  # the grace, and not at once


def test_the_grace_follows_the_longest_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    request, fixed = StopRequest(), StopRequest(grace=2.5)
    assert request.grace == module.LEAST_GRACE
    for seconds in (1.0, 40.0, 2.0):
        now += seconds
        request.boundary(0, saved=False)
        fixed.boundary(0, saved=False)
    assert request.grace == 120.0
    assert fixed.grace == 2.5


def test_handlers_are_put_back_and_other_threads_train_without() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    seen: list[object] = []

    def elsewhere() -> None:
        with StopRequest() as request:
            seen.append(request.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [False]
