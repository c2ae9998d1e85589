"""Test the file system of a run before its first step.

`runs.files` and `runs.lock` have fallbacks for missing features, and notes say what they cost.
Features without a fallback (renaming folders) raise an error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import UsageError
from etude.runs import files, lock

_REFUSED = files.NO_LINKS | files.NO_FLUSH | {errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY}
_IN_MEMORY = ("tmpfs", "ramfs")
_PAGE = b"etude"


@dataclass(frozen=True)
class FileSystem:
    """Features of the file system of a folder."""

    folder: Path
    kind: str
    """Type of the file system; "" if unknown."""
    links: bool
    hard_links: bool
    flushes: bool
    """Whether folders can be fsynced, which makes the names in them durable."""
    locks: bool
    renames: bool
    """Whether a folder can be renamed, and a file replaced by a rename."""
    free: int | None
    """Free bytes; None if unknown."""

    def notes(self) -> list[str]:
        """Limitations of a run on this file system, in sentences."""
        place, notes = f"{self.folder} is on {self.kind or 'a file system'}", []
        if self.kind in _IN_MEMORY:
            notes.append(
                f"{place}, which is memory: the run is lost when this machine restarts. Choose a "
                "folder on a disk to keep it."
            )
        if not self.links:
            notes.append(
                f"{place} without symbolic links: checkpoints/latest, best and final are small "
                "files with the name of a checkpoint."
            )
        if not self.flushes:
            notes.append(
                f"{place} that cannot flush folders: a power cut may lose the last save, but not "
                "those before it."
            )
        if not self.locks:
            notes.append(
                f"{place} without locks (flock): a file .locked-1 in the run's folder keeps a "
                "second writer out. Delete it if the machine that wrote the run went down."
            )
        return notes


def check(folder: Path, save: int, kept: int, say: Callable[[str], None]) -> None:
    """Raise if the file system of a folder cannot hold a run; `say` its limitations.

    save: bytes of a checkpoint; kept: number of checkpoints that a run keeps.
    """
    found = examine(folder)
    if not found.renames:
        raise UsageError(
            f"{found.folder} is on {found.kind or 'a file system'} that cannot rename folders, "
            "without which a save is not safe from a kill: choose a folder on another one, and "
            "copy the run there when it has ended."
        )
    if found.free is not None and found.free < save:
        raise UsageError(
            f"{found.folder} has {found.free:,} bytes free, and a checkpoint of this run takes "
            f"{save:,}: free some space, or choose another folder."
        )
    if found.free is not None and found.free < (kept + 1) * save:
        say(
            f"{found.folder} has {found.free:,} bytes free, and the checkpoints of this run take "
            f"up to {(kept + 1) * save:,}: free some space, or lower checkpoint.keep_last."
        )
    for note in found.notes():
        say(note)


def examine(folder: Path) -> FileSystem:
    """Test the features in a new folder inside this one, or inside its nearest existing parent."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    tried = files.free_path(there / f".tmp-probe-{os.getpid()}")
    with files.explain_os_errors("write to", there):
        os.mkdir(tried)
        try:
            return _tried(there, tried)
        finally:
            with suppress(OSError):
                files.remove_tree(tried)


def _tried(there: Path, tried: Path) -> FileSystem:
    one, two = tried / "one", tried / "two"
    files.write_file(one, [_PAGE])
    two.write_bytes(b"")
    renames = _works(lambda: os.replace(one, two)) and two.read_bytes() == _PAGE
    os.mkdir(tried / "from")
    (tried / "from" / "file").write_bytes(_PAGE)
    renames = renames and _works(lambda: os.rename(tried / "from", tried / "to"))
    space = os.statvfs(there)
    return FileSystem(
        folder=there,
        kind=_kind(there),
        links=_works(lambda: _link_and_unlink(tried / "link")),
        hard_links=_works(lambda: os.link(two, tried / "hard")),
        flushes=_flushes(tried),
        locks=lock.has_locks(tried),
        renames=renames,
        free=space.f_bavail * space.f_frsize if space.f_blocks else None,
    )


def _link_and_unlink(path: Path) -> None:
    os.symlink("two", path)
    os.unlink(path)


def _works(act: Callable[[], None]) -> bool:
    """Whether an operation is supported; other errors (a full disk) are raised."""
    try:
        act()
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    return True


def _flushes(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _works(lambda: os.fsync(fd))
    finally:
        os.close(fd)


def _kind(folder: Path) -> str:
    """The type of the file system of a folder, from the mount of its device."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == wanted:
                return rest.split()[0]
    return ""
