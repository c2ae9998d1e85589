"""`etude train --seeds`: ordinary runs in one folder; the same command goes on after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.api import Run, train
from etude.cli.main import main
from etude.cli.options import without_options
from etude.cli.seeds import _OWN, Seeds, Stopped
from etude.compare.sweeps.processes import jobs_for
from etude.planning import recipes

SHORT = [
    "reach-short",
    *("--clock.total-timesteps", "8192", "--evaluation.final-episodes", "4"),
    *("--evaluation.every", "4096 steps", "--checkpoint.every", "2048 steps"),
]


def command(folder: Path, *options: str) -> list[str]:
    return ["train", *SHORT, "--folder", str(folder), *options]


def test_runs_get_the_options_but_for_the_commands_own() -> None:
    typed = ["reach", "--seeds", "5", "--lr", "1", "--jobs=2", "--seed", "3", "--folder", "x"]
    assert without_options([*typed, "--trust", "--evaluation.every", "5", "steps"], _OWN) == [
        *("reach", "--lr", "1", "--trust", "--evaluation.every", "5", "steps")
    ]


def test_jobs_are_what_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    recipe = recipes.find("reach-short").replace(collector__threads=2, collector__engine_threads=1)
    assert jobs_for(recipe) == 8
    assert jobs_for(recipe.replace(collector__threads=32)) == 1


def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipes.find("reach-short").replace(clock__total_timesteps=2048)
    train(recipe, tmp_path / "set" / "s1")
    assert main(["train", "reach-short", "--seeds", "2", "--folder", str(tmp_path / "set")]) == 2
    assert "s1 is a run of another recipe" in capsys.readouterr().err
    run = str(tmp_path / "set" / "s1")
    assert main(["train", "reach-short", "--seeds", "2", "--folder", run]) == 2
    assert "is a run: name another folder" in capsys.readouterr().err
    assert main(["train", "reach-short", "--jobs", "2"]) == 2
    assert "add --seeds" in capsys.readouterr().err


def test_finished_runs_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: a run that fails does not keep the others from being done."""
    started: list[list[str]] = []

    class Process:
        def __init__(self, words: list[str], **_: object) -> None:
            started.append(words[words.index("etude") + 1 :])
            self.folder = Path(words[words.index("--folder") + 1])

        def poll(self) -> int:
            if self.folder.name == "s1":
                return 1
            self.folder.mkdir()
            (self.folder / "summary.json").write_text("{}")
            return 0

    monkeypatch.setattr("etude.compare.sweeps.processes.subprocess.Popen", Process)
    recipe = recipes.find("reach-short").replace(evaluation__final_episodes=0)
    runs = Seeds(recipe, tmp_path, range(3), 1, ["reach-short", "--lr", "1"])
    for number in (1, 2):
        runs.failed.clear()
        with pytest.raises(Exception, match="2 of 3 runs are finished; seed 1 failed"):
            runs.train()
        assert len(started) == 2 + number
    assert started[0] == [
        *("train", "reach-short", "--lr", "1", "--seed", "0", "--folder", str(tmp_path / "s0"))
    ]
    assert "2 are finished already" in capsys.readouterr().out


def test_a_signal_is_passed_on_and_nothing_more_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []

    class Process:
        def __init__(self, words: list[str], **_: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def send_signal(self, number: int) -> None:
            passed.append(number)

        def poll(self) -> int | None:
            return 75 if passed else None

    monkeypatch.setattr("etude.compare.sweeps.processes.subprocess.Popen", Process)
    before = signal.getsignal(signal.SIGTERM)
    runs = Seeds(recipes.find("reach-short"), tmp_path, range(3), 1, ["reach-short"])
    with pytest.raises(Stopped, match="0 of 3 runs are finished") as end:
        runs.train()
    assert end.value.exit_code == 75
    assert passed == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.rotated
def test_the_same_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    words = [sys.executable, "-m", "etude", *command(folder, "--seeds", "2", "--jobs", "2")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 120
        while not (folder / "s0" / "metrics.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A reach-short 2" in " ".join(done.stdout.split())
    whole = train(recipes.load(folder / "s1" / "recipe.yaml"), tmp_path / "whole")
    assert Run(folder / "s1").fingerprint() == whole.fingerprint()
