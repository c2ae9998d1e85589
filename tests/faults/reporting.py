"""Whatever only reports fails: output, TensorBoard, W&B, a writer of the user's. No run notices.

Each case is a run of its own in a process of its own, whose fingerprint is that of a run without
faults. `python tests/faults/reporting.py FAULT ROW FOLDER` is such a run, for faults from inside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import etude
from etude.api import Run
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs.folder import METRICS, REPORTING
from etude.training.logs import outputs as apart
from etude.training.loop import Callback, Context
from log_points import row_points, single, tensorboard_points
from toys import tiny_reach
from wandb_server import WandbServer

TESTS = Path(__file__).parents[1]

ROW = 26
UNIT = "faults of what only reports"
FULL, IN_CI = 100, 1
SECONDS = 120.0
ROWS = 8

OUTPUT = ("pipe closed", "disk full", "closed", "not read", "terminal gone")
INSIDE = ("curves full", "curves blocked", "writer raises")
SERVER = (
    *("service killed", "service frozen", "server away", "server hangs", "server dies"),
    "server errs",
)
HAS_WANDB = importlib.util.find_spec("wandb") is not None
FAULTS = OUTPUT + INSIDE + (SERVER if HAS_WANDB else ())


def recipe_of(fault: str) -> Recipe:
    logs = {"wandb": fault in SERVER, "tensorboard": True}
    evaluation = {"final_episodes": 8}
    return tiny_reach(2 * ROWS, checkpoint={"every": "3 cycles"}, logs=logs, evaluation=evaluation)


@functools.cache
def reference() -> dict[str, str]:
    """What a run without faults comes to."""
    with tempfile.TemporaryDirectory() as folder:
        return etude.train(recipe_of(""), Path(folder) / "run").fingerprint()


def case(number: int, seed: int, folder: Path) -> None:
    chance = random.Random(f"{seed}, {number}")
    fault, row = FAULTS[number % len(FAULTS)], chance.randint(1, ROWS - 4)
    run = folder / "run"
    if fault in OUTPUT:
        code = _strike_output(fault, row, run)
    else:
        command = [sys.executable, __file__, fault, str(row), str(run)]
        code = subprocess.run(command, env=_environment(folder), check=False).returncode
    assert code == 0, f"{fault} at row {row}: exit code {code}"
    assert (run / "summary.json").exists()
    assert Run(run).fingerprint() == reference(), f"{fault} at row {row}"
    file = run / REPORTING
    told = file.read_text().splitlines() if file.exists() else []
    failed = [line for line in told if "goes on without it" in line]
    # Of an output that was never open there is nothing to tell.
    assert len(failed) == (fault != "closed"), f"{fault} at row {row}: {told}"
    if fault == "curves full":
        rows = single(row_points(Run(run).rows()))
        assert tensorboard_points(run) == rows, "the curves miss points"


def _environment(folder: Path) -> dict[str, str]:
    """W&B's own folders are not those of the person who runs this."""
    own = {f"WANDB_{name}_DIR": str(folder / "own") for name in ("CACHE", "CONFIG", "DATA")}
    known = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    paths = [str(TESTS / "lib"), known.get("PYTHONPATH", "")]
    return {**known, **own, "PYTHONPATH": os.pathsep.join(paths), "TERM": "xterm"}


def _strike_output(fault: str, row: int, run: Path) -> int:
    """Train on the command line, and lose its output at a row; the exit code."""
    file = run.with_name("recipe.yaml")
    file.write_text(recipes.dump(recipe_of(fault)))
    command = [sys.executable, "-m", "etude", "train", str(file), "--folder", str(run)]
    read, write = pty.openpty() if fault == "terminal gone" else os.pipe()
    if fault == "disk full":
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    if fault == "closed":
        command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command]
    if fault == "not read":  # and full before the run begins
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(1 << 12))
        os.set_blocking(write, True)
    process = subprocess.Popen(
        command,
        stdout=write,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=_environment(run.parent),
        start_new_session=True,  # so that no terminal's end is a signal to it
    )
    os.close(write)
    rows = run / METRICS
    os.set_blocking(read, False)
    while process.poll() is None and fault in ("pipe closed", "terminal gone"):
        with contextlib.suppress(BlockingIOError, OSError):
            os.read(read, 1 << 16)
        if rows.exists() and rows.read_bytes().count(b"\n") >= row:
            break
        time.sleep(0.01)
    if fault != "not read":
        os.close(read)
    code = process.wait(timeout=SECONDS)
    if fault == "not read":
        os.close(read)
    return code


class Strike(Callback):
    """Makes a reporter fail at a row, and leaves time for it to come back."""

    def __init__(self, fault: str, row: int, run: Path, server: WandbServer | None) -> None:
        self._fault, self._row, self._run, self._server = fault, row, run, server
        self.raising = False
        self._block = run / "events.out.tfevents.0.block"

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        cycle = int(row["cycle"])
        if cycle == self._row:
            self._strike()
        if cycle == self._row + 2 and self._block.exists():
            self._block.rmdir()
        if cycle >= self._row:
            time.sleep(0.1)

    def _strike(self) -> None:
        if self._fault.startswith("curves"):
            full = os.open("/dev/full", os.O_WRONLY)
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if "events.out.tfevents" in os.readlink(f"/proc/self/fd/{fd}"):
                        os.dup2(full, int(fd))
            if self._fault == "curves blocked":
                self._block.mkdir()
        self.raising = self._fault == "writer raises"
        if self._fault.startswith("service"):
            from etude.training.logs.wandb import _service

            self._wait_for_rows()
            _service().send_signal(
                signal.SIGKILL if self._fault == "service killed" else signal.SIGSTOP
            )
        if self._server is not None and self._fault == "server dies":
            self._wait_for_rows()
            self._server.stop()
        if self._server is not None and self._fault == "server errs":
            self._wait_for_rows()
            self._server.mood = "broken"

    def _wait_for_rows(self) -> None:
        """W&B begins in a thread of its own."""
        state, end = self._run / "wandb.json", time.monotonic() + 20.0
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError):
                if json.loads(state.read_text())["sent"] > 0:
                    return
            time.sleep(0.02)
        raise AssertionError("W&B has not begun")


class Raising:
    """A writer of the user's."""

    strike: Strike

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Nothing."""

    def write(self, row: dict[str, Any]) -> None:
        if self.strike.raising:
            raise ValueError("the database is locked")

    def close(self) -> None:
        """Nothing."""


def main(fault: str, row: int, run: Path) -> int:
    """A run in which a reporter fails."""
    apart.FIRST_PAUSE = 0.2
    server = None
    if fault in SERVER:
        from etude.training.logs import wandb

        wandb.START, wandb.END = 5.0, 10.0
        server = WandbServer("hangs" if fault == "server hangs" else "well")
        os.environ.update(server.environment())
        if fault == "server away":
            server.stop()
    writer = Raising()
    writer.strike = Strike(fault, row, run, server)
    made = etude.train(recipe_of(fault), run, [writer.strike], [writer], say=print, console=True)
    if fault == "service killed":
        assert server is not None
        wanted = [int(row["timesteps"]) for row in made.rows()]
        assert sorted(set(server.steps)) == wanted, f"W&B has {server.steps}"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
