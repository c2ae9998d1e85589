"""Trials as Ray tasks, with a Ray that only pretends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.cli.main import main
from etude.compare.sweeps import processes
from etude.compare.sweeps.processes import Task


class Gone(Exception):
    """What Ray raises where a machine or a process is gone."""


def fake(answer: Any, ready: bool = True) -> Any:
    def get(reference: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(
        wait=lambda references, timeout: (references if ready else [], []),
        get=get,
        exceptions=SimpleNamespace(RayError=Gone),
    )


def test_a_task_is_seen_as_a_process() -> None:
    assert Task(fake(0, ready=False), "task").poll() is None
    assert Task(fake(3), "task").poll() == 3
    assert Task(fake(Gone()), "task").poll() == -signal.SIGKILL


def test_a_cancelled_task_asks_its_run_to_save_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saves = "import signal, sys; signal.signal(15, lambda *_: sys.exit(143)); signal.pause()"

    def start(verb: list[str], log: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", saves])

    def cancel(seconds: float) -> None:
        monkeypatch.setattr(processes.time, "sleep", real)
        real(0.5)
        raise KeyboardInterrupt

    real = processes.time.sleep
    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes.time, "sleep", cancel)
    assert processes._run(["resume", "run"], str(tmp_path / "log"), str(tmp_path)) == 143


def test_without_ray_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = str(tmp_path / "sweep")
    words = ["sweep", "reach-short", "--vary", "seed=0,1", "--folder", folder, "--ray", "local"]
    assert main(words) == 2
    assert "--ray needs Ray" in capsys.readouterr().err
    assert not Path(folder).exists()
