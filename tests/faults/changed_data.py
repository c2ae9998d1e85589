"""Data changed while a run learns from it: noticed before the next save, named, and put back.

A run learns from a dataset, from a dataset of linked files, or from its own replay. Before one of
its saves a file that is in use is changed; before all others it is linked and unlinked, as copying,
merging and deleting datasets do, which must not end the run. Then the good bytes are put back, and
a resume must end with the fingerprint of a run that nobody disturbed.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import etude
import short_recipes
from etude.core.contracts import Fragment
from etude.core.errors import EtudeError
from etude.data.editing import select, write
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import checkpoint
from etude.training.loop import Callback, Context
from toys import changed, tiny_bc, toy_dataset

ROW = 29
UNIT = "changes of data in training"
FULL, IN_CI = 500, 4
SECONDS = 120.0
ITERATIONS = 4

_MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as stream, mmap.mmap(stream.fileno(), 0) as pages:
    for line in sys.stdin:
        place, value = map(int, line.split())
        pages[place] = value
        print(flush=True)
"""


class Mapped:
    """Another process that has a file mapped, and writes to the map without flushing it."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-S", "-c", _MAP, str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def put(self, place: int, value: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{place} {value}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"

    def close(self) -> None:
        self._process.communicate()


def _put(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(data)


def _written(path: Path, place: int, data: bytes) -> None:
    _put(path, place, bytes([data[place] ^ 255]))


def _times_set_back(path: Path, place: int, data: bytes) -> None:
    before = path.stat()
    _written(path, place, data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _restored(path: Path, place: int, data: bytes) -> None:
    _written(path, place, data)
    _put(path, place, data[place : place + 1])


def _mapped(path: Path, place: int, data: bytes) -> None:
    other = Mapped(path)
    other.put(place, data[place] ^ 255)
    other.close()


def _cut(path: Path, place: int, data: bytes) -> None:
    os.truncate(path, place)


def _cut_and_grown(path: Path, place: int, data: bytes) -> None:
    os.truncate(path, place)
    os.truncate(path, len(data))


def _replaced(path: Path, place: int, data: bytes) -> None:
    beside = path.with_name(".beside")
    beside.write_bytes(data)
    _written(beside, place, data)
    beside.rename(path)


def _punched(path: Path, place: int, data: bytes) -> None:
    """A hole in a page of the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as stream:
        start = place // 4096 * 4096
        keep_size, punch_hole = 1, 2
        done = libc.fallocate(
            stream.fileno(), keep_size | punch_hole, ctypes.c_int64(start), ctypes.c_int64(4096)
        )
    assert done == 0, os.strerror(ctypes.get_errno())


def _deleted(path: Path, place: int, data: bytes) -> None:
    path.unlink()


WAYS: tuple[Callable[[Path, int, bytes], None], ...] = (
    _written,
    _mapped,
    _times_set_back,
    _restored,
    _replaced,
    _cut,
    _cut_and_grown,
    _punched,
    _deleted,
)


def _store(folder: Path) -> Recipe:
    return tiny_bc(folder, "mlp", ITERATIONS, 1, "never")


def _links(folder: Path) -> Recipe:
    """A dataset made of two others: its files are links to theirs."""
    both = [toy_dataset(folder / f"part-{seed}", 20, seed) for seed in range(2)]
    write(select(both), folder / "merged", "merged")
    levels = {"epochs": ITERATIONS, "cycles": 1, "iterations": 1}
    data = {"dataset": str(folder / "merged"), "train_batches": 4, "batch_size": 32}
    return changed(
        recipes.find("offline"),
        policy={"hidden": (32, 32)},
        algorithm=data,
        rewards={"rrd_batch_size": 32, "rrd_sample_size": 4},
        clock=levels,
        evaluation={"every": "never"},
    )


def _replay(folder: Path) -> Recipe:
    return changed(
        short_recipes.find("episodic-short"),
        collector={"num_envs": 8, "envs_per_group": 4, "threads": 1},
        algorithm={"train_batches": 2, "warmup_steps": 64, "capacity": 256},
        clock={"total_timesteps": ITERATIONS * 64, "iterations": 1},
        checkpoint={"every": "1 cycle"},
        evaluation={"every": "never", "episodes": 2, "num_envs": 2, "envs_per_group": 2},
    )


DATA = {"store": _store, "links": _links, "replay": _replay}


@cache
def undisturbed(name: str) -> dict[str, str]:
    """The fingerprint of a run that nobody disturbs."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        return etude.train(DATA[name](Path(folder)), Path(folder, "run")).fingerprint()


class Disturbance(Callback):
    """Changes a file before one save, and only links it before the others."""

    def __init__(self, name: str, way: Callable[[Path, int, bytes], None], seed: int) -> None:
        self._name, self._way, self._chance = name, way, random.Random(seed)
        self._at = self._chance.randrange(2, ITERATIONS)
        self._held: Mapped | None = None
        self.path: Path | None = None
        self.data = b""

    def files(self, context: Context) -> list[Path]:
        """The files that are in use and hold something that was learned from."""
        stores = getattr(context.algorithm, "stores", None) or [context.algorithm.training]
        logs = [log for s in stores for log in _logs(s)]
        return [log.path(b) for log in logs for b in sorted(log._stamps) if log.path(b).exists()]

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        files = self.files(context)
        now = context.clock.now.iterations
        if now != self._at:
            for path in files:
                beside = path.with_name(".linked")
                os.link(path, beside)
                beside.unlink()
        if now == self._at - 1 and self._way is _mapped and self._name != "replay":
            self.path = self._chance.choice([path for path in files if path.stat().st_size])
            self.data = self.path.read_bytes()
            self._held = Mapped(self.path)  # before its stamp is taken anew: its page is writable
        if now == self._at:
            self._strike(files, context)

    def _strike(self, files: list[Path], context: Context) -> None:
        used = {path: _used(path, context) for path in files}
        path = self.path or self._chance.choice([path for path in files if used[path]])
        self.path, self.data = path, path.read_bytes()
        place = self._chance.randrange(used[path])
        if self._way is _punched:  # a hole in zeros changes nothing
            place = next(i for i, byte in enumerate(self.data) if byte)
        if self._held is not None:
            self._held.put(place, self.data[place] ^ 255)
            self._held.close()
        else:
            self._way(path, place, self.data)

    def restore_text(self) -> None:
        assert self.path is not None
        with suppress(FileNotFoundError):
            if self.path.read_bytes() == self.data:
                return
        self.path.write_bytes(self.data)


def _logs(view: object) -> list:
    store = getattr(view, "_store", view)
    return [log for each in getattr(store, "shards", [store]) for log in each._logs.values()]


def _used(path: Path, context: Context) -> int:
    """Bytes of a file that hold records."""
    stores = getattr(context.algorithm, "stores", None) or [context.algorithm.training]
    for log in (log for s in stores for log in _logs(s)):
        for block in log._stamps:
            if log.path(block) == path:
                return log._recorded(block)[0]
    return 0


def _steps(run: Path) -> list[str]:
    return [path.name for path in checkpoint.resumable(run / "checkpoints")]


def case(number: int, seed: int, folder: Path) -> None:
    way = WAYS[number % len(WAYS)]
    name = list(DATA)[(number + number // len(WAYS)) % len(DATA)]
    if name == "replay" and way is _restored:
        way = _written  # a file that the run itself writes to is compared by its bytes alone
    disturbance = Disturbance(name, way, 1_000_003 * seed + number)
    run, said = folder / "run", ""
    try:
        etude.train(DATA[name](folder), run, callbacks=[disturbance])
    except EtudeError as error:
        said = str(error)
    path = disturbance.path
    assert path is not None
    assert said, f"{way.__name__} of {path.name} ({name}) went unnoticed"
    assert str(path) in said, f"{path} is not named in: {said}"
    left = _steps(run)
    assert len(left) == min(disturbance._at - 1, 3), f"{left} after iteration {disturbance._at}"
    checkpoint.verify((run / "checkpoints" / "latest").resolve())
    disturbance.restore_text()
    assert etude.resume(run).fingerprint() == undisturbed(name), "the resumed run differs"
