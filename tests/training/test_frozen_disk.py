"""A disk that hangs for real: a file system on a loop device, frozen in the middle of a save."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etude.api import Run, resume, train
from etude.planning import recipes
from etude.runs import checkpoint
from toys import tiny_reach

GRACE = 2.0
RECIPE = tiny_reach(
    6, policy={"hidden": (8, 8)}, evaluation={"every": "never"}, checkpoint={"grace": GRACE}
)
TRAIN = """
import sys
from etude.cli import main as cli
from etude.runs import files

class Asking(files.Disk):
    saves = 0

    def mkdir(self, path):
        self.saves += path.parent.name == "checkpoints"
        if self.saves == 2 and path.name == "training":
            print("saving", flush=True)
            sys.stdin.readline()
        super().mkdir(path)

with files.using(Asking()):
    sys.exit(cli.main(["train", sys.argv[1], "--folder", sys.argv[2]]))
"""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=60)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 of its own; taken apart again whatever happens."""
    missing = [c for c in ("losetup", "mkfs.ext4", "fsfreeze") if shutil.which(c) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'rights to mount'}")
    image, where = tmp_path / "image", tmp_path / "mount"
    where.mkdir()
    with image.open("wb") as stream:
        stream.truncate(64 << 20)
    with ExitStack() as stack:
        try:
            device = run("losetup", "--find", "--show", str(image))
            stack.callback(quietly, "losetup", "--detach", device)
            run("mkfs.ext4", "-q", device)
            run("mount", device, str(where))
            stack.callback(quietly, "umount", str(where))
            stack.callback(quietly, "fsfreeze", "--unfreeze", str(where))
        except OSError as error:
            pytest.skip(f"no loop device can be used here: {error}")
        yield where


@pytest.mark.rotated
def test_a_disk_that_is_frozen_in_a_save(mount: Path, tmp_path: Path) -> None:
    untouched = train(RECIPE, tmp_path / "untouched")
    file, folder = tmp_path / "recipe.yaml", mount / "run"
    file.write_text(recipes.dump(RECIPE))
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(file), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    thaw = threading.Timer(30, quietly, ["fsfreeze", "--unfreeze", str(mount)])  # where it is deaf
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        while "saving" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        run("fsfreeze", "--freeze", str(mount))
        thaw.start()
        process.stdin.write("\n")
        process.stdin.flush()
        deadline = time.monotonic() + 10
        while state(process.pid) != "D":  # in a system call that nothing can end
            assert time.monotonic() < deadline
            time.sleep(0.01)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while "It has been writing a checkpoint to the disk for" not in process.stderr.readline():
            assert time.monotonic() - start < 10  # a line of a long wait may come before
        assert time.monotonic() - start < 10
        last = process.stderr.readline()
        assert GRACE - 0.1 < time.monotonic() - start < GRACE + 10
        assert "s of work since step 512 are lost" in last
        assert "It had been writing a checkpoint to the disk for" in last
        assert "its disk hangs" in last
        assert process.poll() is None  # no process ends in such a call
        run("fsfreeze", "--unfreeze", str(mount))
        assert process.wait(timeout=10) == 128 + signal.SIGTERM
    finally:
        thaw.cancel()
        quietly("fsfreeze", "--unfreeze", str(mount))
        process.kill()
        process.communicate()
    found = checkpoint.newest_verified(folder / "checkpoints", print, repair=False)
    assert found is not None
    assert checkpoint.step_of(found) == 512
    resume(folder)
    assert Run(folder).fingerprint() == untouched.fingerprint()


def state(pid: int) -> str:
    """One letter: R, S, D, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
