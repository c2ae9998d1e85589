"""The line that `etude.train` shows on a terminal; it only reports."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from terminal import Terminal

import etude
from etude.core.clock import Clock, ClockConfig, Loops
from etude.core.metrics import COUNTERS, EPISODES
from etude.core.output import notices
from etude.core.trees import Tree
from etude.training.logs import progress
from etude.training.logs.outputs import LogConfig, LoggedRun, OpenLog
from etude.training.logs.progress import Progress, ProgressLine
from etude.training.loop import Context
from toys import tiny_reach

WIDTH, HEIGHT = 120, 12


class Tty:
    """A terminal of its own as standard error."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._reads, writes = os.openpty()
        self._stream = os.fdopen(writes, "w", encoding="utf-8")
        self._data = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        patch.setattr(sys, "stderr", self._stream)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(WIDTH))  # rich asks the terminal of standard input otherwise
        patch.setenv("LINES", str(HEIGHT))

    def _read(self) -> None:
        while True:
            try:
                self._data += os.read(self._reads, 1 << 16)
            except OSError:  # closed
                return

    def lines(self) -> list[str]:
        """What a person sees after the terminal is closed."""
        self._stream.close()
        self._thread.join(10.0)
        os.close(self._reads)
        terminal = Terminal(WIDTH, HEIGHT)
        terminal.feed(self._data.decode())
        assert not terminal.unknown
        return [line for line in terminal.lines if line]


def small_recipe() -> etude.Recipe:
    return tiny_reach(4, logs={"tensorboard": False})


def test_a_terminal_shows_one_line_and_what_is_printed_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talks(etude.Callback):
        def cycle_end(self, context: Context, row: dict[str, float]) -> None:
            print("a line of mine", file=sys.stderr)

    tty = Tty(monkeypatch)
    run = etude.train(small_recipe(), tmp_path / "run", [Talks()])
    lines = tty.lines()
    above, last = lines[:-2], "".join(lines[-2:])  # the path of the run does not fit into one
    steps = f"{run.rows()[-1]['timesteps']:,}"
    assert set(above) == {"a line of mine"}
    assert last.startswith(f"{run.recipe.name} ")
    assert "finished" in last
    assert f"{steps} steps in" in last
    assert last.endswith(str(run.path)[-20:])
    assert "eval return " in last or "eval success " in last


def test_a_recipe_for_any_task_is_named_after_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tty = Tty(monkeypatch)
    etude.train(small_recipe().replace(name="ppo"), tmp_path / "run")
    assert "".join(tty.lines()).startswith("reach, ppo ")


@pytest.mark.parametrize("console", [False, None])
def test_without_a_terminal_or_when_it_is_not_wanted_nothing_is_printed(
    console: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tty = Tty(monkeypatch) if console is False else None
    etude.train(small_recipe(), tmp_path / "run", console=console)
    assert tty is None or tty.lines() == []
    assert capfd.readouterr() == ("", "")


def test_logs_console_none_shows_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tty = Tty(monkeypatch)
    etude.train(small_recipe().replace(logs__console="none"), tmp_path / "run")
    assert tty.lines() == []


def test_a_resume_continues_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = etude.train(small_recipe(), tmp_path / "run")
    total = 3 * run.rows()[-1]["timesteps"]
    tty = Tty(monkeypatch)
    etude.resume(run.path, total_timesteps=total)
    last = "".join(tty.lines())
    assert "finished" in last
    assert f"{total * 2 // 3:,} steps in" in last


@pytest.mark.parametrize("method", ["start", "picture"])
def test_a_line_that_fails_ends_no_run_and_changes_no_bit(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    quiet = etude.train(small_recipe(), tmp_path / "quiet", console=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("no screen")

    tty = Tty(monkeypatch)
    monkeypatch.setattr(notices, "add", told.append)
    owner = progress.ProgressLine if method == "picture" else progress.TerminalLine
    monkeypatch.setattr(owner, method, fail)
    run = etude.train(small_recipe(), tmp_path / "run")
    tty.lines()
    assert run.summary()["counts"] == quiet.summary()["counts"]
    assert run.fingerprint() == quiet.fingerprint()
    assert [sentence.split(",")[0] for sentence in told] == ["The screen failed"]


class Remembers(etude.Callback):
    """Has memory, so it is part of the run's state."""

    def __init__(self) -> None:
        self.cycles = 0

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        self.cycles += 1

    def state_dict(self) -> Tree:
        return {"cycles": self.cycles}

    def load_state_dict(self, state: Tree) -> None:
        self.cycles = state["cycles"]


class RememberingLog(LogConfig):
    """A log of another package whose callback has state."""

    kind: str = "remembering"

    def open(self, run: LoggedRun) -> OpenLog:
        return OpenLog(progress.ProgressLine("", "", (), Place()), (Remembers(),))


def test_a_run_with_the_line_resumes_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = {"tensorboard": False, "writers": ["test_progress_line:RememberingLog"]}
    with monkeypatch.context() as patch:
        tty = Tty(patch)
        run = etude.train(tiny_reach(4, logs=logs), tmp_path / "run")
        assert "finished" in "".join(tty.lines())
    etude.resume(run.path, total_timesteps=6 * 256, console=False)
    assert run.rows()[-1]["iterations"] == 6


class Place:
    """A display that shows nothing by itself."""

    def start(self, picture: Any) -> None: ...

    def stop(self) -> None: ...


def line_at(iterations: int, seconds: float, patch: pytest.MonkeyPatch) -> ProgressLine:
    """A line of a run of 100 iterations of 64 steps after some of them, each of `seconds`."""
    now = [50.0]
    patch.setattr(time, "perf_counter", lambda: now[0])
    loops = Loops.of(ClockConfig(total_timesteps=6400), 64, 10)
    clock = Clock(loops)
    line = ProgressLine("name", "runs/x", COUNTERS + EPISODES, Place())
    line.begin([])
    line.run_start(Context(clock, None, None))  # type: ignore[arg-type]
    for _ in range(iterations):
        now[0] += seconds
        clock.advance(10, 0)
        line.iteration_end(Context(clock, None, None), [])  # type: ignore[arg-type]
    return line


def test_pace_and_time_left_follow_from_the_newest_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = line_at(40, 2.0, monkeypatch)
    line.write({"rollout/ep_rew_mean": -12.3, "eval/mean_reward": 4.0})
    shown = line.picture()
    assert shown.share == 0.4
    # 60 iterations of 2 s are left; 64 steps in 2 s.
    assert shown.facts == [
        *("40%", "2 min 0 s left", "32 steps/s", "return -12.30", "eval return 4.00"),
        "2,560 of 6,400 steps",
    ]


def test_gradient_steps_count_within_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_at(40, 2.0, monkeypatch)
    for _ in range(5):
        line.batch_end(None, None)  # type: ignore[arg-type]
    assert line.picture().share == pytest.approx(0.405)


def test_a_narrow_terminal_leaves_the_last_facts_out() -> None:
    shown = Progress("reach", 0.5, ["50%", "3 s left", "1,000 steps/s", "return 1.00"])
    for width in range(20, 100):
        line = shown.text(width)
        assert line.cell_len <= width
        assert "\n" not in line.plain
    assert shown.text(45).plain.endswith("50%, 3 s left")
    assert shown.text(99).plain.endswith("return 1.00")


def test_the_name_of_a_recipe_is_no_markup_and_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ProgressLine("<b>\x1b[2J[red]x", "runs/x", (), Place())
    shown = line.picture()
    assert "<b>" not in shown.bundle()["text/html"].replace("<b>&lt;b&gt;", "")
    assert "\x1b" not in shown.text(80).plain
    assert "[red]x" in shown.text(80).plain
