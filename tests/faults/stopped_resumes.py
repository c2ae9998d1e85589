"""SIGTERM at a random moment of a resume, most of all while it starts: nothing is lost."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from etude import api
from etude.api import Run
from etude.core.errors import RESUMABLE
from etude.planning.resolve import resolve
from toys import tiny_reach

ROW = 30
UNIT = "signals while a resume starts"
FULL, IN_CI = 50, 1
SECONDS = 240.0
RESUME = """
import sys
print("imported", flush=True)
from etude.cli.main import main
sys.exit(main(["resume", sys.argv[1], "--collector.threads", "1"]))
"""
KILLED = -signal.SIGTERM
"""Before Etude was there to take the signal, or between its start and the loop."""


@cache
def runs() -> tuple[Path, dict[str, str], float]:
    """A paused run, the fingerprint of an untouched one, and the seconds that a resume takes."""
    folder = Path(mkdtemp())
    recipe = tiny_reach(6, evaluation={"every": "3 cycles", "final_episodes": 0})
    untouched = api.train(recipe, folder / "untouched").fingerprint()
    api.create(resolve(recipe), folder / "paused")
    api.resume(folder / "paused", pause_after=2)
    shutil.copytree(folder / "paused", folder / "timed", symlinks=True)
    start = time.monotonic()
    assert stopped(folder / "timed", None) == 0
    return folder / "paused", untouched, time.monotonic() - start


def case(number: int, seed: int, folder: Path) -> None:
    paused, untouched, seconds = runs()
    run = shutil.copytree(paused, folder / "run", symlinks=True)
    at = random.Random(f"{seed} {number}").uniform(0.0, seconds)
    code = stopped(run, at)
    assert code in (0, RESUMABLE, KILLED), f"exit code {code}, {at:.2f} s after the start"
    assert api.resume(run).fingerprint() == untouched
    assert not Run(run).folder.last_failure()


def stopped(run: Path, at: float | None) -> int:
    """The exit code of a resume that is sent SIGTERM after some seconds, or of a whole one."""
    command = [sys.executable, "-c", RESUME, str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        if at is not None:
            time.sleep(at)
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    if process.returncode == RESUMABLE:
        assert "Continue with: etude resume" in said, said
    return process.returncode
