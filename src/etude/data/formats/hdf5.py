"""HDF5 from a stranger: only plain arrays inside the file itself, checked before they are read.

Links out of the file, external storage, virtual datasets, objects, unknown filters and sizes that
the file cannot hold are refused. This does not make HDF5's own code safe from damaged files, so
it is used in a process that may die: see `child.py`.
"""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from etude.data.formats.summary import Array, DataError, Field

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Names that can be those of an observation."""
MOST_MEMBERS = 1 << 20
MOST_HOPS = 8
"""Soft links followed one after the other."""
_MOST_CHUNK = 256 << 20
"""Bytes of one chunk: HDF5 allocates it whole."""
_MOST_DIMENSIONS = 7
_RATIO = 1100
"""Deflate never packs more than 1,032 bytes into one."""
_SLACK = 4096
_FILTERS = {1, 2, 3, 4, 5, 6, 32000}
"""Deflate, shuffle, checksum, szip, nbit, scale-offset, lzf: what h5py brings itself."""
_STORED = {
    "float64": "float32",
    "float32": "float32",
    "float16": "float16",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}
"""How numbers are kept; all others stay as they are, uint8 images above all."""


def stored_dtype(dtype: np.dtype[Any]) -> str:
    """How numbers of a type are kept."""
    name = np.dtype(dtype).newbyteorder("=").name
    return _STORED.get(name, name)


def to_stored(array: Array) -> Array:
    """As it is kept: float32 for float64, one column for plain numbers."""
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, dtype=stored_dtype(array.dtype))
    return made.reshape(made.shape if made.ndim > 1 else (len(made), 1))


def flat(error: BaseException) -> str:
    """An error's text on one line."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


class Guarded:
    """An open HDF5 file that gives out nothing unchecked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.episode: str | None = None
        """The episode that is being read, for messages."""
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
                path, f"cannot be opened ({flat(error)}); get a whole copy of it"
            ) from error

    @property
    def root(self) -> Any:
        return self._file["/"]

    def refuse(self, label: str, what: str) -> DataError:
        """What is wrong with an object in the file."""
        return DataError(self.path, f"'{label}' {what}", self.episode)

    def names(self, group: Any) -> list[str]:
        """The members of a group, demo_2 before demo_10."""
        if len(group) > MOST_MEMBERS:
            raise self.refuse(str(group.name), f"has {len(group):,} members, which is absurd")
        return sorted(group, key=_natural)

    def child(self, group: Any, name: str, hops: int = MOST_HOPS) -> Any:
        """A member of a group, or None; links are followed only where they stay in the file."""
        label = f"{group.name}/{name}".replace("//", "/")
        # Asked of the links themselves: h5py's own `in` would open a linked file to see.
        links, key = group.id.links, name.encode()
        if not links.exists(key):
            return None
        kind = links.get_info(key).type
        if kind == h5py.h5l.TYPE_SOFT:
            return self._follow(group, label, links.get_val(key).decode("utf-8", "replace"), hops)
        if kind != h5py.h5l.TYPE_HARD:
            raise self.refuse(
                label, "is a link to another file, which is never followed; copy its data here"
            )
        found = group[name]
        if not isinstance(found, h5py.Group | h5py.Dataset):
            raise self.refuse(label, "is neither a group nor an array")
        return found

    def _follow(self, group: Any, label: str, target: str, hops: int) -> Any:
        if not hops:
            raise self.refuse(label, "is a link that leads in circles")
        here = self.root if target.startswith("/") else group
        for part in [p for p in target.split("/") if p not in ("", ".")]:
            found = self.child(here, part, hops - 1) if isinstance(here, h5py.Group) else None
            if found is None:
                raise self.refuse(label, f"is a link to {target!r}, which is not in the file")
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

    def array(self, parent: Any, name: str) -> Any:
        """A member that is a plain array, checked and not yet read, or None."""
        found = self.child(parent, name)
        if found is None:
            return None
        label = str(found.name)
        if not isinstance(found, h5py.Dataset):
            raise self.refuse(label, "is a group where an array was expected")
        self.check(found, label)
        return found

    def check(self, dataset: Any, label: str) -> None:
        """Refuse what is not a plain array that this file can hold; nothing is read for it."""
        kind = dataset.dtype
        if kind.kind not in "fiub" or kind.itemsize > 8 or kind.subdtype is not None:
            raise self.refuse(
                label, f"holds {kind} values, not plain numbers; leave it out (--obs)"
            )
        shape = dataset.shape
        if not shape or len(shape) > _MOST_DIMENSIONS:
            raise self.refuse(label, f"has the shape {shape}, not one row per step")
        self.check_storage(dataset, label)

    def check_storage(self, dataset: Any, label: str) -> None:
        """Refuse data that is kept elsewhere, packed by foreign code, or larger than the file."""
        shape, kind = dataset.shape, dataset.dtype
        layout = dataset.id.get_create_plist()
        if layout.get_external_count() or layout.get_layout() == h5py.h5d.VIRTUAL:
            raise self.refuse(
                label, "keeps its data in other files, which are never opened; copy it into one"
            )
        for index in range(layout.get_nfilters()):
            code = int(layout.get_filter(index)[0])
            if code not in _FILTERS:
                raise self.refuse(
                    label,
                    f"is packed by filter {code}, which needs foreign code; repack it with "
                    "`h5repack -f GZIP=4`",
                )
        declared = math.prod(shape) * kind.itemsize  # Python's integers do not wrap around
        chunk = math.prod(dataset.chunks or (0,)) * kind.itemsize
        if chunk > _MOST_CHUNK:
            raise self.refuse(
                label,
                f"has chunks of {chunk:,} bytes for {declared:,} in all; repack it with "
                "`h5repack -l CHUNK=...`",
            )
        stored = dataset.id.get_storage_size()
        ratio = _RATIO if layout.get_nfilters() else 1
        if stored > self._size or declared > stored * ratio + (_SLACK if stored else 0):
            raise self.refuse(
                label,
                f"claims {declared:,} bytes (shape {shape}), of which the file holds {stored:,}: "
                "it is damaged or was never written",
            )

    def read(self, dataset: Any, label: str) -> Array:
        """A whole checked array."""
        try:
            return np.asarray(dataset[...])
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise self.refuse(label, f"cannot be read ({flat(error)}); get a whole copy") from error

    def field(self, dataset: Any) -> Field:
        """What a step of an array becomes here."""
        return Field(tuple(dataset.shape[1:]) or (1,), stored_dtype(dataset.dtype))

    def convert(self, array: Array, label: str) -> Array:
        """As it is stored: float32 for float64, one column for plain numbers; all finite."""
        made = to_stored(array)
        if made.dtype.kind == "f" and not np.isfinite(made).all():
            step = int(np.argmin(np.isfinite(made).reshape(len(made), -1).all(axis=1)))
            raise self.refuse(
                label, f"is not a finite number at step {step:,}; mend or leave out this episode"
            )
        return made


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sorting key in which numbers count as numbers."""
    parts = re.split(r"(\d{1,18})", name)
    return tuple((1, int(p), "") if p.isdigit() and p.isascii() else (0, 0, p) for p in parts)
