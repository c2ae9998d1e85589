"""Damage datasets; the reading process must survive, and each refusal must name the file.

    python -m gates.faults.damaged_data --cases 5000

Writes a robomimic and a Minari file, damages copies (cut, bits flipped, zero blocks, structure
overwritten) and reads each in full through its subprocess. Every case must end in the data or in
one sentence that begins with the file, within seconds. Bits flipped inside unprotected numbers
cannot be noticed and count as read; a truncated file must be refused. The message names the episode
if the reader had reached one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from damage import WAYS, damage
from etude.core.limited import Limits
from etude.data.formats.base import DataError
from etude.data.formats.opening import open_dataset
from gates.lib.report import Gate, parse

LIMITS = Limits(memory=1 << 30, seconds=10.0)
PATIENCE = 30.0


def write_demos(path: Path) -> bytes:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        task = '{"language_instruction": "put the bowl on the plate"}'
        file.create_group("data").attrs["problem_info"] = task
        for number, steps in enumerate((5, 12, 3, 8)):
            demo = file.create_group(f"data/demo_{number}")
            image = rng.integers(0, 256, (steps, 8, 8, 3), np.uint8)
            demo["actions"], demo["states"] = rng.normal(size=(2, steps, 7))
            demo.create_dataset("obs/image", data=image, compression="gzip", fletcher32=True)
            demo["obs/joints"] = rng.normal(size=(steps, 7))
            demo["rewards"] = demo["dones"] = np.eye(steps)[-1]
    return path.read_bytes()


def write_minari(path: Path) -> bytes:
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        for number, steps in enumerate((4, 6, 9)):
            episode = file.create_group(f"episode_{number}")
            episode["observations/hand"] = rng.normal(size=(steps + 1, 3))
            episode["actions"], episode["rewards"] = rng.normal(size=(steps, 2)), np.ones(steps)
            episode["terminations"] = episode["truncations"] = np.eye(steps, dtype=bool)[-1]
    return path.read_bytes()


class Trial:
    """Damaged files and the outcomes of reading them."""

    def __init__(self, gate: Gate, folder: Path, seed: int) -> None:
        self.gate, self.folder, self.seed = gate, folder, seed
        self.sources = (write_demos(folder / "demos"), write_minari(folder / "minari"))
        self.tried: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.named = 0
        self.crashes = 0
        self.slowest = 0.0

    def case(self, number: int) -> None:
        way, chance = WAYS[number % len(WAYS)], random.Random(f"{self.seed}-{number}")
        path = self.folder / f"case-{number}.hdf5"
        path.write_bytes(damage(self.sources[number // len(WAYS) % 2], way, chance))
        start = time.monotonic()
        outcome: DataError | str | None = None
        try:
            with open_dataset(path, "read", None, LIMITS) as dataset:
                for _ in dataset.episodes():
                    pass
        except DataError as error:
            outcome = error
        except Exception:
            outcome = traceback.format_exc()
        seconds = time.monotonic() - start
        path.unlink()
        with self.lock:
            self._judge(f"case {number}, {way}", way, str(path), outcome, seconds)

    def _judge(
        self, label: str, way: str, path: str, outcome: DataError | str | None, seconds: float
    ) -> None:
        self.tried[way] += 1
        self.gate.count("cases")
        self.slowest = max(self.slowest, seconds)
        if outcome is None and way == "cut":
            self.gate.fail(f"{label}: was read")
        elif isinstance(outcome, str):
            self.gate.fail(f"{label}: {outcome}")
        elif outcome is not None:
            self.refused[way] += 1
            self.gate.count("refused")
            self.named += outcome.episode is not None
            self.crashes += "crashed" in str(outcome)
            if not str(outcome).startswith(path) or "\n" in str(outcome):
                self.gate.fail(f"{label}: says {outcome}")
            if "exit code" in str(outcome):
                self.gate.fail(f"{label}: the reader gave no reason: {outcome}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parse(parser, {"cases": 40}, arguments)
    # Every truncated file must be refused.
    needs = {"cases": options.cases, "refused": max(options.cases // len(WAYS), 1)}
    with Gate("damaged_data", options, needs=needs, rows=(11,)) as gate:
        with tempfile.TemporaryDirectory() as scratch:
            trial = Trial(gate, Path(scratch), options.seed)
            with ThreadPoolExecutor(options.workers) as pool:
                list(pool.map(trial.case, range(options.cases)))
        for way in WAYS:
            print(f"{way:<10}{trial.tried[way]:>7,} cases {trial.refused[way]:>7,} refused")
        print(f"{trial.named:,} refusals name an episode, {trial.crashes} readers crashed")
        gate.figure("slowest answer in seconds", trial.slowest, at_most=PATIENCE)
        gate.figure("cases missed", len(gate.failures), at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
