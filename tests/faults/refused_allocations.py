"""One allocation of a save or of a resume is refused: no checkpoint is bad or lost for it.

A library in C stands before malloc, mmap and their like and refuses the n-th call between two
marks; Python allocates through malloc as well, so that every object counts. Whatever the process
then says or dies of, the newest checkpoint must be whole, none may be taken for damaged, and a
resume must end with the bits of a run that nothing happened to.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import short_recipes
from etude.api import Run, create, resume, train
from etude.core.errors import EtudeError
from etude.planning.recipes import Recipe
from etude.planning.resolve import resolve
from etude.runs import checkpoint
from etude.training.saving import Saver
from forks import Forks
from toys import changed, tiny_reach

ROW = 39
UNIT = "refused allocations"
FULL, IN_CI = 1_000, 2
SECONDS = 300.0
WHERE = {"save": "save_if_due", "resume": "restore"}
HUNG = 120.0


def recipe_of(kind: str) -> Recipe:
    """A run of 4 iterations, each of them saved."""
    if kind == "ppo":
        every: dict[str, Any] = {"clock": {"total_timesteps": 4 * 256, "iterations": 1}}
        return tiny_reach(4, **every, checkpoint={"every": "1 iteration"})
    found = short_recipes.find("episodic-short")
    steps = found.collector.num_envs * found.algorithm.model_dump()["rollout_steps"]
    return changed(
        found,
        algorithm={"warmup_steps": 0, "train_batches": 2},
        clock={"total_timesteps": 4 * steps, "iterations": 1, "cycles": 1},
        checkpoint={"every": "1 iteration"},
        evaluation={"every": "never", "episodes": 2, "num_envs": 2, "envs_per_group": 2},
    )


def prepare(folder: str) -> None:
    """In a process of its own: runs that are whole and runs that have paused, of both kinds."""
    for kind in ("ppo", "sac"):
        place, recipe = Path(folder), recipe_of(kind)
        prints = train(recipe, place / f"{kind}-whole").fingerprint()
        (place / f"{kind}.json").write_text(json.dumps(prints))
        create(resolve(recipe), place / kind)
        resume(place / kind, pause_after=2)


def attempt(run: str, where: str, nth: int) -> int:
    """In a process of its own: another iteration, where the n-th allocation is refused."""
    library, name = ctypes.CDLL(os.environ["LD_PRELOAD"]), WHERE[where]
    library.counted.restype = ctypes.c_long
    usual: Callable[..., Any] = getattr(Saver, name)
    refuse, counted = library.refuse, library.counted
    total = 0

    def marked(self: Saver, *arguments: Any, **options: Any) -> Any:
        nonlocal total
        refuse(ctypes.c_long(nth))
        try:
            return usual(self, *arguments, **options)
        finally:
            total = counted()

    setattr(Saver, name, marked)
    try:
        resume(run, pause_after=3)
    except EtudeError as error:
        print(error)
        return error.exit_code
    print(total)
    return 0


def finish(run: str) -> None:
    """In a process of its own: the rest of a run, and its fingerprint."""
    print(json.dumps(resume(run).fingerprint()))


@cache
def _library() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to refuse allocations with")
    source = Path(__file__).parents[1] / "lib" / "refusing.c"
    made = _folder() / "refusing.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", made, source], check=True)
    return str(made)


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def forks() -> Forks:
    """A process to fork, with runs prepared."""
    started = Forks({**os.environ, "LD_PRELOAD": _library(), "PYTHONMALLOC": "malloc"})
    atexit.register(started.close)
    done = started.run("faults.refused_allocations:prepare", str(_folder()))
    assert done.code == 0, done.err
    return started


def paused(kind: str) -> Path:
    """A run of which two of four iterations are done; only to be copied."""
    forks()
    return _folder() / kind


def bits_of(kind: str) -> dict[str, str]:
    """The fingerprint of the whole run."""
    found: dict[str, str] = json.loads((_folder() / f"{kind}.json").read_text())
    return found


@cache
def _allocations(kind: str, where: str) -> int:
    """How many there are."""
    run = _folder() / f"{kind}-{where}"
    shutil.copytree(paused(kind), run, symlinks=True)
    done = forks().run("faults.refused_allocations:attempt", str(run), where, 0)
    assert done.code == 0, done.err
    return int(done.out.splitlines()[-1])


def case(number: int, seed: int, folder: Path) -> None:
    stream = random.Random(f"{seed}-{number}")
    where, kind = ("save", "resume")[number % 2], ("ppo", "sac")[(number + 1) // 2 % 2]
    nth = stream.randint(1, _allocations(kind, where))
    run = folder / "run"
    shutil.copytree(paused(kind), run, symlinks=True)
    before = checkpoint.steps(run / "checkpoints")
    done = forks().run("faults.refused_allocations:attempt", str(run), where, nth, seconds=HUNG)
    told = f"allocation {nth:,} of a {where} of {kind}: {done.code}, {done.out}{done.err[-2000:]}"
    assert done.code != -14, f"hung: {told}"
    newest = checkpoint.newest_verified(run / "checkpoints", repair=False)
    assert newest is not None, told
    assert checkpoint.step_of(newest) >= max(before), told
    aside = [path.name for path in (run / "checkpoints").iterdir() if "." in path.name.lstrip(".")]
    assert not aside, f"{aside}: {told}"
    ended = forks().run("faults.refused_allocations:finish", str(run))
    assert ended.code == 0, told + ended.err
    assert json.loads(ended.out.splitlines()[-1]) == bits_of(kind), told
    assert Run(run).summary(), told
