"""A file system (FUSE) that passes everything on to a folder and records what would change a disk.

    with recorded(folder) as mount: ...             # whatever writes below `mount`
    for entry in entries(folder): ...               # the recording, in order

One thread serves one request after the other, so the recording is in the order in which the kernel
was answered. Nothing is flushed: what a crash leaves is worked out from the recording alone, see
`crash_model`. It runs as a process of its own, since a page fault of the process that trains would
wait for a thread that cannot get Python's lock.

    with recorded(folder, {"symlink": errno.EPERM}) as mount: ...   # a file system without links

A file system that lacks something is emulated by operations that are refused: those of
`Operations`, and "rename_folder", "rename_over_folder" and "read_only".

    python recording_fs.py FOLDER ['{"symlink": 1}']
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

_HIDDEN = ".fuse_hidden"
"""What the library renames a file to that is unlinked while it is open."""
_MARK = "user.mark"


class Entry(NamedTuple):
    """One change: what, to which paths below the mount, and the bytes of a write.

    write (offset), truncate (size), fsync, fsyncdir, create, mkdir, symlink (target), link, unlink,
    rmdir, rename; and mark, which is a word of the writer and no change.
    """

    kind: str
    path: str
    other: Any = None
    data: bytes = b""


def why_not() -> str | None:
    """Why this machine cannot record, None if it can."""
    if os.geteuid() != 0:
        return "only root may mount a file system"
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no FUSE library (pip install mfusepy, apt-get install libfuse3-3): {error}"
    return None


@contextlib.contextmanager
def recorded(folder: Path, refused: Mapping[str, int] = MappingProxyType({})) -> Iterator[Path]:
    """Mount at `folder / "mount"`; the recording is whole when this ends.

    refused: {operation: errno}.
    """
    mount = folder / "mount"
    for path in (mount, folder / "files"):
        path.mkdir(parents=True)
    server = subprocess.Popen([sys.executable, __file__, str(folder), json.dumps({**refused})])
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(mount):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the recording file system could not be mounted")
            time.sleep(0.01)
        yield mount
    finally:
        if subprocess.run(["umount", str(mount)], capture_output=True).returncode:
            subprocess.run(["umount", "--lazy", str(mount)], capture_output=True)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def mark(mount: Path, word: str) -> None:
    """Put a word of the writer's into the recording."""
    os.setxattr(mount, _MARK, word.encode())


def entries(folder: Path) -> Iterator[Entry]:
    """The recording that was made in a folder."""
    with (folder / "recording").open("rb") as stream:
        while line := stream.readline():
            kind, path, other, length = json.loads(line)
            yield Entry(kind, path, other, stream.read(length))


def serve(folder: Path, refused: Mapping[str, int]) -> None:
    """Serve the mount until it is unmounted."""
    import mfusepy

    files, stream = folder / "files", (folder / "recording").open("wb")
    mfusepy.FUSE(
        _refusing(_operations(files, stream), files, refused),
        str(folder / "mount"),
        foreground=True,
        nothreads=True,
        use_ino=True,
        fsname="recorded",
        **({"ro": True} if "read_only" in refused else {}),
    )
    stream.close()


def _refusing(operations: Any, files: Path, refused: Mapping[str, int]) -> Any:
    """The operations, of which some answer with an error."""
    rename = operations.rename

    def refuse(name: str, code: int) -> None:
        def answer(*_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

        setattr(operations, name, answer)

    def renamed(old: str, new: str, flags: int = 0) -> int:
        if stat.S_ISDIR(os.lstat(f"{files}{old}").st_mode):
            over = os.path.isdir(f"{files}{new}")
            if code := refused.get("rename_folder") or (over and refused.get("rename_over_folder")):
                raise OSError(code, os.strerror(code))
        return int(rename(old, new, flags))

    for name, code in refused.items():
        if hasattr(operations, name):
            refuse(name, code)
    if "rename" not in refused:
        operations.rename = renamed
    return operations


def _operations(files: Path, stream: BinaryIO) -> Any:
    import mfusepy

    def real(path: str) -> str:
        return f"{files}{path}"

    def note(kind: str, path: str, other: Any = None, data: bytes = b"") -> None:
        if _HIDDEN not in path:
            stream.write(json.dumps([kind, path, other, len(data)]).encode() + b"\n" + data)

    class Recording(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(real(path))
            names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
            times = {f"st_{t}time": getattr(found, f"st_{t}time_ns") for t in "amc"}
            return {f"st_{name}": getattr(found, f"st_{name}") for name in names} | times

        def readdir(self, path: str, fh: int) -> list[Any]:
            inside = ((name, self.getattr(f"{path}/{name}"), 0) for name in os.listdir(real(path)))
            return [".", "..", *inside]

        def readlink(self, path: str) -> str:
            return os.readlink(real(path))

        def open(self, path: str, flags: int) -> int:
            return os.open(real(path), flags & ~(os.O_APPEND | os.O_NOFOLLOW))

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            fd = os.open(real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            note("create", path)
            return fd

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            written = os.pwrite(fh, data, offset)
            note("write", path, offset, data[:written])
            return written

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(real(path), length)
            note("truncate", path, length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            note("fsync", path)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            note("fsyncdir", path)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(real(path), mode)
            note("mkdir", path)
            return 0

        def symlink(self, target: str, source: str) -> int:
            os.symlink(source, real(target))
            note("symlink", target, source)
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(real(source), real(target))
            note("link", source, target)
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(real(path))
            note("unlink", path)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(real(path))
            note("rmdir", path)
            return 0

        def rename(self, old: str, new: str, flags: int = 0) -> int:
            os.rename(real(old), real(new))
            if _HIDDEN in new:
                note("unlink", old)
            else:
                note("rename", old, new)
            return 0

        def setxattr(
            self, path: str, name: str, value: bytes, options: int, position: int = 0
        ) -> int:
            if name != _MARK:
                raise mfusepy.FuseOSError(errno.ENOTSUP)
            note("mark", value.decode())
            return 0

        def chmod(self, path: str, mode: int) -> int:
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            return 0

        def utimens(self, path: str, times: Any = None) -> int:
            return 0

    return Recording()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
