"""Faults at the level of a whole run: torn checkpoints, failing disks, signals, open sockets."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.api import Interrupted, Run, resume, train
from etude.core.contracts import Fragment
from etude.core.errors import EtudeError
from etude.runs import checkpoint, files
from etude.training.loop import Callback, Context
from toys import tiny_bc, tiny_reach

ROOT = Path(__file__).parents[1]
PATIENCE = 10.0
RECIPE = tiny_reach(8, evaluation={"every": "never"})
"""Checkpoints after steps 512, 1024, 1536 and 2048; the last three are kept."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "untouched"
    train(RECIPE, path)
    return path


def newest(run: Path) -> int | None:
    """The step of the newest checkpoint whose every byte is as it was saved."""
    path = checkpoint.newest_verified(run / "checkpoints", lambda text: None, repair=False)
    return None if path is None else checkpoint.step_of(path)


# Row 3: torn checkpoints.


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def zero(data: bytes) -> bytes:
    return bytes(min(512, len(data))) + data[512:]


@pytest.mark.rotated
@pytest.mark.parametrize("way", [cut, flip, zero, None, "swap"])
def test_a_run_with_a_torn_checkpoint_ends_as_if_untouched(
    way: Callable[[bytes], bytes] | str | None, untouched: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    name = Path("training") / "arrays.safetensors"
    last, before = (run / "checkpoints" / f"{step:012d}" / name for step in (2048, 1536))
    if way is None:
        last.unlink()
    elif callable(way):
        last.write_bytes(way(last.read_bytes()))
    else:
        one, two = last.read_bytes(), before.read_bytes()
        last.write_bytes(two)
        before.write_bytes(one)
    said: list[str] = []
    resume(run, say=said.append)
    damaged = [text for text in said if text.startswith("Damaged checkpoint")]
    assert str(last if way is not None else last.parent) in damaged[0]
    assert len(damaged) == (2 if way == "swap" else 1)
    assert any(f"at step {1024 if way == 'swap' else 1536:,}" in text for text in said)
    assert Run(run).fingerprint() == Run(untouched).fingerprint()
    assert Run(run).summary() == Run(untouched).summary()


@pytest.mark.rotated
def test_torn_checkpoints_of_a_real_run(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "gates.faults.torn_checkpoints", "--cases=100", "--resumes=1"]
    command += [f"--json={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(file.read_text())["counts"]
    assert counts == {"noticed and fell back": 100, "resumes equal": 1}


# Row 4: the disk fails, or a signal comes, in the middle of a save.


class Saving(files.Disk):
    """Calls `act` at one kind of system call, from the second checkpoint's save on."""

    def __init__(self, call: str, act: Callable[[], None], lasting: bool = True) -> None:
        self.saves = 0
        self.acted = 0
        original = getattr(self, call)

        def wrapped(*arguments: Any) -> Any:
            if self.saves >= 2 and (lasting or not self.acted):
                self.acted += 1
                act()
            return original(*arguments)

        setattr(self, call, wrapped)
        count = self.mkdir

        def mkdir(path: Path) -> None:
            # The temporary folder of a checkpoint: a save begins.
            self.saves += path.parent.name == "checkpoints"
            count(path)

        self.mkdir = mkdir  # type: ignore[method-assign]


FAULTS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EIO: "the disk reported an I/O error; check the disk",
    errno.EROFS: "it is on a read-only file system; choose a folder that can be written",
    errno.EACCES: "it is not writable; check its owner and permissions",
}


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("code", "call"),
    [(code, "write") for code in FAULTS]
    + [(errno.EROFS, call) for call in ("mkdir", "open", "rename")]
    + [(errno.EIO, call) for call in ("fsync", "rename", "symlink")],
)
def test_a_disk_that_fails_in_a_save(code: int, call: str, untouched: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    run, disk, start = tmp_path / "run", Saving(call, fail), time.monotonic()
    with files.using(disk), pytest.raises(files.DiskFault) as caught:
        train(RECIPE, run)
    assert time.monotonic() - start < PATIENCE
    assert disk.acted
    assert FAULTS[code] in str(caught.value)
    assert "The checkpoint of step 1024 was not saved; those before it" in str(caught.value)
    assert newest(run) == (1024 if call == "symlink" else 512)  # its own link was all that failed
    if code == errno.ENOSPC:  # space again: the run goes on, and nothing shows that it was stopped
        resume(run)
        assert Run(run).fingerprint() == Run(untouched).fingerprint()


@pytest.mark.rotated
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "symlink"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_save(
    call: str, number: int, untouched: Path, tmp_path: Path
) -> None:
    def strike() -> None:
        os.kill(os.getpid(), number)

    run, disk, start = tmp_path / "run", Saving(call, strike, lasting=False), time.monotonic()
    with files.using(disk), pytest.raises(Interrupted) as caught:
        train(RECIPE, run)
    assert time.monotonic() - start < PATIENCE
    assert disk.acted == 1
    assert caught.value.exit_code == 75
    assert f"etude resume {run}" in str(caught.value)
    assert newest(run) == 1024  # the save that was going on was finished first
    resume(run)
    assert Run(run).fingerprint() == Run(untouched).fingerprint()


STUCK = """
import sys, time
from pathlib import Path
from etude.cli import main as cli
from etude.runs import files

class Stuck(files.Disk):
    saves = 0

    def mkdir(self, path):
        self.saves += path.parent.name == "checkpoints"
        super().mkdir(path)

    def fsync(self, fd):
        if self.saves >= 2:
            print("stuck", flush=True)
            time.sleep(600)

with files.using(Stuck()):
    sys.exit(cli.main(["train", sys.argv[1], "--folder", sys.argv[2]]))
"""


@pytest.mark.rotated
def test_a_signal_while_the_disk_hangs(untouched: Path, tmp_path: Path) -> None:
    """A save that never ends: SIGTERM ends the process all the same, within seconds."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(untouched / "recipe.yaml"), str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "stuck" not in (line := process.stdout.readline()):
        assert line or process.poll() is None, process.communicate()
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < PATIENCE
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped without saving" in err
    assert "Traceback" not in err
    assert newest(run) == 512
    resume(run)
    assert Run(run).fingerprint() == Run(untouched).fingerprint()


# Row 14: nothing listens.


def listening(pid: int) -> list[str]:
    """Sockets of a process that others could connect or send to, as lines of /proc/net."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(fd)
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = []
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            columns = line.split()
            if columns[3] == state and columns[9] in inodes:
                found.append(f"{table} {columns[1]}")
    return found


def test_the_search_for_sockets_finds_one() -> None:
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        assert len(listening(process.pid)) == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.rotated
def test_nothing_listens_while_training(untouched: Path, tmp_path: Path) -> None:
    run, looks = tmp_path / "run", 0
    options = [
        "--clock.total-timesteps=4096",
        "--evaluation.final-episodes=8",
        "--folder",
        str(run),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "etude", "train", str(untouched / "recipe.yaml"), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        while process.poll() is None:
            try:
                assert listening(process.pid) == []
            except (FileNotFoundError, ProcessLookupError):
                break  # it ended while we looked
            looks += (run / "metrics.jsonl").exists()
            time.sleep(0.02)
    finally:
        process.kill()
        _, err = process.communicate()
    assert looks >= 5, err
    assert (run / "summary.json").exists(), err


# Row 29: data changed while a run learns from it.


def test_the_best_policy_is_not_saved_from_changed_data(tmp_path: Path) -> None:
    """Between two checkpoints the best policy is saved alone."""
    recipe = tiny_bc(tmp_path, "mlp", 4, 1, "1 epoch").replace(checkpoint__every="9 epochs")
    shard = tmp_path / "data" / "steps-000000000000.bin"

    class Change(Callback):
        def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
            if context.clock.now.iterations == 3:
                shard.write_bytes(shard.read_bytes()[::-1])

    with pytest.raises(EtudeError, match=f"{shard} was changed while it was in use"):
        train(recipe, tmp_path / "run", callbacks=[Change()])
    found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert found == ["000000000008", "000000000016", "best"]
