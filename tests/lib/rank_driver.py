"""Runs on several ranks, some of which are killed: a process that forks every rank of an attempt.

    python rank_driver.py RECIPE.yaml FOLDER KILLS SEED

Trains the recipe untouched in one process and on 2 and 4 ranks, and once more while SIGKILL ends
one rank of an attempt after the other; every attempt has another number of ranks. The libraries
are loaded once, before the first fork. Prints one JSON document: {"hits": what was killed,
"runs": folders}.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import etude
from etude.core.errors import EtudeError
from etude.planning import recipes

PATIENCE = 120.0
"""Seconds after which ranks that are left alone must have ended, on a busy machine."""


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def fork_ranks(size: int, work: Callable[[int], None]) -> list[int]:
    """Process ids of `size` ranks that do some work, with the variables torchrun would set."""
    port, children = free_port(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {**where, "RANK": str(rank), "WORLD_SIZE": str(size)}
            code = 1
            try:
                work(rank)
                code = 0
            except EtudeError as error:
                print(f"rank {rank}: {error}", file=sys.stderr)
                code = error.exit_code
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def wait(children: list[int], patience: float = PATIENCE) -> list[int]:
    """Exit codes, as `os.waitstatus_to_exitcode` has them; whoever does not end is ended."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + patience
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
            sys.exit(f"ranks still there after {patience:.0f} s: {codes}")
        time.sleep(0.01)
    return [codes[child] for child in children]


def attempt(
    recipe: Path, folder: Path, size: int, prepare: Callable[[int], None] = lambda rank: None
) -> tuple[list[int], int]:
    """Ranks that train or resume, and a pipe that the first one's phases come through.

    `prepare` is called in each of them first.
    """
    read, write = os.pipe()

    def work(rank: int) -> None:
        os.close(read)
        prepare(rank)

        def on_phase(phase: str) -> None:
            os.write(write, (phase or "between").encode() + b"\n")

        if folder.exists():
            etude.resume(folder, on_phase=on_phase)
        else:
            etude.train(recipes.load(recipe, trust=True), folder, on_phase=on_phase)

    children = fork_ranks(size, work)
    os.close(write)
    return children, read


def finish(recipe: Path, folder: Path, size: int) -> None:
    children, read = attempt(recipe, folder, size)
    while os.read(read, 4096):
        pass
    os.close(read)
    codes = wait(children)
    if any(codes):
        sys.exit(f"{folder} ended with {codes}")


def kill_once(
    recipe: Path, folder: Path, size: int, chance: random.Random
) -> dict[str, Any] | None:
    """Start or resume, kill one rank somewhere; None if all had finished."""
    children, read = attempt(recipe, folder, size)
    wanted, seen, last = chance.randint(4, 16), 0, ""
    while seen < wanted and (text := os.read(read, 64).decode()):
        names = text.split()
        seen, last = seen + len(names), names[-1]
    time.sleep(chance.uniform(0.0, 0.03))
    victim = chance.randrange(size)
    with contextlib.suppress(ProcessLookupError):
        os.kill(children[victim], signal.SIGKILL)
    start = time.monotonic()
    os.close(read)
    codes = wait(children)
    if codes[victim] != -signal.SIGKILL:
        if any(codes):
            sys.exit(f"{folder} ended with {codes}")
        return None
    hit = {"ranks": size, "rank": victim, "phase": last, "codes": codes}
    return hit | {"seconds": time.monotonic() - start}


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    recipe, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    chance, hits, runs = random.Random(seed), [], []
    for size in (1, 2, 4):
        runs.append(folder / f"ranks-{size}")
        finish(recipe, runs[-1], size)
    while len(hits) < kills:
        runs.append(folder / f"killed-{len(runs)}")
        size = 2 if len(hits) % 2 else 4
        while len(hits) < kills and (hit := kill_once(recipe, runs[-1], size, chance)) is not None:
            hits.append(hit)
            size = 6 - size
        finish(recipe, runs[-1], (1, 2, 4)[len(runs) % 3])
    print(json.dumps({"hits": hits, "runs": [str(run) for run in runs]}))


if __name__ == "__main__":
    main()
