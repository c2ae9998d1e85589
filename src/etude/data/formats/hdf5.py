"""Untrusted HDF5 files: only plain arrays inside the file itself, checked before they are read.

Links out of the file, external storage, virtual datasets, objects, unknown filters and sizes that
the file cannot hold are refused. HDF5's own code may still crash on a damaged file, which is why
files are read in a subprocess: see `opening.py`.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from etude.core.contracts import Array
from etude.data.formats.base import DataError, DatasetReader, LazyArray, check_array, error_line

_SUFFIXES = (".hdf5", ".h5")
_MAX_DEPTH, _MAX_ARRAYS = 4, 64
_MAX_SMALL = 64 << 20
"""Bytes of an array that is read to describe an episode: actions, rewards, flags."""
_MAX_MEMBERS = 1 << 20
_MAX_LINKS = 8
"""Soft links followed one after the other."""
_MAX_CHUNK = 256 << 20
"""Bytes of one chunk: HDF5 allocates it whole."""
_RATIO = 1100
"""Deflate never packs more than 1,032 bytes into one."""
_SLACK = 4096
_FILTERS = {1, 2, 3, 4, 5, 6, 32000}
"""Deflate, shuffle, checksum, szip, nbit, scale-offset, lzf: the filters of h5py itself."""


def is_hdf5(path: Path) -> bool:
    """Whether a file is HDF5 by its first bytes, or claims to be by its name."""
    return path.is_file() and (path.suffix in _SUFFIXES or bool(h5py.is_hdf5(path)))


class Guarded:
    """An open HDF5 file whose objects are checked before they are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = os.stat(path)
        except OSError as error:
            raise DataError(path, "there is no such file; check the path") from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(path, "is not a plain file; name an HDF5 file or a Minari folder")
        self._size = found.st_size
        if not h5py.is_hdf5(path):
            raise DataError(
                path, "is not an HDF5 file, or its beginning is damaged; get a whole copy of it"
            )
        try:
            self._file = h5py.File(path, "r", locking=False)
        except (OSError, RuntimeError) as error:
            raise DataError(
                path, f"cannot be opened ({error_line(error)}); get a whole copy of it"
            ) from error

    @property
    def root(self) -> Any:
        return self._file["/"]

    def error(self, label: str, what: str) -> DataError:
        """An error about an object in the file."""
        return DataError(self.path, f"'{label}' {what}")

    def names(self, group: Any) -> list[str]:
        """The members of a group, demo_2 before demo_10."""
        if len(group) > _MAX_MEMBERS:
            raise self.error(str(group.name), f"has {len(group):,} members, which is too many")
        return sorted(group, key=_natural)

    def child(self, group: Any, name: str, hops: int = _MAX_LINKS) -> Any:
        """A member of a group, or None; only links inside the file are followed."""
        label = f"{group.name}/{name}".replace("//", "/")
        # The link itself is looked at: h5py's own `in` would open a linked file.
        links, key = group.id.links, name.encode()
        if not links.exists(key):
            return None
        kind = links.get_info(key).type
        if kind == h5py.h5l.TYPE_SOFT:
            return self._follow(group, label, links.get_val(key).decode("utf-8", "replace"), hops)
        if kind != h5py.h5l.TYPE_HARD:
            raise self.error(
                label, "is a link to another file, which is never followed; copy its data here"
            )
        found = group[name]
        if not isinstance(found, h5py.Group | h5py.Dataset):
            raise self.error(label, "is neither a group nor an array")
        return found

    def _follow(self, group: Any, label: str, target: str, hops: int) -> Any:
        if not hops:
            raise self.error(label, "is a link that leads in circles")
        here = self.root if target.startswith("/") else group
        for part in [p for p in target.split("/") if p not in ("", ".")]:
            found = self.child(here, part, hops - 1) if isinstance(here, h5py.Group) else None
            if found is None:
                raise self.error(label, f"is a link to {target!r}, which is not in the file")
            here = found
        return here

    def group(self, parent: Any, name: str) -> Any:
        """A member that is a group, or None."""
        found = self.child(parent, name)
        return found if isinstance(found, h5py.Group) else None

    def text(self, group: Any, name: str) -> str | None:
        """An attribute of a group that is one text, or None."""
        key = name.encode()
        if not h5py.h5a.exists(group.id, key):
            return None
        found = h5py.h5a.open(group.id, key)
        if found.get_space().get_simple_extent_npoints() != 1 or found.dtype.kind not in "SO":
            return None
        if h5py.check_string_dtype(found.dtype) is None:  # an object of another kind
            return None
        value = group.attrs[name]
        value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return value if isinstance(value, str) else None

    def small(self, parent: Any, name: str, steps: int | None = None) -> Array | None:
        """A small array [steps, ...], or None if the group has none; one number a step if `steps`
        are given, [steps]."""
        found = self.child(parent, name)
        if found is None:
            return None
        if not isinstance(found, h5py.Dataset):
            raise self.error(str(found.name), "is a group where an array was expected")
        self.check(found, name)
        if steps is not None and found.shape not in ((steps,), (steps, 1)):
            raise self.error(
                name, f"has the shape {found.shape} beside {steps:,} actions; the file is damaged"
            )
        if found.nbytes > _MAX_SMALL:
            raise self.error(name, f"has {found.nbytes:,} bytes, which is too many")
        array = self.read(found, name)
        return array if steps is None else array.reshape(steps)

    def actions(self, group: Any) -> Array:
        """The actions of an episode, [T, ...]."""
        found = self.small(group, "actions")
        if found is None or not len(found):
            raise self.error("actions", "is missing or empty, and an episode needs actions")
        return found

    def arrays(
        self, group: Any, last: bool = False, prefix: str = "", depth: int = _MAX_DEPTH
    ) -> dict[str, LazyArray]:
        """The arrays of a group and of the groups in it, whose names are joined by dots.

        last: only the last row of each is read.
        """
        if not depth:
            raise self.error(str(group.name), "is nested too deeply")
        found: dict[str, LazyArray] = {}
        for name in self.names(group):
            member = self.child(group, name)
            if isinstance(member, h5py.Group):
                found |= self.arrays(member, last, f"{prefix}{name}.", depth - 1)
            else:
                found[f"{prefix}{name}"] = self.lazy(member, f"{prefix}{name}", last)
            if len(found) > _MAX_ARRAYS:
                raise self.error(str(group.name), f"has over {_MAX_ARRAYS} arrays")
        return found

    def lazy(self, dataset: Any, label: str, last: bool = False) -> LazyArray:
        """An array that is checked and read when it is needed."""
        load, check = partial(self.read, dataset, label, last), partial(self.check, dataset, label)
        return LazyArray(dataset.shape, dataset.dtype, load, check)

    def check(self, dataset: Any, label: str) -> None:
        """Refuse a dataset that is not a plain array within this file; nothing is read for it."""
        check_array(self.path, label, dataset)
        self.check_storage(dataset, label)

    def check_storage(self, dataset: Any, label: str) -> None:
        """Refuse data that is in other files, packed by foreign code, or larger than the file."""
        shape, kind = dataset.shape, dataset.dtype
        layout = dataset.id.get_create_plist()
        if layout.get_external_count() or layout.get_layout() == h5py.h5d.VIRTUAL:
            raise self.error(
                label, "keeps its data in other files, which are never opened; copy it into one"
            )
        for index in range(layout.get_nfilters()):
            code = int(layout.get_filter(index)[0])
            if code not in _FILTERS:
                raise self.error(
                    label,
                    f"is packed by filter {code}, which needs foreign code; repack it with "
                    "`h5repack -f GZIP=4`",
                )
        declared = math.prod(shape) * kind.itemsize  # Python's integers do not wrap around
        chunk = math.prod(dataset.chunks or (0,)) * kind.itemsize
        if chunk > _MAX_CHUNK:
            raise self.error(
                label,
                f"has chunks of {chunk:,} bytes for {declared:,} in all; repack it with "
                "`h5repack -l CHUNK=...`",
            )
        stored = dataset.id.get_storage_size()
        ratio = _RATIO if layout.get_nfilters() else 1
        if stored > self._size or declared > stored * ratio + (_SLACK if stored else 0):
            raise self.error(
                label,
                f"claims {declared:,} bytes (shape {shape}), of which the file holds {stored:,}: "
                "it is damaged or was never written",
            )

    def read(self, dataset: Any, label: str, last: bool = False) -> Array:
        """A checked array, whole or its last row."""
        try:
            return np.asarray(dataset[-1:] if last else dataset[...])
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise self.error(
                label, f"cannot be read ({error_line(error)}); get a whole copy"
            ) from error


class HDF5Reader(DatasetReader):
    """An open HDF5 file with a group for each episode."""

    def __init__(
        self, guarded: Guarded, names: Sequence[str], masks: Mapping[str, Collection[str]]
    ) -> None:
        super().__init__(guarded.path, names, masks)
        self.guarded = guarded

    def default_observations(self, names: Sequence[str]) -> Sequence[str]:
        """The simulator's states are read only by name, or if there is nothing else."""
        return [name for name in names if not name.startswith("states")] or names


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sorting key in which numbers count as numbers."""
    parts = re.split(r"(\d{1,18})", name)
    return tuple((1, int(p), "") if p.isdigit() and p.isascii() else (0, 0, p) for p in parts)
