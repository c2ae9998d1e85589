"""Kill a run again and again; the completed run must equal the untouched one, bit for bit.

    python gates/exact_resume.py --recipe reach|reward-only|recipe.yaml --kills 300

Runs the recipe's short preset (of reward-only, one that learns from pictures the gate records) in
child processes and ends them with SIGKILL: at random times
after the first iteration, in the middle of saves, and in the middle of evaluations. Every chain
of kills ends with a completed run, whose SHA-256 over weights, optimizer, normaliser, snapshots
and metrics.jsonl (but for `time/` and `system/`) is held against the untouched run's. Prints the
phases that were hit and exits 1 on any difference or on too few kills.
"""

from __future__ import annotations

import argparse
import mmap
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import etude
from etude.app.recipes import CATALOG, dump, find
from etude.core.clock import ClockConfig
from recordings import record
from results import fingerprint

PHASES = ("", "collect", "train", "test", "save")
ITERATIONS = 1  # byte of the phase file that counts collects, up to 255
AIMS = ("any", "save", "test")


def child(recipe_name: str, folder: Path, phase_file: Path) -> None:
    """Train or resume, writing the current phase where the parent can see it."""
    with phase_file.open("r+b") as stream:
        shared = mmap.mmap(stream.fileno(), 16)

        def on_phase(phase: str) -> None:
            shared[0] = PHASES.index(phase)
            if phase == "collect":
                shared[ITERATIONS] = min(shared[ITERATIONS] + 1, 255)

        if folder.exists():
            etude.resume(folder, on_phase=on_phase)
        else:
            etude.train(find(recipe_name), folder, on_phase=on_phase)


def from_pictures(scratch: Path) -> Path:
    """A recipe that learns a reward from pictures in a few seconds, and tests and saves often."""
    record(scratch / "data", episodes=24, image_size=32)
    full = find("reward-only")
    network = full.algorithm.rrd.network.model_copy(update={"reads": ("image", "proprio")})
    learned = {
        "dataset": str(scratch / "data"),
        "progress": "progress",
        "train_batches": 4,
        "rrd": full.algorithm.rrd.model_copy(update={"network": network, "rrd_sample_size": 8}),
    }
    changes = {
        "algorithm": full.algorithm.model_copy(update=learned),
        "clock": ClockConfig(epochs=4, cycles=4, iterations=2),
        "evaluation": full.evaluation.model_copy(update={"every": "2 cycles"}),
    }
    file = scratch / "recipe.yaml"
    file.write_text(dump(full.model_copy(update=changes)))
    return file


class Chain(threading.Thread):
    """Completed runs, one after the other, each with several kills on the way."""

    def __init__(self, gate: Gate, number: int) -> None:
        super().__init__(daemon=True)
        self.gate = gate
        self.number = number
        self.random = random.Random(f"{gate.options.seed}-{number}")

    def run(self) -> None:
        while self.gate.wants_more():
            folder = self.gate.scratch / f"chain{self.number}-{time.monotonic_ns()}"
            kills = 0
            while kills < self.gate.options.kills_per_run and self._attempt(folder):
                kills += 1
            while not (folder / "summary.json").exists():
                self._attempt(folder, kill=False)
            self.gate.completed(folder, kills)
            shutil.rmtree(folder)

    def _attempt(self, folder: Path, kill: bool = True) -> bool:
        """Start or resume the run; True if it was killed before its end."""
        phase_file = self.gate.scratch / f"phase{self.number}"
        phase_file.write_bytes(bytes(16))
        arguments = [sys.executable, __file__, "--child", str(folder), str(phase_file)]
        process = subprocess.Popen(
            [*arguments, "--recipe", self.gate.recipe], stdout=subprocess.DEVNULL
        )
        with phase_file.open("r+b") as stream, mmap.mmap(stream.fileno(), 16) as shared:
            if kill:
                self._wait(process, shared)
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
            code = process.wait()
            phase = PHASES[shared[0]]
        if code == -signal.SIGKILL:
            self.gate.hits[phase or "between"] += 1
            return True
        if code != 0:
            self.gate.failures.append(f"{folder.name} ended with exit code {code}")
        return False

    def _wait(self, process: subprocess.Popen[bytes], shared: mmap.mmap) -> None:
        """Until it is time to kill: after the first iteration, at random or inside a phase."""
        while process.poll() is None and shared[ITERATIONS] < 2:
            time.sleep(0.001)
        aim = self.random.choice(AIMS)
        delay = self.random.uniform(0.0, 0.5 if aim == "any" else 0.15)
        time.sleep(delay)
        if aim == "any":
            return
        wanted, patience = PHASES.index(aim), time.monotonic() + 3.0
        while process.poll() is None and shared[0] != wanted and time.monotonic() < patience:
            time.sleep(0.0002)
        time.sleep(self.random.uniform(0.0, 0.008 if aim == "save" else 0.05))


class Gate:
    """What all chains share."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        short = f"{options.recipe}-short"
        self.recipe = short if short in CATALOG else options.recipe
        if options.recipe == "reward-only":
            self.recipe = str(from_pictures(scratch))
        self.hits: Counter[str] = Counter()
        self.failures: list[str] = []
        self.runs = 0
        self.reference = ""
        self._lock = threading.Lock()

    def wants_more(self) -> bool:
        rare = min(self.hits["save"], self.hits["test"]) < self.options.kills // 10
        return self.hits.total() < self.options.kills or self.runs < self.options.runs or rare

    def completed(self, folder: Path, kills: int) -> None:
        result = fingerprint(folder)
        with self._lock:
            self.runs += 1
            if result != self.reference:
                self.failures.append(f"run {self.runs} after {kills} kills: {result}")
            print(
                f"run {self.runs:3d}  {kills:2d} kills  {self.hits.total():4d} in all  "
                f"{'equal' if result == self.reference else 'DIFFERENT'}",
                flush=True,
            )

    def judge(self) -> int:
        start = time.monotonic()
        folder = self.scratch / "untouched"
        phase_file = self.scratch / "phase"
        phase_file.write_bytes(bytes(16))
        child(self.recipe, folder, phase_file)
        self.reference = fingerprint(folder)
        print(f"untouched {self.recipe}: {self.reference}", flush=True)
        chains = [Chain(self, number) for number in range(self.options.chains)]
        for chain in chains:
            chain.start()
        for chain in chains:
            chain.join()
        phases = ", ".join(f"{name} {count}" for name, count in sorted(self.hits.items()))
        print(f"phases hit: {phases}; {time.monotonic() - start:.0f} s")
        for failure in self.failures:
            print(f"FAILED: {failure}")
        verdict = "FAILED" if self.failures else "all equal"
        print(f"exact_resume {self.hits.total()} kills, {self.runs} completed runs: {verdict}")
        return 1 if self.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument(
        "--runs", type=int, help="completed runs at least; default a tenth of kills"
    )
    parser.add_argument("--chains", type=int, default=2, help="runs that are tormented at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.recipe, *options.child)
        return 0
    options.runs = options.runs or max(1, options.kills // 10)
    with tempfile.TemporaryDirectory() as scratch:
        return Gate(options, Path(scratch)).judge()


if __name__ == "__main__":
    sys.exit(main())
