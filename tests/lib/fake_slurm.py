"""A Slurm of one job: what `sbatch SCRIPT` and `scontrol requeue ID` do with a batch script.

    python fake_slurm.py sbatch SCRIPT      runs the job to its end, as often as it is requeued
    python fake_slurm.py scontrol requeue ID

FAKE_SLURM is a folder for what it remembers, and FAKE_SLURM_STRIKES the number of slices that end
at their time limit. Time limits come early: once so many rows were logged in the slice
(FAKE_SLURM_ROWS), or so many seconds have passed (FAKE_SLURM_SECONDS). Only the signal that the
script asks for is sent, and only to its shell.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 120.0
STATE = Path(os.environ["FAKE_SLURM"])
REQUEUED = STATE / "requeued"


def option(script: str, name: str) -> str:
    """What the script asks for."""
    found = re.search(rf"^#SBATCH --{name}(?:=(.*))?$", script, re.MULTILINE)
    assert found is not None, f"the script does not ask for --{name}"
    return "".join(shlex.split(found[1] or ""))


def run_slice(path: Path, text: str, strikes: bool) -> int:
    """The exit code of the script's shell, which is signalled at its time limit."""
    option(text, "requeue")
    assert option(text, "open-mode") == "append"
    to, name, before = re.fullmatch(r"(B):(\w+)@(\d+)", option(text, "signal")).groups()  # type: ignore[union-attr]
    assert to == "B"
    assert int(before) >= 30
    log = Path(option(text, "output"))
    rows = log.with_suffix("") / "metrics.jsonl"
    wanted = count(rows) + int(os.environ.get("FAKE_SLURM_ROWS", "2"))
    seconds = float(os.environ.get("FAKE_SLURM_SECONDS", "0"))
    with log.open("ab") as stream:
        job = subprocess.Popen(
            ["bash", str(path)],
            env={**os.environ, "SLURM_JOB_ID": "17"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    start = time.monotonic()
    while strikes and job.poll() is None and time.monotonic() < start + PATIENCE:
        time_is_up = time.monotonic() > start + seconds if seconds else count(rows) >= wanted
        if time_is_up:
            job.send_signal(getattr(signal, f"SIG{name}"))
            break
        time.sleep(0.01)
    return job.wait(PATIENCE)


def count(rows: Path) -> int:
    return rows.read_text().count("\n") if rows.exists() else 0


def sbatch(path: Path) -> int:
    """Run the job for as long as it asks to be requeued."""
    slices, strikes = 0, int(os.environ["FAKE_SLURM_STRIKES"])
    while True:
        REQUEUED.unlink(missing_ok=True)
        code = run_slice(path, path.read_text(), strikes=slices < strikes)
        slices += 1
        print(f"slice {slices}: exit code {code}, requeued: {REQUEUED.exists()}", flush=True)
        if not REQUEUED.exists():
            return code


def scontrol(verb: str, job: str) -> int:
    assert (verb, job) == ("requeue", "17")
    REQUEUED.touch()
    return 0


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.exit(sbatch(Path(arguments[0])) if program == "sbatch" else scontrol(*arguments))
