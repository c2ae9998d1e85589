"""Runs that are killed: a process that forks a child for every attempt and ends it by SIGKILL.

    python kill_driver.py RECIPE.yaml FOLDER KILLS SEED

The libraries are loaded once, before the first fork, so that an attempt costs only its work.
Prints one JSON document: {"hits": {phase: count}, "runs": folders of the completed runs}.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import etude
import etude.building.build
from etude.core.errors import EtudeError
from etude.planning import recipes

AIMS = ("collect", "train", "test", "save", "save", "any")


def attempt(recipe: Path, folder: Path, report: int) -> None:
    """The child: train or resume, and write every phase to a pipe."""

    def on_phase(phase: str) -> None:
        os.write(report, (phase or "between").encode() + b"\n")

    try:
        if folder.exists():
            etude.resume(folder, on_phase=on_phase)
        else:
            etude.train(recipes.load(recipe, trust=True), folder, on_phase=on_phase)
    except EtudeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def fork(recipe: Path, folder: Path) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        attempt(recipe, folder, write)
    os.close(write)
    return child, read


def phases(read: int) -> str:
    """What the child wrote since the last look; empty when it is gone."""
    return os.read(read, 4096).decode()


def kill_once(recipe: Path, folder: Path, chance: random.Random) -> str | None:
    """Start or resume, kill somewhere; the phase that was hit, None if it had finished."""
    child, read = fork(recipe, folder)
    aim, nth, seen, last = chance.choice(AIMS), chance.randint(1, 3), 0, ""
    while text := phases(read):
        names = text.split()
        last = names[-1]
        seen += sum(aim in ("any", name) for name in names)
        if seen >= nth:
            break
    time.sleep(chance.uniform(0.0, 0.004 if aim == "save" else 0.03))
    os.kill(child, signal.SIGKILL)
    os.set_blocking(read, False)
    with contextlib.suppress(BlockingIOError):
        last = (phases(read).split() or [last])[-1]
    os.close(read)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return last
    if os.WEXITSTATUS(status) != 0:
        sys.exit(f"{folder} ended with {os.WEXITSTATUS(status)}")
    return None


def finish(recipe: Path, folder: Path) -> None:
    """Let it run to its end."""
    child, read = fork(recipe, folder)
    while phases(read):
        pass
    os.close(read)
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(f"{folder} ended with status {status}")


def main() -> None:
    recipe, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    chance, hits, runs = random.Random(seed), Counter[str](), [folder / "untouched"]
    recipes.load(recipe, trust=True)  # with its kinds
    finish(recipe, runs[0])
    while hits.total() < kills:
        runs.append(folder / f"killed-{len(runs)}")
        while hits.total() < kills and (hit := kill_once(recipe, runs[-1], chance)) is not None:
            hits[hit] += 1
        finish(recipe, runs[-1])
    print(json.dumps({"hits": hits, "runs": [str(run) for run in runs]}))


if __name__ == "__main__":
    main()
