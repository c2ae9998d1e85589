"""Damage checkpoints; each must be refused, and a resume must use the one before.

    python -m gates.faults.torn_checkpoints --cases 10000

Trains a short run that keeps three checkpoints, then damages copies of the newest: truncated, a
bit flipped, a block of zeros, a file missing, a file swapped with that of another save. For each,
loading must refuse, and a resume must set the damaged ones aside and find the newest
whole one, bit for bit, within seconds. Some cases are also resumed to their end, which must equal
that of the untouched run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import etude
from etude.core.trees import digest
from etude.planning import recipes
from etude.runs import checkpoint, files
from gates.lib.report import Gate, parse

PATIENCE = 10.0
FILES = [
    f"{part}/{name}"
    for part, document in checkpoint.DOCUMENTS.items()
    for name in (checkpoint.ARRAYS, document, checkpoint.MANIFEST)
]


class NoFlush(files.Disk):
    """A disk without flushes: ten thousand real ones would only test the disk."""

    def fsync(self, fd: int) -> None:
        """Do nothing."""


def truncated(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def zeroed(data: bytes, chance: random.Random) -> bytes:
    """Zero 512 or 4,096 bytes that are not all zero."""
    full = [i for i in range(0, len(data), 512) if data[i : i + 512].strip(b"\0")]
    start = chance.choice(full)
    length = min(512 * chance.choice((1, 8)), len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": truncated,
    "bit flipped": flipped,
    "zero block": zeroed,
}
KINDS = (*DAMAGES, "file missing", "files swapped")


def replace(path: Path, data: bytes) -> None:
    """Write a new file, so that hard links of the old one stay whole."""
    path.unlink()
    path.write_bytes(data)


def damage(folder: Path, kind: str, chance: random.Random) -> tuple[str, int]:
    """Damage the newest checkpoint of a folder; return (file, step that should be found)."""
    newest, *older = sorted((p for p in folder.iterdir() if not p.is_symlink()), reverse=True)
    name = chance.choice(FILES)
    victim, fallback = newest / name, older[0]
    if kind == "file missing":
        victim.unlink()
    elif kind == "files swapped":
        other = chance.choice(older)
        # A swap of equal files changes nothing.
        different = [n for n in FILES if (newest / n).read_bytes() != (other / n).read_bytes()]
        name = chance.choice(different)
        one, two = (newest / name).read_bytes(), (other / name).read_bytes()
        replace(newest / name, two)
        replace(other / name, one)
        fallback = next(path for path in older if path != other)
    else:
        replace(victim, DAMAGES[kind](victim.read_bytes(), chance))
    return name, checkpoint.step_of(fallback)


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_symlink():
            (target / path.name).symlink_to(os.readlink(path))
        elif path.is_dir():
            link_tree(path, target / path.name)
        else:
            os.link(path, target / path.name)


def bits(path: Path) -> str:
    arrays, contract, training = checkpoint.load_training(path)
    return digest({"arrays": arrays, "contract": contract, "training": training})


@dataclass
class Trial:
    """Damaged checkpoints and the outcomes."""

    gate: Gate
    run: Path
    seed: int
    tried: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    recovered: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    whole: dict[int, str] = field(default_factory=dict)

    def case(self, number: int, folder: Path) -> None:
        kind = KINDS[number % len(KINDS)]
        chance = random.Random(f"{self.seed}-{number}")
        link_tree(self.run / "checkpoints", folder)
        name, fallback = damage(folder, kind, chance)
        label = f"case {number}, {kind}, {name}"
        self.tried[kind] += 1
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            self._judge(folder, kind, label, fallback)
        except TimeoutError:
            self.gate.fail(f"{label}: no answer within {PATIENCE:g} s")
        except Exception:
            self.gate.fail(f"{label}: {traceback.format_exc()}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self.slowest = max(self.slowest, time.monotonic() - start)
        shutil.rmtree(folder)

    def _judge(self, folder: Path, kind: str, label: str, fallback: int) -> None:
        newest = folder / checkpoint.step_name(max(self.whole))
        try:
            checkpoint.load_training(newest)
            self.gate.fail(f"{label}: was loaded")
        except checkpoint.DamagedCheckpoint as error:
            if newest not in (error.path, *error.path.parents):
                self.gate.fail(f"{label}: blames {error.path}")
            self.found[kind] += 1
        said: list[str] = []
        path = checkpoint.newest_verified(folder, said.append)
        if path is None or checkpoint.step_of(path) != fallback:
            self.gate.fail(f"{label}: found {path} instead of step {fallback}")
        elif bits(path) != self.whole[fallback]:
            self.gate.fail(f"{label}: step {fallback} differs from the saved one")
        elif not said or newest.exists() or os.readlink(folder / "latest") != path.name:
            self.gate.fail(f"{label}: was not set aside, or not reported")
        else:
            self.recovered[kind] += 1
            self.gate.count("noticed and fell back")

    def resume(self, number: int, folder: Path) -> None:
        """Resume a run with a torn newest checkpoint; it must end like the untouched one."""
        kind = KINDS[number % len(KINDS)]
        shutil.copytree(self.run, folder, symlinks=True)
        damage(folder / "checkpoints", kind, random.Random(f"{self.seed}-resume-{number}"))
        said: list[str] = []
        equal = (
            etude.resume(folder, say=said.append).fingerprint() == etude.Run(self.run).fingerprint()
        )
        if equal and any("Damaged checkpoint" in text for text in said):
            self.gate.count("resumes equal")
        else:
            self.gate.fail(f"resume {number}, {kind}: {'not said' if equal else 'DIFFERENT'}")
        shutil.rmtree(folder)


def train(path: Path) -> None:
    """Train for seconds: four checkpoints, of which three are kept."""
    base = recipes.reach_short().model_dump(mode="json")
    base["collector"] |= {"num_envs": 32, "envs_per_group": 8}
    base["algorithm"] |= {"rollout_steps": 8, "minibatch_size": 64, "update_epochs": 1}
    base["clock"] |= {"total_timesteps": 8 * 256, "iterations": 2, "cycles": 1}
    base["evaluation"] |= {"every": "never", "episodes": 8, "num_envs": 8, "envs_per_group": 8}
    etude.train(recipes.validated(base, "the gate"), path)


def on_alarm(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--resumes", type=int, default=25, help="cases resumed to the run's end")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, {"cases": 50, "resumes": 1}, arguments)
    needs = {"noticed and fell back": options.cases, "resumes equal": options.resumes}
    with Gate("torn_checkpoints", options, needs=needs, rows=(3,)) as gate:
        signal.signal(signal.SIGALRM, on_alarm)
        with tempfile.TemporaryDirectory() as scratch, files.using(NoFlush()):
            trial = Trial(gate, Path(scratch) / "run", options.seed)
            train(trial.run)
            for path in sorted((trial.run / "checkpoints").iterdir()):
                if not path.is_symlink():
                    trial.whole[checkpoint.step_of(path)] = bits(path)
            for number in range(options.cases):
                trial.case(number, Path(scratch) / "case")
            for number in range(options.resumes):
                trial.resume(number, Path(scratch) / "resumed")
        for kind in KINDS:
            print(
                f"{kind:<14}{trial.tried[kind]:>7,} cases {trial.found[kind]:>7,} noticed "
                f"{trial.recovered[kind]:>7,} fell back"
            )
        gate.figure("slowest answer in seconds", trial.slowest, at_most=PATIENCE)
        gate.figure("cases missed", len(gate.failures), at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
