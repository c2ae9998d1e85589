"""Durable and atomic writes to disk.

All writes go through one replaceable `Disk`, so that tests can list the system calls of a save,
die at each of them, run out of space, or lose data that was not fsynced.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from etude.core.errors import EtudeError

Chunk = bytes | bytearray | memoryview
BLOCK = 1 << 20
"""Small chunks are gathered into blocks of this size: one system call instead of thousands."""

_MOST_LINK = 256
"""Most bytes of a file that replaces a symbolic link."""

_FIXES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EACCES: "it is not writable; check its owner and permissions",
    errno.EPERM: "it is not writable; check its owner and permissions",
    errno.EROFS: "it is on a read-only file system; choose a folder that can be written",
    errno.EIO: "the disk reported an I/O error; check the disk",
    errno.ENOENT: "its parent folder cannot hold it; choose another folder",
    errno.ENOTDIR: "a file is where a folder should be; choose another folder",
    errno.EEXIST: "something of that name is in the way; choose another name",
    errno.ELOOP: "a symbolic link is in its place, and nothing is written through one; remove it",
    errno.EFBIG: "it would be larger than this system allows; raise the limit (ulimit -f)",
}

NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Error codes of `symlink` on file systems without symbolic links."""
NO_FLUSH = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Error codes of `fsync` on file systems that cannot flush folders."""


class DiskFault(EtudeError):
    """The operating system refused a write: disk full, read-only folder, I/O error."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.errno = code


class Disk:
    """The system calls that change a disk, one method each."""

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def open(self, path: Path, flags: int) -> int:
        # A symbolic link in place of the file must not redirect a write.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, fd: int, data: Chunk) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Flush a file or folder; folders only if the file system can."""
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in NO_FLUSH or not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise

    def close(self, fd: int) -> None:
        os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def symlink(self, target: str, path: Path) -> None:
        os.symlink(target, path)


class Written(NamedTuple):
    """Size and hash of a written file, for manifests."""

    size: int
    sha256: str


_disk = Disk()


def current() -> Disk:
    """The disk that all writes of this process go through."""
    return _disk


@contextmanager
def using(disk: Disk) -> Iterator[None]:
    """Replace the disk of this process, for tests of faults."""
    global _disk
    before, _disk = _disk, disk
    try:
        yield
    finally:
        _disk = before


@contextmanager
def explain_os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DiskFault` that names the path and the fix."""
    try:
        yield
    except OSError as error:
        reason = _FIXES.get(error.errno or 0, error.strerror or str(error))
        raise DiskFault(f"Could not {action} {path}: {reason}.", error.errno) from error


def blocks(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Gather small chunks to blocks; large chunks are not copied."""
    gathered = bytearray()
    for chunk in chunks:
        if len(chunk) >= BLOCK:
            if gathered:
                yield gathered
                gathered = bytearray()
            yield chunk
            continue
        gathered += chunk
        if len(gathered) >= BLOCK:
            yield gathered
            gathered = bytearray()
    if gathered:
        yield gathered


def write_all(fd: int, data: Chunk) -> None:
    """Write all bytes; a single `write` may write fewer."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[_disk.write(fd, rest) :]


def write_file(path: Path, chunks: Iterable[Chunk]) -> Written:
    """Create a file, fsynced, and compute its size and SHA-256."""
    sha, size = hashlib.sha256(), 0
    with explain_os_errors("write", path):
        fd = _disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for block in blocks(chunks):
                sha.update(block)
                size += len(block)
                write_all(fd, block)
            _disk.fsync(fd)
        finally:
            _disk.close(fd)
    return Written(size, sha.hexdigest())


def replace_file(path: Path, chunks: Iterable[Chunk]) -> Written:
    """Replace the contents of a file atomically."""
    beside = _beside(path)
    written = write_file(beside, chunks)
    rename(beside, path)
    fsync_folder(path.parent)
    return written


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    if path.is_dir():
        # The process that created it may have been killed before its name was durable.
        if os.access(path.parent, os.R_OK):
            fsync_folder(path.parent)
        return
    make_folder(path.parent)
    with explain_os_errors("create the folder", path):
        try:
            _disk.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise
    fsync_folder(path.parent)


def new_folder(path: Path) -> None:
    """Create one folder that must not exist yet; the caller fsyncs its parent."""
    with explain_os_errors("create the folder", path):
        _disk.mkdir(path)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable, which fsync of its files does not."""
    with explain_os_errors("flush the folder", path):
        fd = _disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _disk.fsync(fd)
        finally:
            _disk.close(fd)


def rename(old: Path, new: Path) -> None:
    """Rename atomically; `new` may be a file, a symbolic link or an empty folder."""
    with explain_os_errors("rename to", new):
        _disk.rename(old, new)


def remove_tree(path: Path) -> None:
    """Delete a file, symbolic link or folder tree, if it exists; links are not followed."""
    with explain_os_errors("delete", path):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        if os.path.lexists(path):
            _disk.unlink(path)
        return
    for name in sorted(os.listdir(path)):
        _remove(path / name)
    _disk.rmdir(path)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete the named files below a folder in this order, then the empty folders.

    Other files stay, and so does everything that is not a regular file.
    """
    with explain_os_errors("delete", folder):
        folders = {folder}
        for path in (folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                folders.add(path)
            elif path.is_file() and not path.is_symlink():
                _disk.unlink(path)
            folders.update(parent for parent in path.parents if folder in parent.parents)
        for path in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            if path.is_dir() and not path.is_symlink() and not os.listdir(path):
                _disk.rmdir(path)


def move_folder(made: Path, to: Path) -> None:
    """Rename a folder to a free name or over an empty folder."""
    with suppress(OSError):  # some file systems cannot rename over an empty folder
        os.rmdir(to)
    os.rename(made, to)


def _beside(path: Path) -> Path:
    """Temporary path for the new contents of a file; leftovers at it are removed."""
    beside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with explain_os_errors("delete", beside):
        if os.path.lexists(beside):
            _disk.unlink(beside)
    return beside


def replace_link(path: Path, target: str) -> None:
    """Create or replace a symbolic link to a name beside it, atomically.

    On file systems without symbolic links, a small file that contains the name.
    """
    beside = _beside(path)
    with explain_os_errors("link", path):
        try:
            _disk.symlink(target, beside)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            replace_file(path, [f"{target}\n".encode()])
            return
        _disk.rename(beside, path)
    fsync_folder(path.parent)


def read_link(path: Path) -> str | None:
    """The target of a link made by `replace_link`; None for anything else."""
    try:
        if path.is_symlink():
            return os.readlink(path)
        if not path.is_file() or path.stat().st_size > _MOST_LINK:
            return None
        return path.read_text().removesuffix("\n")
    except (OSError, ValueError):  # removed, unreadable, or not a text
        return None


def open_regular(path: Path | str, dir_fd: int | None = None) -> BinaryIO:
    """Open a regular file to read; raises `OSError` for links, and pipes, which would block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "it is not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_start(path: Path, most: int) -> bytes:
    """The first bytes of a regular file; empty if it cannot be opened."""
    try:
        with open_regular(path) as stream:
            return stream.read(most)
    except OSError:
        return b""


_STORE = re.compile(r"(s3a?|gs|az|azure|abfss?|adl):/{1,2}(?=[^/])")


def store_url(path: str | Path) -> str:
    """The URL of a place in an object store; "" for a path on a disk. A `Path` has one slash."""
    found = _STORE.match(str(path))
    return f"{found[1]}://{str(path)[found.end() :].rstrip('/')}" if found else ""


def free_path(path: Path) -> Path:
    """The path itself, or the first `<path>-<n>` that does not exist."""
    free, count = path, 1
    while os.path.lexists(free):
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


class AppendFile:
    """A file that is appended to, and truncated to recorded positions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_os_errors("open", path):
            self._fd = _disk.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        fsync_folder(path.parent)

    def append(self, data: Chunk) -> None:
        with explain_os_errors("append to", self.path):
            write_all(self._fd, data)

    def fsync(self) -> None:
        with explain_os_errors("flush", self.path):
            _disk.fsync(self._fd)

    def truncate(self, size: int) -> None:
        with explain_os_errors("cut back", self.path):
            _disk.truncate(self._fd, size)
            _disk.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            _disk.close(self._fd)
            self._fd = -1
