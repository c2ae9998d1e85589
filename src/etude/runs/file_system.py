"""Locks of folders, and the test of a run's file system before its first step.

A folder has one writer. The system releases a flock of the folder when its process ends. Some file
systems do not support it, for example Lustre without `-o flock`. There the writer creates a file
`.locked-<n>` exclusively, which describes its process. If that process has ended on this machine,
the next writer creates `.locked-<n + 1>`; if it ran on another machine, a user must delete the
file.

`check` tests the features of a file system. Where one is missing, `runs.files` and the locks have a
fallback, and notes say what it costs. Features without a fallback (renaming folders) raise an
error.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import EtudeError, UsageError
from etude.runs import files

LOCK = ".lock"
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""Error codes of flock on file systems without locks."""
_RETRY = 0.1
"""Seconds before a lock is tried again."""
_MOST_NAME = 1024
"""Most bytes of a lock file."""
_CLAIM = re.compile(r"\.locked-([0-9]{1,9})")


def is_locked(folder: Path) -> bool:
    """Whether a process on any machine holds the lock of a folder."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)
    try:
        return any(_may_live(text) for text in _claims(fd).values())
    finally:
        os.close(fd)


def has_locks(folder: Path) -> bool:
    """Whether the file system of an unused folder supports flock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _flock(fd)
    finally:
        os.close(fd)


class FolderLock:
    """The right to write to a folder, for this process alone; raises `AlreadyLocked` where another
    has it.

    `fd` is the open folder, wherever it is moved. A shared lock keeps writers away and lets other
    shared locks be; a file system without flock has none.
    """

    def __init__(self, folder: Path, shared: bool = False) -> None:
        self._claim, self._pid = "", os.getpid()
        with files.explain_os_errors("lock", folder):
            self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                has_locks = _flock(self.fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                if not shared:
                    self._claim = _claimed(self.fd, make=not has_locks)
            except BaseException:
                os.close(self.fd)
                raise
        # A forked worker would hold the lock after the death of the writer.
        here = weakref.ref(self)

        def forget() -> None:
            if (hold := here()) is not None:
                hold.release()

        os.register_at_fork(after_in_child=forget)

    def release(self) -> None:
        """Release the lock; a forked child closes its copy only."""
        if self.fd < 0:
            return
        if self._claim and self._pid == os.getpid():
            with suppress(OSError):
                os.unlink(self._claim, dir_fd=self.fd)
        os.close(self.fd)
        self.fd = -1


class AlreadyLocked(EtudeError):
    """Another process holds the lock of the folder."""

    def __init__(self, who: str = "", file: str = "") -> None:
        super().__init__(who)
        self.who, self.file = who, file
        """The process, if it is known, and its lock file, if there is one."""


def _flock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open folder; False if its file system does not support flock."""
    for last in (False, True):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            if last:
                raise AlreadyLocked from error
            time.sleep(_RETRY)  # `is_locked`, as in `etude runs`, holds it briefly
        else:
            break
    return True


def _claimed(fd: int, make: bool) -> str:
    """Check the lock files of a folder and create one, if `make`; returns its name or ""."""
    there = _claims(fd)
    for number, text in there.items():
        if _may_live(text):
            raise AlreadyLocked(_named(text), f".locked-{number}")
    if not make:
        return ""
    number = max(there, default=0) + 1
    name = f".locked-{number}"
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=fd)
    except FileExistsError:
        raise AlreadyLocked(file=name) from None
    with os.fdopen(made, "w") as stream:
        stream.write(json.dumps(_self()))
    # A later lock file wins, if others were created while this process was slow.
    if later := [n for n in _claims(fd) if n > number]:
        os.unlink(name, dir_fd=fd)
        raise AlreadyLocked(file=f".locked-{max(later)}")
    for old in there:
        with suppress(FileNotFoundError):
            os.unlink(f".locked-{old}", dir_fd=fd)
    return name


def _claims(fd: int) -> dict[int, str]:
    """{number: contents} of the lock files in an open folder."""
    found = {}
    for name in os.listdir(fd):
        if number := _CLAIM.fullmatch(name):
            with suppress(FileNotFoundError), files.open_regular(name, fd) as stream:
                found[int(number[1])] = stream.read(_MOST_NAME).decode(errors="replace")
    return found


def _self() -> dict[str, object]:
    """Identity of this process, also among processes with a reused PID."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": _line("/proc/sys/kernel/random/boot_id"),
        "namespace": _namespace(),
        "started": _started(os.getpid()),
    }


def _may_live(text: str) -> bool:
    """Whether the process of a lock file may be alive: not if it ran here and has ended."""
    try:
        them = json.loads(text)
        here = _self()
        if any(them[name] != here[name] for name in ("host", "boot", "namespace")):
            return True
        return here["boot"] == "" or _started(int(them["pid"])) == them["started"]
    except (ValueError, KeyError, TypeError, RecursionError):  # being written, or damaged
        return True


def _named(text: str) -> str:
    try:
        them = json.loads(text)
        return f"{int(them['pid'])} on {str(them['host'])[:64]}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _started(pid: int) -> str:
    """Start of a process on this machine, in ticks since boot; "" without the process."""
    return (_line(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * 20)[19]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


class Lock:
    """The lock of a run: `FolderLock`, and a signature that detects a second writer.

    The file `.lock` contains host, process and inode of the writer. Some network file systems let
    two hosts lock one folder; both see the other's signature, and the later one stops.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / LOCK
        try:
            self._hold = FolderLock(folder)
        except AlreadyLocked as held:
            who = held.who or _holder(file) or "unknown"
            fix = "wait for it to finish, or stop it first"
            if held.file:
                fix += f"; if its machine has gone down, delete {folder / held.file}"
            raise UsageError(f"{folder} is being written by process {who}; {fix}.") from held
        try:
            inode = os.fstat(self._hold.fd).st_ino
            self._name = f"{os.getpid()} on {socket.gethostname()} (inode {inode})"
            self._before = _holder(file)
            _sign(file, self._name)
        except files.DiskFault:
            self._hold.release()
            raise

    def check(self, folder: Path) -> None:
        """Raise unless this process is the only writer of the folder at this path."""
        if not self._is_at(folder):
            there = self._now_at()
            fix = f"It is at {there} now: resume it there" if there else "It cannot be found"
            raise EtudeError(
                f"{folder} was moved, removed or replaced while this run was being written. {fix}; "
                "nothing was written since."
            )
        named = _holder(folder / LOCK)
        if named == self._name:
            return
        if named and named == self._before:  # It was first, and has signed again.
            raise EtudeError(
                f"{folder} is also being written by process {named}, which came first: this one "
                "has stopped, and has saved nothing since."
            )
        _sign(folder / LOCK, self._name)

    def find(self, folder: Path) -> Path:
        """The current path of the locked folder, which may have been moved."""
        if self._is_at(folder):
            return folder
        found = self._now_at()
        if found is None:
            raise EtudeError(f"{folder} is gone.")
        return found

    def _is_at(self, folder: Path) -> bool:
        held = os.fstat(self._hold.fd)
        try:
            found = os.stat(folder)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def _now_at(self) -> Path | None:
        """The path that the folder was moved to; None if it was removed or is unknown."""
        try:
            found = Path(os.readlink(f"/proc/self/fd/{self._hold.fd}"))
        except OSError:
            return None
        return found if self._is_at(found) else None

    def release(self) -> None:
        self._hold.release()


class Published:
    """Where a run is published besides its folder: nowhere, or see `etude.runs.stored`."""

    url, folder = "", Path()

    def report_to(self, say: Callable[[str], None]) -> None:
        """Where notices go."""

    def check(self) -> None:
        """Raise unless this process is the only writer of the run."""

    def publish(self) -> None:
        """Commit the present contents of the folder."""

    def close(self) -> None:
        """Commit the folder, and let other processes write the run."""


def _sign(file: Path, name: str) -> None:
    """Write the holder into the file `.lock`."""
    with files.explain_os_errors("write the lock", file):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(file, flags, 0o666), "w") as stream:
            stream.write(f"{name}\n")


def _holder(file: Path) -> str:
    """The holder in the file `.lock`."""
    return files.read_start(file, 256).decode(errors="replace").strip()


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
        locks=has_locks(tried),
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
