"""A run has less memory than it needs, or a replay is larger than the disk: one sentence says so.

The address space of a resume is limited to some more than it begins with. The last good checkpoint
is kept, and without the limit the run ends with the bits of one that never had it. A run whose
replay cannot fit the disk is refused before its folder is made.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from etude.planning.memory import free_space
from etude.runs import checkpoint
from faults.refused_allocations import HUNG, bits_of, forks, paused

ROW = 38
UNIT = "memory or disk limits"
FULL, IN_CI = 20, 2
SECONDS = 300.0


def replay_larger_than_the_disk(folder: Path) -> None:
    capacity = min(free_space(folder) // 10, 1 << 50)  # records of more than 10 bytes
    done = forks().run(
        "etude.cli.main:main",
        [
            *("train", "sac", "--env.id", "Pendulum-v1", "--folder", str(folder / "large")),
            *("--algorithm.capacity", str(capacity), "--clock.total-timesteps", str(capacity)),
            *("--clock.iterations", "1000000", "--checkpoint.every", "1000 iterations"),
        ],
        seconds=HUNG,
    )
    assert done.code == 2, done
    assert "replay" in done.err, done
    assert "of free space" in done.err, done
    assert done.err.count("\n") == 1, done
    assert not (folder / "large").exists()


def little_memory(kind: str, memory: int, folder: Path) -> None:
    run = folder / "run"
    shutil.copytree(paused(kind), run, symlinks=True)
    before = checkpoint.steps(run / "checkpoints")
    done = forks().run("etude.cli.main:main", ["resume", str(run)], seconds=HUNG, memory=memory)
    told = f"{memory >> 10:,} KiB more for a resume of {kind}: {done.code}, {done.err[-3000:]}"
    # Where not even a thread's own data fit, the C library ends the process, and says so.
    ended = done.code == 127 and "annot allocate memory" in done.err
    assert ended or done.code in (0, 1, 2), told
    assert "Traceback" not in done.err, told
    assert (done.code == 0) == ("memory" not in done.err), told
    newest = checkpoint.newest_verified(run / "checkpoints", repair=False)
    assert newest is not None, told
    assert checkpoint.step_of(newest) >= max(before), told
    went_on = forks().run("faults.refused_allocations:finish", str(run))
    assert went_on.code == 0, told + went_on.err
    assert json.loads(went_on.out.splitlines()[-1]) == bits_of(kind), told


def case(number: int, seed: int, folder: Path) -> None:
    if number % 5 == 1:
        replay_larger_than_the_disk(folder)
        return
    stream = random.Random(f"{seed}-{number}")
    little_memory(stream.choice(("ppo", "sac")), int(2 ** stream.uniform(16, 27)), folder)
