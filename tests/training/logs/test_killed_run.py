"""A real run with every log, in a terminal, ended by SIGKILL and resumed; beside one untouched."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from terminal import Terminal

import etude
from etude.api import Run
from etude.cli import main as cli
from etude.planning import recipes
from log_points import row_points, single, tensorboard_points, wandb_points
from toys import tiny_reach

HAS_WANDB = importlib.util.find_spec("wandb") is not None


@dataclass
class Runs:
    untouched: Path
    killed: Path
    screen: Terminal
    """What the killed run left on its terminal."""
    output: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    logs = {"wandb": HAS_WANDB, "wandb_mode": "offline"}
    recipe = tiny_reach(40, checkpoint={"every": "3 cycles"}, logs=logs)
    (folder / "recipe.yaml").write_text(recipes.dump(recipe))
    killed, untouched = folder / "killed", folder / "untouched"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(folder / "own"))
        output = train_in_a_terminal_and_kill(folder / "recipe.yaml", killed)
        etude.resume(killed)
        etude.train(recipe, untouched)
    screen = Terminal(100, 30)
    screen.feed(output)
    return Runs(untouched, killed, screen, output)


def train_in_a_terminal_and_kill(recipe: Path, run: Path) -> str:
    """Train until a few rows have come after a checkpoint; all that was written to the screen."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    names = ("WANDB_SERVICE", "NO_COLOR", "COLUMNS", "LINES")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "etude", "train", str(recipe), "--folder", str(run)]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env)
    os.close(its)
    written = bytearray()
    reader = threading.Thread(target=read_all, args=(ours, written), daemon=True)
    reader.start()
    rows, patience = run / "metrics.jsonl", time.monotonic() + 60
    while not (rows.exists() and rows.read_text().count("\n") >= 8):
        assert process.poll() is None, written.decode(errors="replace")
        assert time.monotonic() < patience
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reader.join(timeout=10)
    assert not (run / "summary.json").exists()
    return written.decode(errors="replace")


def read_all(stream: int, into: bytearray) -> None:
    try:
        while data := os.read(stream, 65536):
            into += data
    except OSError:  # the other end is gone
        pass


@pytest.mark.rotated(together=True)
def test_the_runs_are_the_same(runs: Runs) -> None:
    assert Run(runs.killed).fingerprint() == Run(runs.untouched).fingerprint()


@pytest.mark.rotated(together=True)
def test_tensorboard_holds_the_same_points(runs: Runs) -> None:
    untouched = tensorboard_points(runs.untouched)
    assert tensorboard_points(runs.killed) == untouched
    assert untouched == single(row_points(Run(runs.untouched).rows()))
    assert {step for _, step, _ in untouched} == set(range(512, 40 * 256 + 1, 512))


@pytest.mark.rotated(together=True)
@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed: pip install etude[wandb]")
def test_wandb_holds_the_same_points_once(runs: Runs) -> None:
    untouched = wandb_points(runs.untouched)
    assert wandb_points(runs.killed) == untouched
    assert untouched == sorted(row_points(Run(runs.untouched).rows()))
    assert json.loads((runs.killed / "wandb.json").read_text())["uploaded"]


@pytest.mark.rotated(together=True)
def test_a_killed_dashboard_leaves_a_terminal_that_works(runs: Runs) -> None:
    assert "\x1b[?" not in runs.output
    assert not runs.screen.unknown
    text = "\n".join(runs.screen.above + runs.screen.lines)
    assert " etude  reach-short" in text
    assert "of 10,240 steps" in text
    assert text.count("── curves") == 1  # one picture, changed in place


def test_a_pipe_gets_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recipe = tmp_path / "recipe.yaml", tiny_reach(4, logs={"console": "dashboard"})
    file.write_text(recipes.dump(recipe))
    assert cli.main(["train", str(file), "--folder", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "environment steps" in lines[0]
    assert lines[2].startswith("Device: learning on ")
    assert lines[3].split()[:3] == ["steps", "episodes", "seconds"]
    assert any(line.startswith("  epoch 2: ") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_python_is_quiet_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    etude.train(tiny_reach(2), tmp_path / "quiet")
    assert capsys.readouterr().out == ""
    assert tensorboard_points(tmp_path / "quiet")
    etude.train(tiny_reach(2, logs={"tensorboard": False}), tmp_path / "shown", console=True)
    assert "steps" in capsys.readouterr().out
    assert not [*(tmp_path / "shown").glob("events.*")]
