"""File systems that lack something: a run goes on with a note, or ends in a sentence, before its
first step. They are emulated below the process: by FUSE, by a filter of system calls (seccomp) for
locks, which FUSE never gets to see of folders, and by real mounts of tmpfs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.api import Run, resume, train
from etude.cli.doctor import _file_system
from etude.cli.main import main
from etude.core.contracts import BatchMetrics
from etude.core.errors import EtudeError, UsageError
from etude.data import editing
from etude.planning.loading import policy_path
from etude.runs import checkpoint, files
from etude.training.loop import Callback, Context
from recording_fs import recorded, why_not
from toys import tiny_reach, toy_dataset

ROW, UNIT = 33, "emulated file systems"
FULL, IN_CI, SECONDS = 9, 4, 60.0
OFTEN = {"checkpoint__every": "1 iteration", "evaluation__final_episodes": 0}


class Ear(Callback):
    """Hears what a run says, and knows what it had said before its first gradient step."""

    def __init__(self) -> None:
        self.said = list[str]()
        self.before: list[str] | None = None

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if self.before is None:
            self.before = [*self.said]


def goes_on(mount: Path, note: str) -> Run:
    """A run trains, stops, resumes, is pruned and read; `note` is said before its first step."""
    path = mount / "runs" / "one"
    for again in (False, True):
        ear = Ear()
        if again:
            resume(path, 1024, callbacks=[ear], say=ear.said.append)
        else:
            train(tiny_reach(3).replace(**OFTEN), path, callbacks=[ear], say=ear.said.append)
        assert ear.before is not None
        notes = [text for text in ear.before if str(mount) in text and " is on " in text]
        assert [note in text for text in notes] == [True] * bool(note), ear.before
    assert not list(mount.rglob(".tmp-*")), "what was tried is gone"
    folder = path / "checkpoints"
    assert checkpoint.marks(folder)["latest"] == checkpoint.step_name(1024)
    for name in ("latest", "best", "final"):
        assert checkpoint.step_of(folder / name) == checkpoint.policy_step(folder / name)
    assert checkpoint.step_of(policy_path(folder / "latest")) == 1024
    assert main(["fsck", str(path)]) == 0
    assert main(["prune", str(mount), "--yes"]) == 0
    assert [p.name for p in checkpoint.resumable(folder)] == [checkpoint.step_name(1024)]
    run = Run(path)
    assert run.policy("latest") is not None
    assert main(["fsck", str(path)]) == 0
    return run


def is_refused(mount: Path, words: str) -> None:
    """No run begins: one sentence, and nothing is left of it."""
    with pytest.raises((UsageError, files.DiskFault), match=words) as caught:
        train(tiny_reach(3).replace(**OFTEN), mount / "runs" / "one")
    assert "\n" not in str(caught.value)
    assert str(mount) in str(caught.value)
    assert not list(mount.iterdir())


def without_links(folder: Path) -> None:
    with recorded(folder / "fs", {"symlink": errno.EPERM}) as mount:
        run = goes_on(mount, "without symbolic links")
        latest = run.path / "checkpoints" / "latest"
        assert latest.read_text() == f"{checkpoint.step_name(1024)}\n"
        assert _file_system(mount).found == "fuse, without symbolic links"


def without_flushed_folders(folder: Path) -> None:
    with recorded(folder / "fs", {"fsyncdir": errno.EINVAL}) as mount:
        goes_on(mount, "cannot flush folders")
        assert _file_system(mount).found == "fuse, without flushed folders"


def without_locks(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "faults.file_systems", str(folder)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all held\n")


def read_only(folder: Path) -> None:
    with recorded(folder / "fs", {"read_only": errno.EROFS}) as mount:
        is_refused(mount, "it is on a read-only file system; choose a folder that can be written")


def without_hard_links(folder: Path) -> None:
    with recorded(folder / "fs", {"link": errno.EPERM}) as mount:
        goes_on(mount, "")
        assert _file_system(mount).means.endswith("need hard links")
        old = toy_dataset(mount / "old")
        before = sorted(mount.rglob("*"))
        with pytest.raises(UsageError, match="on a file system without hard links"):
            editing.write(editing.select([old]), mount / "new", "copied from")
        assert sorted(mount.rglob("*")) == before


def without_renamed_folders(folder: Path) -> None:
    with recorded(folder / "fs", {"rename_folder": errno.EXDEV}) as mount:
        is_refused(mount, "cannot rename folders")
        assert _file_system(mount).state == "bad"


def without_renames_over_folders(folder: Path) -> None:
    with recorded(folder / "fs", {"rename_over_folder": errno.ENOTEMPTY}) as mount:
        goes_on(mount, "")
        for name in ("made", "to"):
            (mount / name).mkdir()
        (mount / "made" / "file").write_text("1")
        files.move_folder(mount / "made", mount / "to")
        assert (mount / "to" / "file").read_text() == "1"


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    mount = folder / "tmpfs"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def with_little_space(folder: Path) -> None:
    with tmpfs(folder, "128k") as mount:
        is_refused(mount, "bytes free, and a checkpoint of this run takes")


def in_memory(folder: Path) -> None:
    with tmpfs(folder, "64m") as mount:
        goes_on(mount, "which is memory: the run is lost when this machine restarts")


CASES = (
    without_links,
    without_flushed_folders,
    without_locks,
    read_only,
    without_hard_links,
    without_renamed_folders,
    without_renames_over_folders,
    with_little_space,
    in_memory,
)


def case(number: int, seed: int, folder: Path) -> None:
    emulated = CASES[number % len(CASES)]
    if emulated is not without_locks and (why := why_not()) is not None:
        pytest.skip(f"cannot mount: {why}")
    emulated(folder)


def refuse_locks() -> None:
    """From here on `flock` answers ENOSYS in this process, as on Lustre without `-o flock`."""
    import ctypes
    import platform

    call = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    load, equal, end = 0x20, 0x15, 0x06
    rows = (
        (load, 0, 0, 0),
        (equal, 0, 1, call),
        (end, 0, 0, 0x00050000 | errno.ENOSYS),
        (end, 0, 0, 0x7FFF0000),
    )
    program = b"".join(
        code.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")
        for code, yes, no, value in rows
    )

    class Filter(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("rows", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    assert libc.prctl(22, 2, ctypes.byref(Filter(len(rows), program)), 0, 0) == 0, "seccomp"


def main_without_locks(folder: Path) -> None:
    from etude.runs.file_system import is_locked
    from etude.runs.folder import RunFolder

    refuse_locks()
    run = goes_on(folder, "without locks (flock)")
    assert _file_system(folder).found.endswith("without locks")
    with RunFolder.open(run.path):
        assert (run.path / ".locked-1").is_file()
        assert is_locked(run.path)
        with pytest.raises(UsageError, match=f"written by process {os.getpid()} on"):
            RunFolder.open(run.path)
    assert not list(run.path.glob(".locked*"))
    assert not is_locked(run.path)
    if (child := os.fork()) == 0:
        RunFolder.open(run.path)
        os._exit(9)  # a kill: nothing is released
    os.waitpid(child, 0)
    claim = run.path / ".locked-1"
    dead = json.loads(claim.read_text())
    assert dead["pid"] == child
    assert not is_locked(run.path)
    with RunFolder.open(run.path):
        assert [path.name for path in run.path.glob(".locked*")] == [".locked-2"]
    claim.write_text(json.dumps(dead | {"host": "another"}))
    with pytest.raises(EtudeError, match=f"{child} on another.*gone down, delete {claim}"):
        RunFolder.open(run.path)
    print("all held")


if __name__ == "__main__":
    main_without_locks(Path(sys.argv[1]))
