"""A run in an object store: its folder on this machine, and the place where it is published.

    URL/run.json                         the index: who writes the run, and the files of its folder
    URL/objects/<epoch>-<serial>-<hash>  pieces of files, written once
    URL/alive/<epoch>                    written by the writer every few seconds

A run trains in a folder of this machine. `publish` uploads the pieces of files that the store does
not have, and then replaces the index by one conditional write: a reader finds the folder as it was
at one moment, or as it was before.

The index is the lease too. A process becomes the writer by replacing the index with one of the next
epoch; a conditional write of an earlier writer, however late it arrives, then finds another
version. A writer that has been silent for its `lease` by the store's clock counts as dead; if it is
not, its next commit fails, and it ends.

No name of an object is used twice, and a writer deletes only what its own index, or one that it
began with, has named: late or doubled requests of one writer cannot remove what another needs.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from etude.core.errors import EtudeError, UsageError
from etude.core.output import waiting
from etude.core.trees import Tree
from etude.runs import files
from etude.runs.documents import decode_sealed, encode_sealed
from etude.runs.file_system import Published, is_locked
from etude.runs.objects import Changed, Objects, StoreFault, Version, checked_url

INDEX = "run.json"
FORMAT = 1
LEASE = 30.0
"""Seconds of silence after which a writer counts as dead."""
PIECE = 4 << 20
"""Most bytes of an object."""
_SHORT = PIECE // 8
_MOST_SHORT = 16
"""Short pieces at the end of a file, which has grown, that are joined."""
_BEATS = 6
"""Signs of life in the time of a lease."""
_CLOCK = 1.5
"""Seconds by which the store's times may be off: they are rounded to seconds."""
_PARALLEL = 4
"""Transfers at a time."""
_SETTLED = 2.0
"""Seconds after which a write to a file is certain to change its times."""
_ORIGIN = "origin.json"
"""Beside a working folder: its URL, and the index that it was made from."""
_SKIPPED = re.compile(r"\.lock|\.locked-[0-9]+|\.tmp-.*|wandb")
_OBJECT = re.compile(r"objects/[0-9]+-[0-9]+-([0-9a-f]{64})")
_LINK = re.compile(r"[\w.-]{1,255}")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Index:
    """The contents of run.json."""

    epoch: int = 0
    """Number of the writer: each has the next one."""
    serial: int = 0
    """Number of this index."""
    writer: str = ""
    """Random name of the writer."""
    holder: str = ""
    """The writer's process; "" if no process writes the run."""
    lease: float = LEASE
    files: dict[str, Tree] = field(default_factory=dict)
    """{path: {"pieces": [[object, size], ...]}, {"link": name} or {}, which is a folder}; an object
    "" is zeros."""

    @property
    def objects(self) -> set[str]:
        """The names of all objects of the files."""
        return {name for each in self.files.values() for name, _ in each.get("pieces", ()) if name}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, without zeros that are not stored."""
        return sum(n for each in self.files.values() for o, n in each.get("pieces", ()) if o)

    def encode(self) -> bytes:
        return encode_sealed({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, data: bytes, url: str) -> Index:
        """The index in untrusted bytes."""
        try:
            document = decode_sealed(data, must=True)
            if document.pop("format") != FORMAT:
                raise UsageError(f"{url}/{INDEX} was written by another version of Etude.")
            found = cls(**document)
            for path, entry in found.files.items():
                _check_entry(path, entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreFault(f"{url}/{INDEX} is damaged, or is not the index of a run.") from error
        return found


def _check_entry(path: str, entry: Tree) -> None:
    """Raise `ValueError` for a path that leaves the folder, or an entry of another form."""
    parts = PurePosixPath(path).parts
    if path != "/".join(parts) or path.startswith("/") or {"..", "."} & {*parts}:
        raise ValueError("a path")
    if "link" in entry and not _LINK.fullmatch(entry["link"]):
        raise ValueError("a link")
    for name, size in entry.get("pieces", ()):
        if (name and not _OBJECT.fullmatch(name)) or type(size) is not int or size < 0:
            raise ValueError("a piece")


class StoredRun(Published):
    """A run in an object store that this process writes, with its folder on this machine."""

    def __init__(self, url: str, index: Index, version: Version, folder: Path) -> None:
        """index, version: those by which this process became the writer, see `_take`."""
        self.url, self.folder = url, folder
        self._objects, self._pieces = Objects(url), Objects(url, PIECE)
        self._index, self._version = index, version
        self._stamps: dict[str, tuple[_Stamp, Tree]] = {}
        """{path: (its stamp, entry)} of the files at the last look."""
        self._kept: dict[str, Tree] = {}
        """Entries of files that are not in the folder and stay as they are."""
        self._say: Say = _tell
        self._swapping, self._ended = threading.Lock(), threading.Event()
        self._successor = ""
        self._behind = False
        threading.Thread(target=self._stay_alive, name="alive", daemon=True).start()

    @classmethod
    def claim(cls, url: str, new: bool = False, lease: float | None = None) -> StoredRun:
        """Become the writer of a run, in a new folder: of a new run, or of one whose writer has
        ended."""
        url = checked_url(url)
        index, version = _take(Objects(url), new, lease)
        work = _cache(url) / f"write-{index.epoch}-{index.writer[:8]}"
        run = cls(url, index, version, work / PurePosixPath(url).name)
        try:
            _remove_old(work)
            files.make_folder(work)
            run._sweep()
            if not new:
                fetch(run._pieces, index, run.folder)
            note_origin(run.folder, url, index)
        except BaseException:
            run.close()
            raise
        atexit.register(run._remove)
        return run

    def report_to(self, say: Say) -> None:
        """Where notices of a store that does not answer go."""
        self._say = say

    def check(self) -> None:
        """Raise if another process has become the writer."""
        if self._successor:
            raise EtudeError(
                f"{self.url} is being written by process {self._successor}, which took it over "
                f"after {self._index.lease:g} s without a sign of life of this one: this one has "
                "stopped, and has saved nothing since."
            )

    def publish(self, holder: str | None = None) -> None:
        """Upload what the folder has and the store has not, and commit it.

        Where the store does not answer, the run goes on, and the next `publish` makes up for it.
        """
        self.check()
        try:
            with waiting(f"uploading to {self.url}"):
                self._commit(self._uploaded(), self._index.holder if holder is None else holder)
        except StoreFault as error:
            self._behind = True
            self._say(f"{error} The last save is on this machine only, in {self.folder}.")
            return
        if self._behind:
            self._behind = False
            self._say(f"{self.url} has every save again.")

    def close(self) -> None:
        """Publish the folder as it is, and let others write the run."""
        if self._ended.is_set():
            return
        try:
            if self._successor:
                return
            if (self.folder.parent / _ORIGIN).exists() and self.folder.is_dir():
                self.publish(holder="")
            else:  # nothing has been made of it
                with suppress(EtudeError):
                    self._commit(self._index.files, "")
        finally:
            self._ended.set()

    def _stay_alive(self) -> None:
        """Write signs of life, and notice another writer."""
        while True:
            with suppress(StoreFault):
                self._objects.put(f"alive/{self._index.epoch}", self._index.writer.encode())
                with self._swapping:
                    head = self._objects.head(INDEX)
                    if head is None or head[0] != self._version:
                        self._notice()
            if self._successor or self._ended.wait(self._index.lease / _BEATS):
                return

    def _notice(self) -> None:
        found = read_index(self._objects)
        if found is None or found[0].writer != self._index.writer:
            self._successor = (found and found[0].holder) or "unknown"

    def _commit(self, entries: dict[str, Tree], holder: str) -> None:
        """Replace the index, and delete the objects that it no longer names."""
        before = self._index
        if entries == before.files and holder == before.holder:
            return
        after = replace(before, serial=before.serial + 1, holder=holder, files=entries)
        with self._swapping:
            try:
                self._version = self._objects.swap(INDEX, after.encode(), self._version)
            except Changed:
                self._notice()
                self.check()
                raise
            self._index = after
        self._objects.delete(before.objects - after.objects)
        note_origin(self.folder, self.url, after)

    def _uploaded(self) -> dict[str, Tree]:
        """Entries of all files in the folder, after their new pieces were uploaded."""
        known = {_hash_of(name): name for name in self._index.objects}
        entries = dict(self._kept)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            waiting_for = []
            for path, entry in _tree(self.folder):
                if entry is not None:
                    entries[path] = entry
                    continue
                stamp = _stamp_of(self.folder / path)
                before = self._stamps.get(path)
                if before is not None and before[0] == stamp and before[0].settled:
                    entries[path] = before[1]
                    continue
                sizes = [n for _, n in self._index.files.get(path, {}).get("pieces", ())]
                cuts = _cut(stamp.size, sizes)
                upload = [
                    pool.submit(self._upload, self.folder / path, start, size, known)
                    for start, size in cuts
                ]
                waiting_for.append((path, stamp, upload))
            for path, stamp, upload in waiting_for:
                with suppress(FileNotFoundError):  # removed meanwhile
                    entries[path] = {"pieces": [list(each.result()) for each in upload]}
                    self._stamps[path] = stamp, entries[path]
        return dict(sorted(entries.items()))

    def _upload(self, path: Path, start: int, size: int, known: dict[str, str]) -> tuple[str, int]:
        """(object, size) of a piece, uploaded unless the store has it."""
        with files.open_regular(path) as stream:
            if _is_hole(stream.fileno(), start, size):
                return "", size
            data = os.pread(stream.fileno(), size, start)
        sha = hashlib.sha256(data).hexdigest()
        if sha in known:
            return known[sha], len(data)
        name = f"objects/{self._index.epoch}-{self._index.serial + 1}-{sha}"
        self._pieces.put(name, data)
        return name, len(data)

    def _sweep(self) -> None:
        """Delete what earlier writers uploaded and did not commit."""
        with suppress(StoreFault):
            left = set(self._objects.names("objects/")) - self._index.objects
            earlier = {name for name in left if _epoch_of(name) < self._index.epoch}
            beats = self._objects.names("alive/")
            self._objects.delete(earlier | {b for b in beats if _epoch_of(b) < self._index.epoch})

    def _remove(self) -> None:
        """Delete the folder if the store has all of it."""
        if not self._behind and not self._successor:
            shutil.rmtree(self.folder.parent, ignore_errors=True)


class StoredCopy(Published):
    """A run in an object store whose files this process reads, in a folder on this machine."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    @property
    def num_bytes(self) -> int:
        """Bytes of the run in the store."""
        return _origin(self.folder).num_bytes

    def signs(self) -> tuple[float, bool]:
        """(seconds since the last commit, whether its writer is alive), by this machine's clock."""
        origin, objects = _origin(self.folder), Objects(self.url)
        names = (INDEX, f"alive/{origin.epoch}")
        heads = [objects.head(name) for name in names]
        committed, alive = (time.time() - (head[1] if head else 0.0) for head in heads)
        is_alive = bool(origin.holder) and min(committed, alive) < origin.lease + _CLOCK
        return max(committed, 0.0), is_alive

    def publish(self) -> None:
        """Publish what was added to the folder, such as evaluations, unless the run was written
        since."""
        origin, objects = _origin(self.folder), Objects(self.url)
        if not _has_changed(self.folder, origin):
            return
        found = read_index(objects)
        if found is None or found[0].serial != origin.serial or found[0].holder:
            _tell(f"{self.url} is being written: what was added to it stays in {self.folder}.")
            return
        index, version = _take(objects, new=False)
        run = StoredRun(self.url, index, version, self.folder)
        run._kept = {path: e for path, e in index.files.items() if not is_read(path)}
        run.close()


def _take(objects: Objects, new: bool, lease: float | None = None) -> tuple[Index, Version]:
    """Replace the index by one with the next epoch, held by this process; raises if another one
    writes the run."""
    url = objects.url
    while True:
        found = read_index(objects)
        before, version = (Index(), None) if found is None else found
        if new and before.files:
            raise UsageError(
                f"{url} exists already and is never overwritten: continue it with "
                f"`etude resume {url}`, or choose another place."
            )
        if not new and not before.files:
            raise UsageError(f"There is no run {url}. Check the URL.")
        if before.holder and not _is_silent(objects, before, version):
            continue
        mine = replace(
            before,
            epoch=before.epoch + 1,
            serial=before.serial + 1,
            writer=uuid.uuid4().hex,
            holder=f"{os.getpid()} on {socket.gethostname()}",
            lease=lease or before.lease,
        )
        try:
            return mine, objects.swap(INDEX, mine.encode(), version)
        except Changed:
            _refuse_held(objects)


def _refuse_held(objects: Objects) -> None:
    """Raise if a process writes the run."""
    found = read_index(objects)
    if found is not None and found[0].holder:
        raise UsageError(
            f"{objects.url} is being written by process {found[0].holder}; wait for it to finish, "
            "or stop it first."
        )


def _is_silent(objects: Objects, index: Index, version: Version | None) -> bool:
    """Wait until a writer has been silent for its lease; False if it has ended meanwhile.

    Raises if it is alive. Times are those of the store, whose clock is asked by writing to it.
    """
    alive = f"alive/{index.epoch}"
    heads = [objects.head(name) for name in (INDEX, alive)]
    age = objects.time(uuid.uuid4().hex) - max((head[1] for head in heads if head), default=0.0)
    end = time.monotonic() + index.lease + _CLOCK - max(age, 0.0)
    with waiting(f"waiting for a sign of life of process {index.holder}, which was writing"):
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(index.lease / _BEATS, 1.0, left))
            now = objects.head(INDEX)
            if now is None or now[0] != version or objects.head(alive) != heads[1]:
                _refuse_held(objects)
                return False
    return True


def read_index(objects: Objects) -> tuple[Index, Version] | None:
    """The index of a run and its version; None without one."""
    found = objects.read(INDEX)
    return None if found is None else (Index.decode(found[0], objects.url), found[1])


def exists(url: str) -> bool:
    """Whether there is a run at a URL."""
    found = read_index(Objects(url))
    return found is not None and bool(found[0].files)


def fetch(
    objects: Objects, index: Index, folder: Path, wanted: Callable[[str], bool] = lambda path: True
) -> Index:
    """Download the files of a run, except those that `folder` has; returns the index they are of.

    Where the writer has deleted an object meanwhile, the newer index is fetched. wanted: which
    paths.
    """
    for _ in range(10):
        try:
            with waiting(f"downloading {objects.url}"):
                _download(objects, index, folder, wanted)
            return index
        except FileNotFoundError:
            found = read_index(objects)
            if found is None or found[0].serial == index.serial:
                break
            index = found[0]
    raise StoreFault(f"{objects.url} names objects that the store does not have.")


def _download(objects: Objects, index: Index, folder: Path, wanted: Callable[[str], bool]) -> None:
    before = _origin(folder).files if folder.is_dir() else {}
    (folder.parent / _ORIGIN).unlink(missing_ok=True)  # until all of it is there
    entries = {path: entry for path, entry in index.files.items() if wanted(path)}
    for path in before.keys() - entries.keys():
        files.remove_tree(folder / path)
    files.make_folder(folder)
    with ThreadPoolExecutor(_PARALLEL) as pool:
        loading: list[Any] = []
        for path, entry in sorted(entries.items()):
            here = folder / path
            here.parent.mkdir(parents=True, exist_ok=True)
            if "link" in entry:
                files.replace_link(here, entry["link"])
            elif "pieces" not in entry:
                here.mkdir(exist_ok=True)
            elif before.get(path) != entry or not here.is_file():
                here.unlink(missing_ok=True)
                size = sum(size for _, size in entry["pieces"])
                with files.explain_os_errors("write", here), here.open("xb") as stream:
                    stream.truncate(size)
                start = 0
                for name, size in entry["pieces"]:
                    if name:
                        loading.append(pool.submit(_load, objects, name, size, here, start))
                    start += size
        for each in loading:
            each.result()


def _load(objects: Objects, name: str, size: int, path: Path, start: int) -> None:
    data = objects.get(name)
    if data is None:
        raise FileNotFoundError(name)
    if len(data) != size or hashlib.sha256(data).hexdigest() != _hash_of(name):
        raise StoreFault(f"{objects.url}/{name} is damaged.")
    with files.explain_os_errors("write", path), path.open("r+b") as stream:
        stream.seek(start)
        stream.write(data)


def note_origin(folder: Path, url: str, index: Index) -> None:
    """Write down where a folder of this machine is published, and what it was made from."""
    document = {"url": url, "index": asdict(index)}
    files.replace_file(folder.parent / _ORIGIN, [encode_sealed(document)])


def _origin(folder: Path) -> Index:
    try:
        document = decode_sealed((folder.parent / _ORIGIN).read_bytes())
        return Index(**document["index"])
    except (OSError, ValueError, KeyError, TypeError):
        return Index()


def copy_of(folder: Path) -> Published:
    """Where a folder of the cache is published; nowhere for any other folder."""
    with suppress(OSError, ValueError, KeyError):
        url = str(decode_sealed((folder.parent / _ORIGIN).read_bytes(), must=True)["url"])
        # A file of that name beside a run of someone else must not name a place to write to.
        if folder.absolute().parent.parent == _cache(url):
            return StoredCopy(url, folder)
    return Published()


def is_read(path: str) -> bool:
    """Whether a file is downloaded for readers: all but replay buffers."""
    return not path.startswith("replay/")


def is_listed(path: str) -> bool:
    """Whether a file is downloaded to list a run: neither checkpoints nor what was evaluated."""
    return bool(re.fullmatch(r"(?!events\.)[^/]+|checkpoints/[^/]+", path))


def find_runs(url: str, level: int = 5) -> list[str]:
    """The URLs of all runs below a URL, or of the run itself."""
    url = checked_url(url)
    objects, waiting_for, found = Objects(url), [("", level)], list[str]()
    while waiting_for:
        prefix, depth = waiting_for.pop()
        folders, names = objects.folders(prefix)
        if f"{prefix}{INDEX}" in names:
            found.append(f"{url}/{prefix}".rstrip("/"))
        elif depth:
            waiting_for += [(folder, depth - 1) for folder in folders]
    return sorted(found)


def mirror(url: str, wanted: Callable[[str], bool] = is_read, kind: str = "read") -> Path:
    """A copy of a run for reading, in the cache of this machine; the path of its folder. kind: name
    of the copy, if not all that readers read is `wanted`."""
    url = checked_url(url)
    objects = Objects(url, PIECE)
    found = read_index(objects)
    if found is None or not found[0].files:
        raise UsageError(f"There is no run {url}. Check the URL.")
    folder = _cache(url) / kind / PurePosixPath(url).name
    files.make_folder(folder.parent)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        note_origin(folder, url, fetch(objects, found[0], folder, wanted))
    return folder


def _has_changed(folder: Path, origin: Index) -> bool:
    """Whether files were added to a folder, or written, after its origin was noted."""
    noted = os.lstat(folder.parent / _ORIGIN).st_mtime_ns
    return any(
        path not in origin.files or os.lstat(folder / path).st_mtime_ns > noted
        for path, entry in _tree(folder)
        if entry is None
    )


def _cache(url: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "etude" / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _remove_old(work: Path) -> None:
    """Delete the folders of earlier writers of this run that were killed on this machine."""
    for old in work.parent.glob("write-*"):
        inside = [path for path in old.iterdir() if path.is_dir()] if old.is_dir() else []
        if old != work and not any(is_locked(path) for path in inside):
            shutil.rmtree(old, ignore_errors=True)


def _tree(folder: Path) -> Iterator[tuple[str, Tree | None]]:
    """(path, entry) of everything in a folder; None for files, of which the bytes decide."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _SKIPPED.fullmatch(name))
        for name in sorted([*folders, *names]):
            path = Path(here, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink():
                if name in folders:
                    folders.remove(name)
                with suppress(OSError):
                    yield relative, {"link": os.readlink(path)}
            elif name in folders:
                yield relative, {}
            elif not _SKIPPED.fullmatch(name) and path.is_file():
                yield relative, None


def _cut(size: int, before: Iterable[int]) -> list[tuple[int, int]]:
    """[(start, size)] of the pieces of a file, at the same places as before, so that a file that
    has grown uploads its end. Short pieces at the end are joined."""
    sizes, used = list[int](), 0
    for each in before:
        if not each or used + each > size:
            break
        sizes.append(each)
        used += each
    rest = [min(PIECE, size - start) for start in range(used, size, PIECE)]
    sizes += rest
    short = 0
    while short < len(sizes) and sizes[-1 - short] < _SHORT:
        short += 1
    if short > _MOST_SHORT:
        joined = sum(sizes[-short:])
        sizes[-short:] = [min(PIECE, joined - start) for start in range(0, joined, PIECE)]
    return list(zip(accumulate([0, *sizes[:-1]]), sizes, strict=True)) if sizes else []


def _is_hole(fd: int, start: int, size: int) -> bool:
    """Whether a stretch of a file was never written: zeros that take no space."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA) >= start + size
    except OSError as error:
        return error.errno == errno.ENXIO  # a hole up to the end


@dataclass(frozen=True)
class _Stamp:
    inode: int
    size: int
    mtime: int
    ctime: int
    settled: bool = field(compare=False)
    """Whether a write after this look would have changed the times."""


def _stamp_of(path: Path) -> _Stamp:
    found = os.lstat(path)
    settled = time.time() - found.st_ctime_ns / 1e9 > _SETTLED
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, settled)


def _hash_of(name: str) -> str:
    found = _OBJECT.fullmatch(name)
    return found[1] if found else ""


def _epoch_of(name: str) -> int:
    number = PurePosixPath(name).name.partition("-")[0]
    return int(number) if number.isdecimal() else sys.maxsize


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
