"""The small files beside a store's blocks; untrusted JSON is read with limits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.data.store.geometry import StoreGeometry
from etude.data.store.log import DamagedStore, Stamp, file_size, fsync, stamp_of
from etude.runs.documents import decode_sealed, encode_sealed
from etude.runs.files import Disk, explain_os_errors

DESCRIPTION, SEAL, EXCLUDED = "store.json", "sealed.json", "excluded.json"
_EXCLUDED_FORMAT = "etude-excluded"
_MAX_JSON = 64 << 20


def create_folder(path: Path, disk: Disk) -> None:
    """Create a folder whose parent exists, unless it exists."""
    with explain_os_errors("create the folder", path), suppress(FileExistsError):
        disk.mkdir(path)
    fsync_folder(path.parent, disk)


def fsync_folder(path: Path, disk: Disk) -> None:
    """Make the names in a folder durable."""
    fsync(disk, path, os.O_RDONLY | os.O_DIRECTORY)


def write_json(path: Path, document: Tree, disk: Disk) -> str:
    """Write sealed JSON atomically and flush it; returns the SHA-256 of the file."""
    beside = path.with_name(f".tmp-{path.name}")
    text = encode_sealed(document)
    data = memoryview(text)
    with explain_os_errors("write", path):
        fd = disk.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            while len(data):
                data = data[disk.write(fd, data) :]
            disk.fsync(fd)
        finally:
            disk.close(fd)
        disk.rename(beside, path)
    fsync_folder(path.parent, disk)
    return hashlib.sha256(text).hexdigest()


def read_json(path: Path, sha256: str | None = None) -> Tree:
    """Read a JSON object; a file whose SHA-256 is known may have any size."""
    if file_size(path) > _MAX_JSON and sha256 is None:
        raise DamagedStore(path, "is too large to be plausible")
    with explain_os_errors("read", path):
        text = path.read_bytes()
    if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256:
        raise DamagedStore(path, "is damaged: its SHA-256 is not what was recorded")
    try:
        return decode_sealed(text)
    except ValueError as error:
        raise DamagedStore(path, str(error)) from error


def read_excluded(path: Path, seal: str, num_episodes: int) -> Array:
    """[n] int64, ascending: the excluded episodes of the dataset in a folder.

    seal: the hash of the dataset with all of its `num_episodes` episodes.
    """
    if not os.path.lexists(path / EXCLUDED):
        return np.empty(0, np.int64)
    document = read_json(path / EXCLUDED)
    numbers = document.get("episodes")
    if document.get("format") != _EXCLUDED_FORMAT or not isinstance(numbers, list):
        raise DamagedStore(path / EXCLUDED, "does not list excluded episodes")
    if document.get("of") != seal:
        raise DamagedStore(path / EXCLUDED, "is the list of another dataset; delete it")
    sane = all(type(n) is int for n in numbers) and 0 < len(numbers) < num_episodes
    if not sane or numbers != sorted({n for n in numbers if 0 <= n < num_episodes}):
        raise DamagedStore(path / EXCLUDED, "lists episodes that the dataset does not have")
    return np.array(numbers, np.int64)


def write_excluded(path: Path, seal: str, numbers: Array, disk: Disk) -> None:
    """Replace the list of excluded episodes; `numbers` [n] ascending, at least one."""
    document = {"format": _EXCLUDED_FORMAT, "of": seal, "episodes": numbers.tolist()}
    write_json(path / EXCLUDED, document, disk)


def other_data(path: Path) -> EtudeError:
    """The error of a run that is resumed on other data than its own."""
    fix = "exclude the same episodes again, if any were (etude data exclude)"
    if os.path.lexists(path / EXCLUDED):
        fix = f"it has excluded episodes, which `etude data include {path}` includes again"
    return EtudeError(f"{path} is not the data this run was started with: {fix}.")


class WatchedFiles:
    """The small files of a dataset, read when it is opened and compared later."""

    def __init__(self, folder: Path, names: tuple[str, ...], seal: str) -> None:
        """seal: the hash of the dataset."""
        self._paths = [folder / name for name in names if os.path.lexists(folder / name)]
        self._list = folder / EXCLUDED
        self._seal, self._stamps, self._excluded = seal, self._look(), self._read_list()

    def check_unchanged(self, read: Callable[[], str]) -> None:
        """Raise if they describe another dataset now; `read` opens it again for its hash."""
        if (now := self._look()) == self._stamps:
            return
        if self._read_list() != self._excluded:
            raise DamagedStore(
                self._list,
                "was changed while the dataset was in use; exclude the same episodes as before "
                "(etude data exclude, include), then resume the run",
            )
        if read() != self._seal:
            raise DamagedStore(self._list.parent, "was changed while it was in use")
        self._stamps = now

    def _look(self) -> list[Stamp | None]:
        there = stamp_of(self._list) if os.path.lexists(self._list) else None
        return [*(stamp_of(path) for path in self._paths), there]

    def _read_list(self) -> bytes:
        """The list of excluded episodes; empty without one."""
        with explain_os_errors("read", self._list), suppress(FileNotFoundError):
            return self._list.read_bytes()
        return b""


def read_geometry(path: Path) -> StoreGeometry:
    """Read the geometry of the store in a folder."""
    if not path.is_dir():
        raise UsageError(f"There is no episode store at {path}; check the path.")
    document = read_json(path / DESCRIPTION)
    try:
        return StoreGeometry.parse(document)
    except (ValueError, UsageError) as error:
        raise DamagedStore(path / DESCRIPTION, f"cannot be used: {error}") from error


def check_table(table: Array, first: int, count: int, geometry: StoreGeometry, path: Path) -> None:
    """Refuse an index that points outside the steps, before it is used."""
    starts, lengths = table["start"], table["length"]
    sane = (lengths >= 1) & (lengths <= geometry.max_episode_steps)
    sane &= (starts >= first) & (starts < count)
    ends = starts + (np.where(sane, lengths, 1) - 1) * geometry.lanes
    sane &= (ends < count) & np.isfinite(table["return"])
    # Ordered by time, those of the same time in any order of lanes, without duplicates.
    sane[1:] &= np.diff(ends // geometry.lanes) >= 0
    sane &= np.isin(np.arange(len(ends)), np.unique(ends, return_index=True)[1])
    if not sane.all():
        raise DamagedStore(path, f"has an index that is invalid at episode {np.argmin(sane):,}")
