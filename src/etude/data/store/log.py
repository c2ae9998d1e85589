"""An append-only log of fixed-size records in block files: written once, hashed, memory-mapped.

Records are written in order by system calls, so that a full disk is an error and not a bus error,
and read through read-only memory maps of the same pages. A block's SHA-256 is updated with every
write, so that the cost of a checkpoint does not grow with the log. A block is a sparse file of its
full size from the start, so that it is mapped once.

Nothing before `count` is ever written again, and the log deletes nothing by itself. After a kill
it is truncated to the count in a checkpoint; what follows is overwritten in place.

A block is hashed before it is first read, and its `Stamp` is kept. `check_unchanged` compares the
stamps of all blocks in use before every save, and hashes blocks with another stamp again.
"""

from __future__ import annotations

import _thread
import hashlib
import mmap
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import Damaged, EtudeError
from etude.core.output import waiting
from etude.core.trees import Tree
from etude.runs.files import Disk, explain_os_errors

T = TypeVar("T")
_CHUNK = 1 << 20
_LARGE = 4096
"""Bytes of a record from which copying takes longer than Python's overhead for one record."""
_EXPECTED = 4 * _LARGE
"""Bytes from which requesting them from the system in advance is faster."""
_TICK = 20_000_000
"""Upper bound in ns on the time between two writes with the same time stamp: Linux counts in ticks
of 1 to 10 ms, and always did before 6.13."""


class DamagedStore(Damaged):
    """A file of a store is missing, short or altered."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, f"{path} {what}; put back a good copy.")
        self.what = what


def side_by_side(function: Callable[[T], object], items: Sequence[T]) -> None:
    """Call a function with every item, in one thread per core; raise the first error.

    The calling thread takes items too and waits only for threads that have begun: a pool of
    `concurrent.futures` waits forever if a thread gets no memory between two items.
    """
    left, errors, busy = deque(items), list[BaseException](), list[Any]()

    def work(ended: Any) -> None:
        try:
            busy.append(ended)
            while not errors:
                try:
                    item = left.popleft()
                except IndexError:
                    break
                function(item)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    locks = [_thread.allocate_lock() for _ in range(min(len(items), os.cpu_count() or 1))]
    for lock in locks:
        lock.acquire()
    with suppress(RuntimeError):  # fewer threads if no more can start
        for lock in locks[1:]:
            _thread.start_new_thread(work, (lock,))
    work(locks[0])
    for lock in [*busy]:
        lock.acquire()
    if errors:
        raise errors[0]


class RecordLog:
    """Records 0, 1, 2, ... of one dtype, `block_records` to a file; `disk` None only reads."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], block_records: int, disk: Disk | None
    ) -> None:
        self.folder, self.name, self.dtype, self.block_records = folder, name, dtype, block_records
        self.count = 0
        self._disk = disk
        # Opaque bytes: numpy moves them whole, five times faster than field by field.
        self._raw = np.dtype((np.void, dtype.itemsize))
        self._maps: dict[int, tuple[mmap.mmap, Array]] = {}
        self._unread: set[int] = set()
        """Blocks that have to be checked before they are first read."""
        self._stamps: dict[int, Stamp | None] = {}
        """Stamps of blocks in use when their bytes were last checked; None if written to since."""
        self.holds: Callable[[int, int], str] = _episodes
        """Describes what records start to stop belong to, for messages."""
        self._sparse = False
        """Whether only some fields of records are read."""
        self._sealed: dict[int, str] = {}
        """SHA-256 of complete blocks."""
        self._running = hashlib.sha256()
        self._tails: dict[int, tuple[int, Any]] = {}
        """Size and SHA-256 of blocks that end in tentative records, with these."""
        self._fd, self._open_block = -1, -1
        self._dirty: set[int] = set()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's file."""
        return self.block_records * self.dtype.itemsize

    def path(self, block: int) -> Path:
        return self.folder / f"{self.name}-{block:012d}.bin"

    def append(self, records: Array, tentative: int = 0) -> None:
        """Append records [m]; the last `tentative` are not counted and will be appended again."""
        data = records.view(np.uint8).reshape(-1).data
        size, position = self.dtype.itemsize, self.count
        counted = position + len(records) - tentative
        self._tails = {} if len(data) else self._tails
        while len(data):
            block, inside = divmod(position, self.block_records)
            piece = data[: (self.block_records - inside) * size]
            self._write(block, inside * size, piece)
            length = len(piece) // size
            kept = min(max(counted - position, 0), length)
            self._count(block, piece[: kept * size], kept)
            if kept < length:
                begun = self.count // self.block_records == block
                sha = self._running.copy() if begun else hashlib.sha256()
                sha.update(piece[kept * size :])
                self._tails[block] = inside * size + len(piece), sha
            data, position = data[len(piece) :], position + length

    def _write(self, block: int, offset: int, data: memoryview) -> None:
        disk, path = self._writer(), self.path(block)
        with explain_os_errors("write", path):
            if block != self._open_block:
                self.close()
                self._fd = disk.open(path, os.O_RDWR | os.O_CREAT)
                self._open_block = block
                if os.fstat(self._fd).st_size != self.block_bytes:
                    self._maps.pop(block, None)
                    disk.truncate(self._fd, self.block_bytes)
            self._dirty.add(block)
            self._stamps[block] = None
            os.lseek(self._fd, offset, os.SEEK_SET)
            while len(data):
                data = data[disk.write(self._fd, data) :]

    def _count(self, block: int, data: memoryview, length: int) -> None:
        self._running.update(data)
        self.count += length
        if length and self.count % self.block_records == 0:
            self._sealed[block] = self._running.hexdigest()
            self._running = hashlib.sha256()

    def gather(self, positions: Array, part: np.dtype[Any] | None = None) -> Array:
        """Copy the records at `positions` [m] int64, in that order.

        They are read block by block in the order of the file, and sorted afterwards. part: a dtype
        with some of the fields, packed. Of large records only these are read, so that unused
        images stay on the disk; small records are read whole, which is faster.
        """
        order = positions.argsort()
        if self.dtype.itemsize >= _LARGE:
            if part is not None:
                return self._gather_part(positions, order, part)
            return self._gather_large(positions, order)
        sorted_positions = positions[order]
        lowest, highest = (int(sorted_positions[i]) // self.block_records for i in (0, -1))
        edges = np.arange(lowest + 1, highest + 2) * self.block_records
        inside = sorted_positions % self.block_records
        found: Array = np.empty(len(positions), self._raw)
        begin = 0
        for block, end in enumerate(sorted_positions.searchsorted(edges).tolist(), lowest):
            if begin < end:
                # With "clip" numpy writes directly into `out`; no position is outside its block.
                self._map(block).take(inside[begin:end], 0, found[begin:end], "clip")
            begin = end
        back: Array = np.empty_like(order)
        back[order] = np.arange(len(order))
        # `view` would compare the two dtypes field by field at every call.
        return np.ndarray(len(order), self.dtype, found.take(back))

    def _gather_large(self, positions: Array, order: Array) -> Array:
        """Copy record by record to the final places, since moving images twice is expensive."""
        found: Array = np.empty(len(positions), self._raw)
        self._expect(positions[order], 0, self.dtype.itemsize)
        for i in order.tolist():
            block, inside = divmod(int(positions[i]), self.block_records)
            found[i : i + 1] = self._map(block)[inside : inside + 1]
        return np.ndarray(len(found), self.dtype, found)

    def _gather_part(self, positions: Array, order: Array, part: np.dtype[Any]) -> Array:
        """Copy some fields of large records: [m] of the dtype `part`."""
        found: Array = np.empty(len(positions), part)
        self._sparse = True
        for name in part.names or ():
            kind, offset = self.dtype.fields[name][:2]  # type: ignore[index]
            self._expect(positions[order], offset, kind.itemsize)
        blocks, inside = np.divmod(positions[order], self.block_records)
        begin = 0
        while begin < len(order):
            block = int(blocks[begin])
            end = int(blocks.searchsorted(block, "right"))
            mapped, rows = self._map(block), order[begin:end]
            records = np.ndarray(len(mapped), self.dtype, mapped)
            for name in part.names or ():
                found[name][rows] = records[name][inside[begin:end]]
            begin = end
        return found

    def _expect(self, positions: Array, offset: int, size: int) -> None:
        """Request bytes of records of a dataset from the system all at once, before they are read.

        A disk is slow if they are requested one after the other. A log that is still written is
        mostly in memory.
        """
        wanted = size >= _EXPECTED and self._disk is None and hasattr(mmap, "MADV_WILLNEED")
        for position in positions.tolist() if wanted else ():
            block, inside = divmod(position, self.block_records)
            self._map(block)
            start = inside * self.dtype.itemsize + offset
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[block][0].madvise(mmap.MADV_WILLNEED, page, start + size - page)

    def read(self, start: int, stop: int) -> Array:
        """Copy records start to stop, [stop - start]."""
        parts = []
        while start < stop:
            block, inside = divmod(start, self.block_records)
            length = min(stop - start, self.block_records - inside)
            parts.append(self._map(block)[inside : inside + length])
            start += length
        whole = np.concatenate(parts) if parts else np.empty(0, self._raw)
        return whole.view(self.dtype)

    def _map(self, block: int) -> Array:
        """Map the records of a block that are in its file: raw bytes, read-only.

        Reading a map of a truncated file would crash the process, so the size is checked every
        time.
        """
        if block in self._maps:
            pages, found = self._maps[block]
            if pages.size() < found.nbytes:
                raise self._damaged(block, "was truncated while it was in use")
            return found
        if block in self._unread:
            self._check(block, *self._recorded(block))
            self._unread.discard(block)
        path = self.path(block)
        size, size_of = file_size(path), self.dtype.itemsize
        if size < size_of:
            raise DamagedStore(path, "is empty")
        length = min(size // size_of, self.block_records)
        with explain_os_errors("map", path), open(path, "rb") as stream:
            pages = mmap.mmap(stream.fileno(), length * size_of, access=mmap.ACCESS_READ)
        if self._sparse and hasattr(mmap, "MADV_RANDOM"):
            # Read-ahead would fetch the fields between those that are read.
            pages.madvise(mmap.MADV_RANDOM)
        found = np.frombuffer(pages, self._raw)
        self._maps[block] = pages, found
        return found

    def _check(self, block: int, size: int, expected: str, wrong: str = "is damaged") -> Any:
        """Compute the SHA-256 of a block's first bytes, and refuse one that was not recorded."""
        stamp = stamp_of(self.path(block), flush=True)  # before hashing: later changes show
        found = _hash_file(self.path(block), size)
        if found.hexdigest() != expected:
            raise self._damaged(block, f"{wrong}: its SHA-256 is not what was recorded")
        self._stamps[block] = stamp
        return found

    def _recorded(self, block: int) -> tuple[int, str]:
        """The bytes of a block that were written, and their SHA-256."""
        if block in self._tails:
            size, sha = self._tails[block]
            return size, sha.hexdigest()
        return self._size_of(block), self._sealed.get(block) or self._running.hexdigest()

    def check_unchanged(self) -> None:
        """Raise if a block in use was changed.

        A block with the same stamp is not read. A block with another stamp is read, because links
        to a file change its stamp too, and so is a block that was appended to. If writes through
        memory maps do not change the stamp (tmpfs), all are read.
        """
        stamps = sorted(self._stamps.items())
        unsure = bool(stamps) and not _maps_leave_traces(self.folder)
        suspects = [
            block
            for block, stamp in stamps
            if unsure or stamp is None or not stamp.settled or stamp_of(self.path(block)) != stamp
        ]
        if not suspects:
            return
        with waiting(f"reading {len(suspects):,} files of {self.folder} again"):
            side_by_side(self._check_again, suspects)

    def _check_again(self, block: int) -> None:
        before, path = self._stamps[block], self.path(block)
        self._check(block, *self._recorded(block), "was changed while it was in use")
        now = stamp_of(path)
        if before is None or now.mtime == before.mtime:
            return
        if now.inode == before.inode:
            raise EtudeError(
                f"{path} was written to while it was in use. It has the right bytes again, but the "
                "run may have read other bytes: `etude resume` continues from the last checkpoint."
            )
        self._maps.pop(block, None)  # replaced by an equal copy, which is read from now on

    def _damaged(self, block: int, what: str) -> DamagedStore:
        start = block * self.block_records
        stop = min(start + self.block_records, self.count)
        return DamagedStore(self.path(block), f"{what} (it has {self.holds(start, stop)})")

    def sync(self) -> bool:
        """Flush everything that was written; returns whether there was anything."""
        worked = bool(self._dirty)
        for block in sorted(self._dirty):
            fsync(self._writer(), self.path(block), os.O_RDWR)
        self._dirty.clear()
        return worked

    def forget(self, first: int) -> None:
        """Drop maps and hashes of blocks before record `first`."""
        kept: dict[int, Any]
        for kept in (self._maps, self._sealed, self._stamps):
            for block in [b for b in kept if b < first // self.block_records]:
                del kept[block]
                self._unread.discard(block)

    def state(self, first: int) -> Tree:
        """The state for a checkpoint: records `first` to `count`, and a SHA-256 for each block.

        The last block's covers its content so far. O(number of blocks); nothing is read.
        """
        blocks = self._blocks(first, self.count)
        running = self._running.hexdigest()
        return {
            "first": first,
            "count": self.count,
            "sha256": [self._sealed.get(block, running) for block in blocks],
        }

    def load(self, state: Any, verify: bool) -> int:
        """Truncate to `state` and return its first record.

        Every file must exist and be long enough. `verify` reads all of them; otherwise each is read
        before it is used, and only the one that is continued is read now, for its running hash.
        """
        first, count, hashes = _check_state(state, self.folder / self.name)
        blocks = self._blocks(first, count)
        if len(hashes) != len(blocks):
            raise DamagedStore(self.folder / self.name, "has a description of other blocks")
        self.close()
        self._maps.clear()
        self._sealed, self._unread, self._running = {}, set(), hashlib.sha256()
        self._stamps, self._tails = {}, {}
        self.count = count
        for block, expected in zip(blocks, hashes, strict=True):
            size = self._size_of(block)
            full = size == self.block_bytes
            self._check_size(block, size)
            if full or self._disk is None:
                self._sealed[block] = expected
            if verify or block not in self._sealed:
                found = self._check(block, size, expected)
                self._running = self._running if block in self._sealed else found
            else:
                self._unread.add(block)
        return first

    def written(self, state: Any) -> dict[Path, int]:
        """{file: bytes of it that belong to `state`}."""
        first, self.count, _ = _check_state(state, self.folder / self.name)
        return {self.path(b): self._size_of(b) for b in self._blocks(first, self.count)}

    def examine(self, state: Any) -> dict[Path, str]:
        """The fault of each block of `state`, "" for an intact one."""
        first, self.count, hashes = _check_state(state, self.folder / self.name)
        found = {}
        for block, expected in zip(self._blocks(first, self.count), hashes, strict=False):
            try:
                self._check_size(block, self._size_of(block))
                self._check(block, self._size_of(block), expected)
                found[self.path(block)] = ""
            except DamagedStore as error:
                found[error.path] = error.what
        return found

    def _size_of(self, block: int) -> int:
        """Bytes of the records in a block."""
        length = min(self.count - block * self.block_records, self.block_records)
        return length * self.dtype.itemsize

    def _check_size(self, block: int, size: int) -> None:
        if file_size(self.path(block)) < size:
            raise self._damaged(block, f"is short: {size:,} bytes were written to it")

    def finish(self) -> None:
        """Truncate the last block to its records, and delete empty blocks."""
        disk = self._writer()
        self.close()
        last, inside = divmod(self.count, self.block_records)
        if inside:
            with explain_os_errors("truncate", self.path(last)):
                fd = disk.open(self.path(last), os.O_RDWR)
                try:
                    disk.truncate(fd, inside * self.dtype.itemsize)
                finally:
                    disk.close(fd)
            self._dirty.add(last)
            self._maps.pop(last, None)
        void = self.files(lambda block: block > last or (block == last and not inside))
        self.delete(void)

    def files(self, wanted: Callable[[int], bool]) -> list[Path]:
        """The block files on disk whose number is `wanted`, in order."""
        prefix, found = f"{self.name}-", []
        for name in sorted(os.listdir(self.folder)):
            number = name.removeprefix(prefix).removesuffix(".bin")
            if name == f"{prefix}{number}.bin" and number.isascii() and number.isdigit():
                found.append((int(number), self.folder / name))
        return [path for number, path in found if wanted(number)]

    def delete(self, paths: list[Path]) -> None:
        """Delete block files; their maps stay readable until they are closed."""
        for path in paths:
            with explain_os_errors("delete", path), suppress(FileNotFoundError):
                self._writer().unlink(path)
            block = int(path.name.removeprefix(f"{self.name}-").removesuffix(".bin"))
            self._dirty.discard(block)
            self._maps.pop(block, None)
            self._stamps.pop(block, None)
            self._unread.discard(block)

    def close(self) -> None:
        """Close the file that is written."""
        if self._fd >= 0:
            fd, self._fd, self._open_block = self._fd, -1, -1
            self._writer().close(fd)

    def _writer(self) -> Disk:
        if self._disk is None:
            raise EtudeError(f"{self.folder} is open for reading only; it cannot be changed.")
        return self._disk

    def _blocks(self, first: int, count: int) -> range:
        """The blocks of records first to count."""
        return range(first // self.block_records, -(-count // self.block_records))


def fsync(disk: Disk, path: Path, flags: int) -> None:
    """Flush a file or folder by its name: a new descriptor also flushes writes of others."""
    with explain_os_errors("flush", path):
        fd = disk.open(path, flags)
        try:
            disk.fsync(fd)
        finally:
            disk.close(fd)


class Stamp(NamedTuple):
    """A file's attributes. Programs cannot set `ctime`, and every write changes it."""

    inode: int
    size: int
    mtime: int
    ctime: int
    settled: bool
    """Whether `ctime` is old enough for the next write to change it."""


def stamp_of(path: Path, flush: bool = False) -> Stamp:
    """The stamp of a plain file. It is opened, since NFS then asks the server.

    flush: only the first write to a page through a memory map changes `ctime`, until the page is
    flushed.
    """
    with _opened(path) as fd:
        if flush:
            with suppress(OSError):  # not every read-only file system can
                os.fsync(fd)
        found = os.fstat(fd)
    whole_seconds = found.st_ctime_ns % 10**9 == 0  # the resolution of some file systems
    tick = 2 * 10**9 if whole_seconds else _TICK
    return Stamp(
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        settled=not 0 <= time.time_ns() - found.st_ctime_ns < tick,
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a plain file to read; anything else in its place is refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DamagedStore(path, "is missing") from error
    except OSError as error:
        raise DamagedStore(path, f"cannot be opened ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedStore(path, "is not a plain file")
        yield fd
    finally:
        os.close(fd)


_traces: dict[int, bool] = {}
"""{device: whether a write through a memory map changes the times of the file}."""


def _maps_leave_traces(folder: Path) -> bool:
    """Whether writes through memory maps change the times of files in a folder.

    Tried on a file without a name. If none can be made, True: of the file systems in use, only
    tmpfs is known not to change them.
    """
    with explain_os_errors("look at", folder):
        device = os.stat(folder).st_dev
    if device not in _traces:
        _traces[device] = _try_map(folder)
    return _traces[device]


def _try_map(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except (OSError, AttributeError):  # O_TMPFILE is Linux's
        return True
    try:
        os.write(fd, bytes(mmap.PAGESIZE))
        os.utime(fd, ns=(0, 0))
        with mmap.mmap(fd, mmap.PAGESIZE) as pages:
            pages[0] += 1  # reads first, so that tmpfs maps the page for good
            return os.fstat(fd).st_mtime_ns != 0
    except OSError:
        return True
    finally:
        os.close(fd)


def file_size(path: Path) -> int:
    """Size of a plain file; anything else in its place is refused."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise DamagedStore(path, "is missing") from error
    if not stat.S_ISREG(found.st_mode):  # a link could lead anywhere, a pipe would block forever
        raise DamagedStore(path, "is not a plain file")
    return found.st_size


def _hash_file(path: Path, size: int) -> Any:
    """Hash the first `size` bytes of a file; unlike a map, reading reports disk errors."""
    sha, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with explain_os_errors("read", path), open(path, "rb", buffering=0) as stream:
        while size and (length := stream.readinto(buffer[: min(size, _CHUNK)])):
            sha.update(buffer[:length])
            size -= length
    return sha


def _episodes(start: int, stop: int) -> str:
    return f"episodes {start:,} to {stop - 1:,}"


def _check_state(state: Any, where: Path) -> tuple[int, int, list[str]]:
    wrong = DamagedStore(where, "has an invalid description")
    if not isinstance(state, dict) or set(state) != {"first", "count", "sha256"}:
        raise wrong
    first, count, hashes = state["first"], state["count"], state["sha256"]
    if type(first) is not int or type(count) is not int or not 0 <= first <= count < 1 << 60:
        raise wrong
    if not isinstance(hashes, list) or not all(isinstance(h, str) for h in hashes):
        raise wrong
    return first, count, hashes
