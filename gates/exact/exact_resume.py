"""Kill a run again and again; the completed run must equal the untouched one, bit for bit.

    python -m gates.exact.exact_resume --recipe reach|td3|...|recipe.yaml --kills 300

Runs a short form of the recipe (`short_runs.py`) in fresh interpreters, each with another hash seed
and another order of loading, and ends them with SIGKILL: while the folder is made, while a
checkpoint is restored, at random times after the first iteration, in the middle of saves, and in
the middle of evaluations. Every chain of kills ends with a completed run, whose SHA-256 over
weights, optimizer, normaliser, snapshots and metrics.jsonl (but for `time/` and `system/`) is held
against the untouched run's. A run that ends by itself with an error, or that does not end, fails
the gate and ends it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import fresh_attempt
from etude.planning.recipes import dump
from fresh_attempt import ITERATIONS, PHASES, SIZE
from gates.lib.command import started
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse
from gates.lib.short_runs import short_run

AIMS = ("any", "save", "test", "start")
RARE = {"creating": 20, "restoring": 10, "save": 10, "test": 10}
"""{phase: n}: at least one kill in n must have hit it."""
MOST_FAILURES = 3
PATIENCE = 20.0
"""Longest time of an attempt, relative to the untouched run."""


class Failed(Exception):
    """An attempt ended by itself with an error, or did not end."""


class Kill(NamedTuple):
    """Where to kill: while starting, inside a phase, or at any time."""

    aim: str
    chance: random.Random

    def wait(
        self, process: subprocess.Popen[str], shared: mmap.mmap, startup: float, deadline: float
    ) -> None:
        """Return at the time of the kill."""

        def until(reached: bytes, at: int, deadline: float = deadline) -> None:
            while process.poll() is None and shared[at] not in reached:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.0002)

        uniform = self.chance.uniform
        if self.aim == "start":
            until(bytes(range(1, len(PHASES))), 0)
            time.sleep(uniform(0.0, startup))
            return
        until(bytes(range(2, 256)), ITERATIONS)
        time.sleep(uniform(0.0, 0.5 if self.aim == "any" else 0.15))
        if self.aim != "any":
            until(bytes([PHASES.index(self.aim)]), 0, time.monotonic() + 3.0)
            # Phases last from 1 ms to seconds: log-uniform, to hit every order of magnitude.
            time.sleep(10.0 ** uniform(-4.0, -1.3))


class Attempts:
    """State shared by all chains: the runs, the phases hit, and when to stop."""

    def __init__(self, gate: Gate, options: argparse.Namespace, scratch: Path) -> None:
        self.gate, self.options, self.scratch = gate, options, scratch
        self.recipe = scratch / "recipe.yaml"
        self.recipe.write_text(dump(short_run(options.recipe, gate, scratch)))
        self.reference, self.seconds, self.startup = "", gate.limit / PATIENCE, 1.0
        self.runs = self.different = 0
        self._lock = threading.Lock()

    def untouched(self) -> None:
        """The untouched run, which all others must equal."""
        begin = time.monotonic()
        self.attempt(self.scratch / "untouched", "untouched")
        self.seconds = time.monotonic() - begin
        self.reference = fingerprint(self.scratch / "untouched")
        print(f"untouched {self.options.recipe}: {self.reference}", flush=True)

    def wants_more(self) -> bool:
        """Whether to go on; False also if runs complete without being hit."""
        gate = self.gate
        missing = any(gate.counts[what] < least for what, least in gate.needs.items())
        most = 2 * self.options.runs + self.options.kills
        return missing and len(gate.failures) < MOST_FAILURES and self.runs < most

    def attempt(self, folder: Path, name: str, kill: Kill | None = None) -> bool:
        """Start or resume a run until it ends or is killed; True if killed."""
        phase_file = self.scratch / f"phase-{name}"
        phase_file.write_bytes(bytes(SIZE))
        seed = random.Random(f"{name}-{time.monotonic_ns()}").randrange(2**32)
        command = [sys.executable, fresh_attempt.__file__, str(self.recipe), str(folder)]
        command += [str(phase_file), str(seed)]
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        patience = min(max(PATIENCE * self.seconds, 60.0), self.gate.seconds_left)
        with (
            started(command, env=env, **pipes) as process,
            phase_file.open("r+b") as stream,
            mmap.mmap(stream.fileno(), SIZE) as shared,
        ):
            if kill is not None:
                kill.wait(process, shared, self.startup, time.monotonic() + patience)
                process.send_signal(signal.SIGKILL)
            elif not folder.exists():
                self._watch_startup(process, shared)
            try:
                _, said = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired as error:
                raise Failed(f"{folder.name} did not end within {patience:.0f} s") from error
            phase = PHASES[shared[0]]
        if process.returncode == -signal.SIGKILL and kill is not None:
            with self._lock:
                self.gate.count("kills")
                self.gate.count(f"kills in {phase}")
            return True
        if process.returncode != 0:
            raise Failed(f"{folder.name} ended with {process.returncode}: {said[-2000:]}")
        return False

    def _watch_startup(self, process: subprocess.Popen[str], shared: mmap.mmap) -> None:
        """Record the seconds from the first change on disk to the first rollout."""
        begin = None
        while process.poll() is None and not shared[ITERATIONS]:
            if begin is None and shared[0]:
                begin = time.monotonic()
            time.sleep(0.001)
        if begin is not None:
            self.startup = time.monotonic() - begin

    def completed(self, folder: Path, kills: int) -> None:
        result = fingerprint(folder)
        with self._lock:
            self.runs += 1
            equal = result == self.reference
            print(
                f"run {self.runs:3d}  {kills:2d} kills  {self.gate.counts['kills']:4d} in all  "
                f"{'equal' if equal else 'DIFFERENT'}",
                flush=True,
            )
            if equal:
                self.gate.count("equal runs")
            else:
                self.different += 1
                self.gate.fail(f"run {self.runs} after {kills} kills: {result}")


class Chain(threading.Thread):
    """Complete runs, one after the other, each killed several times."""

    def __init__(self, attempts: Attempts, number: int) -> None:
        super().__init__(daemon=True)
        self.attempts, self.name = attempts, f"chain{number}"
        self.random = random.Random(f"{attempts.options.seed}-{number}")
        self.kills_per_run = attempts.options.kills_per_run

    def run(self) -> None:
        try:
            while self.attempts.wants_more():
                self.one_run(self.attempts.scratch / f"{self.name}-{time.monotonic_ns()}")
        except Failed as error:
            self.attempts.gate.fail(str(error))
        except BaseException:
            self.attempts.gate.fail(f"{self.name}: {traceback.format_exc()}")

    def one_run(self, folder: Path) -> None:
        kills, aim = 0, "start"
        while kills < self.kills_per_run:
            if not self.attempts.attempt(folder, self.name, Kill(aim, self.random)):
                break
            kills, aim = kills + 1, self.random.choice(AIMS)
        if not (folder / "summary.json").exists():
            self.attempts.attempt(folder, self.name)
        self.attempts.completed(folder, kills)
        shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument(
        "--runs", type=int, help="completed runs at least; default a tenth of kills"
    )
    parser.add_argument("--chains", type=int, default=2, help="runs that are killed side by side")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, {"kills": 5, "kills_per_run": 3}, arguments)
    options.runs = options.runs or max(1, options.kills // 10)
    needs = {"kills": options.kills, "equal runs": options.runs}
    needs |= {f"kills in {phase}": options.kills // one_in for phase, one_in in RARE.items()}
    needs = {what: least for what, least in needs.items() if least}
    variant = Path(options.recipe).stem
    with (
        Gate("exact_resume", options, needs=needs, rows=(1, 16), variant=variant) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        attempts = Attempts(gate, options, Path(scratch))
        attempts.untouched()
        chains = [Chain(attempts, number) for number in range(options.chains)]
        for chain in chains:
            chain.start()
        for chain in chains:
            chain.join()
        gate.figure("runs that differ", attempts.different, at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
