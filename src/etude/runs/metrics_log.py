"""metrics.jsonl: one JSON row per line, truncated on resume to the position in the checkpoint.

Rows may be millions. A position has a bounded size, and a resume reads the bytes before it once, to
hash them, without parsing rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from etude.core.errors import Damaged, EtudeError
from etude.core.history import History, Row, Thinned
from etude.core.trees import Tree
from etude.runs import files
from etude.runs.files import AppendFile, DiskFault

Say = Callable[[str], None]
LOST = "lost"
"""The only field of a line that replaces a damaged row: the row's number."""
_LOST_LINE = b'{"lost": '
START: Tree = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
"""The position before the first row."""
MARKS = 1024
"""Most hashes of stretches of rows in a position. Up to this number of rows, a stretch is one row;
in longer runs it is 2, 4, 8, ... rows, all of which are lost by a damaged byte."""
_FACTOR, _MODULUS = 0x01000193, 1 << 32
_LONGEST = 1 << 20
"""Most bytes of a row, which has some thousands."""
_FREE = ("time/", "system/")


class MetricsLog:
    """Rows on disk, with three kinds of hashes.

    The SHA-256 of all bytes shows whether the file is unchanged since a checkpoint; `marks` show
    which rows of a damaged file are intact; `chain`, over rows without the columns of time, shows
    whether two runs agree.
    """

    def __init__(
        self,
        path: Path,
        say: Say = lambda text: None,
        check_writer: Callable[[], None] = lambda: None,
    ) -> None:
        """say: prints which rows were lost. check_writer: raises if rows must not be written."""
        self.path = path
        self._say, self._check_writer = say, check_writer
        self._file = AppendFile(path)
        self._read: _Read | None = None

    @property
    def _so_far(self) -> _Read:
        """State of the rows in the file, which are read unless a position was loaded."""
        if self._read is None:
            self._read = _Read.of_rows(self.path)
        return self._read

    @property
    def num_rows(self) -> int:
        return self._so_far.marks.count

    def append(self, row: Row) -> None:
        """Append a row; NaN and infinities are written as null."""
        self._check_writer()
        so_far, finite = self._so_far, _finite(row)
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        try:
            self._file.append(line)
        except DiskFault:
            with suppress(DiskFault):  # an incomplete line must not precede the next one
                self._file.truncate(so_far.size)
            raise
        so_far.add(line, finite)

    def begin(self, history: Iterable[Row]) -> None:
        """Do nothing: `load_state_dict` has truncated the file."""

    write = append

    def position(self) -> Tree:
        """Fsync all rows so far; returns their position, a tree of bounded size."""
        so_far = self._so_far
        self._file.fsync()
        return so_far.position()

    def cut_back(self, position: Tree) -> None:
        """Truncate the file to a recorded position.

        Damaged rows before it are replaced by lines that mark them as lost, and a copy of the
        damaged file is kept.
        """
        found = _Read.of_bytes(self.path, int(position["bytes"]))
        if found.sha.hexdigest() == position["sha256"]:
            self._file.truncate(found.size)
            self._read = found.completed(self.path, position)
            return
        if "rows" not in position:  # saved by an early version without marks
            raise EtudeError(
                f"{self.path} is not the file the checkpoint saw: earlier rows were changed or "
                "lost. Put the original file back to resume this run."
            )
        marks = Marks.at(position)
        parts, lost = salvage(self.path, marks)
        what = f"{self.path} was damaged, and is repaired: every row is intact"
        if lost:
            what = (
                f"{self.path} is damaged: of {marks.count:,} rows it has lost "
                f"{named(lost)}, marked so in it. Nothing else is lost, but the log is not that of "
                "an untouched run; `etude resume --checkpoint STEP` from before them makes them "
                "again"
            )
        if _same(self.path, _joined(self.path, parts)):  # repaired by an earlier resume
            self._say(f"{what}.")
        else:
            aside = files.free_path(self.path.with_name(f"{self.path.name}.damaged"))
            files.write_file(aside, blocks_of(self.path))
            self._say(f"{what}. The file as it was is kept as {aside.name}.")
            self._file.close()
            files.replace_file(self.path, _joined(self.path, parts))
            self._file = AppendFile(self.path)
        self._read = _Read.of_rows(self.path)

    def state_dict(self) -> Tree:
        return self.position()

    def load_state_dict(self, state: Tree) -> None:
        self.cut_back(state)

    def close(self) -> None:
        self._file.close()


class Marks:
    """A bounded number of hashes of stretches of rows, of which two are joined when it is reached.

    The hash of a stretch is a polynomial in the CRC-32 of its rows, so that stretches can be joined
    without reading their rows, and found at any position in a file.
    """

    def __init__(self) -> None:
        self.count = 0
        self.stretch = 1
        """Rows of each stretch except the last."""
        self.values: list[int] = []

    def add(self, crc: int) -> None:
        """Add the CRC-32 of the next row."""
        if self.count % self.stretch == 0:
            if len(self.values) == MARKS:
                shift = pow(_FACTOR, self.stretch, _MODULUS)
                pairs = zip(self.values[::2], self.values[1::2], strict=True)
                self.values = [(a * shift + b) % _MODULUS for a, b in pairs]
                self.stretch *= 2
            self.values.append(0)
        self.values[-1] = (self.values[-1] * _FACTOR + crc) % _MODULUS
        self.count += 1

    def position(self) -> Tree:
        marks = "".join(f"{value:08x}" for value in self.values)
        return {"rows": self.count, "stretch": self.stretch, "marks": marks}

    @classmethod
    def at(cls, position: Tree) -> Marks:
        """The marks of a position; early versions have a list of the CRC-32 of each row."""
        marks, rows = cls(), position["rows"]
        if isinstance(rows, list):
            for crc in rows:
                marks.add(int(crc))
            return marks
        text = str(position["marks"])
        marks.count, marks.stretch = int(rows), max(int(position["stretch"]), 1)
        marks.values = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
        if len(marks.values) != -(-marks.count // marks.stretch):
            raise ValueError("as many marks as stretches of rows")
        return marks


def planned_position(rows: int) -> Tree:
    """A placeholder for a position after `rows`, to plan its size."""
    stretch = 1
    while stretch * MARKS < rows:
        stretch *= 2
    hashes = {"sha256": "0" * 64, "chain": "0" * 64, "marks": "0" * 8 * -(-rows // stretch)}
    return {"bytes": rows * 1000, "rows": rows, "stretch": stretch, **hashes}


class _Read:
    """Size and hashes of the rows of a metrics.jsonl so far."""

    def __init__(self) -> None:
        self.size, self.sha, self.marks, self.chain = 0, hashlib.sha256(), Marks(), Chain()

    def add(self, line: bytes, row: Row) -> None:
        self.size += len(line)
        self.sha.update(line)
        self.marks.add(zlib.crc32(line.removesuffix(b"\n")))
        self.chain.add(row)

    def position(self) -> Tree:
        position = {"bytes": self.size, "sha256": self.sha.hexdigest(), "chain": self.chain.value}
        return position | self.marks.position()

    @classmethod
    def of_bytes(cls, path: Path, size: int) -> _Read:
        """Hash the first bytes of a file, without parsing rows."""
        found = cls()
        for block in blocks_of(path, size):
            found.size += len(block)
            found.sha.update(block)
        return found

    @classmethod
    def of_rows(cls, path: Path, end: int | None = None) -> _Read:
        """Read and parse all rows of a file."""
        found = cls()
        for number, line in DiskHistory(path, end).lines():
            found.add(line, parsed(path, number, line))
        return found

    def completed(self, path: Path, position: Tree) -> _Read:
        """Add marks and chain of a position, or compute them if it is of an early version."""
        if not self.size:
            return _Read()
        if not {"chain", "rows"} <= position.keys():
            return _Read.of_rows(path, self.size)
        self.marks, self.chain.value = Marks.at(position), str(position["chain"])
        return self


class Chain:
    """Chained SHA-256 of rows: h(n) = H(h(n - 1), row n).

    Equal for two exact runs: `time/` and `system/` columns and lines of lost rows are left out.
    """

    def __init__(self) -> None:
        self.value = hashlib.sha256().hexdigest()

    def add(self, row: Row) -> None:
        if LOST in row:
            return
        kept = {name: value for name, value in row.items() if not name.startswith(_FREE)}
        text = json.dumps(kept, sort_keys=True)
        self.value = hashlib.sha256(f"{self.value} {text}".encode()).hexdigest()


def chain_of(rows: Iterable[Row]) -> str:
    """Chained hash of rows without `time/` and `system/` columns."""
    chain = Chain()
    for row in rows:
        chain.add(row)
    return chain.value


def older_digest_of(rows: Iterable[Row]) -> str:
    """Hash of rows in fingerprints of early versions, which were not chained."""
    sha, before = hashlib.sha256(b"["), b""
    for row in rows:
        kept = {name: value for name, value in row.items() if not name.startswith(_FREE)}
        sha.update(before + json.dumps(kept, sort_keys=True).encode())
        before = b", "
    sha.update(b"]")
    return sha.hexdigest()


def is_as_saved(path: Path, position: Tree) -> bool:
    """Whether a metrics.jsonl is unchanged up to the position of a checkpoint."""
    found = _Read.of_bytes(path, int(position["bytes"]))
    return bool(found.sha.hexdigest() == position["sha256"])


def chain_at(path: Path, position: Tree) -> str:
    """Chained hash of the rows up to a position; of a damaged file, of its present rows."""
    if "chain" in position and is_as_saved(path, position):
        return str(position["chain"])
    return chain_of(DiskHistory(path, int(position["bytes"])))


Parts = list[tuple[int, int, int]]
"""Parts of a repaired file: (first byte, end, 0) of intact rows, (0, 0, number) of a lost row."""


def salvage(path: Path, marks: Marks) -> tuple[Parts, list[int]]:
    """Find the intact rows of a damaged file by their marks; returns the numbers of lost rows too.

    Stretches of rows are found at any position, so that removed bytes do not affect later rows.
    """
    crcs, ends = _lines(path)
    whole, rest = divmod(marks.count, marks.stretch)
    found = {size: _stretches(crcs, size) for size in {marks.stretch, rest} if size}
    parts: Parts = []
    lost: list[int] = []
    for index, mark in enumerate(marks.values):
        first = index * marks.stretch
        size = marks.stretch if index < whole else rest
        at = found[size].get(mark)
        if at is None:
            gone = range(first + 1, first + size + 1)
            lost += gone
            parts += [(0, 0, number) for number in gone]
        else:
            parts.append((int(ends[at]), int(ends[at + size]), 0))
    return parts, lost


def _lines(path: Path) -> tuple[npt.NDArray[np.uint64], list[int]]:
    """(CRC-32 of every line of a file, its first bytes and the end of the file)."""
    crcs, ends = list[int](), [0]
    for _, line in DiskHistory(path).lines():
        crcs.append(zlib.crc32(line.removesuffix(b"\n")))
        ends.append(ends[-1] + len(line))
    return np.array(crcs, np.uint64), ends


def _stretches(crcs: npt.NDArray[np.uint64], size: int) -> dict[int, int]:
    """{hash: first line} of all stretches of `size` lines."""
    count = len(crcs) - size + 1
    if count <= 0:
        return {}
    values = np.zeros(count, np.uint64)
    for offset in range(size):
        values = (values * np.uint64(_FACTOR) + crcs[offset : offset + count]) % np.uint64(_MODULUS)
    return {value: line for line, value in reversed([*enumerate(values.tolist())])}


def _joined(path: Path, parts: Parts) -> Iterator[bytes]:
    """Bytes of a repaired file; a missing newline at the end is added."""
    for begin, end, lost in parts:
        last = b"\n"
        for last in blocks_of(path, end, begin):
            yield last
        if lost:
            yield json.dumps({LOST: lost}).encode() + b"\n"
        elif not last.endswith(b"\n"):
            yield b"\n"


def _same(path: Path, chunks: Iterable[bytes]) -> bool:
    """Whether a file has these contents."""
    here, there = (hashlib.sha256() for _ in range(2))
    for sha, pieces in ((here, blocks_of(path)), (there, chunks)):
        for piece in pieces:
            sha.update(piece)
    return here.digest() == there.digest()


def blocks_of(path: Path, end: int | None = None, begin: int = 0) -> Iterator[bytes]:
    """Bytes of a file from `begin` to `end` or its end; none if it is missing."""
    if not path.exists():
        return
    with _open(path) as stream:
        stream.seek(begin)
        left = sys.maxsize if end is None else end - begin
        while block := stream.read(min(files.BLOCK, left)):
            left -= len(block)
            yield block


def _open(path: Path) -> BinaryIO:
    return path.open("rb", buffering=files.BLOCK)


class DiskHistory(History):
    """The rows of a metrics.jsonl without lost ones, read when they are iterated.

    Raises `Damaged` for a row that cannot be parsed.
    """

    def __init__(self, path: Path, end: int | None = None) -> None:
        """end: number of bytes to read; by default all."""
        self.path, self._end = path, sys.maxsize if end is None else end
        self._kept: Thinned[tuple[int, bytes]] | None = None

    @classmethod
    def so_far(cls, path: Path) -> DiskHistory:
        """The present rows, without those appended later."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def lines(self, begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of all lines that begin after byte `begin`."""
        if not self.path.exists():
            return
        with _open(self.path) as stream:
            stream.seek(begin)
            left = self._end - begin
            if begin:
                left -= len(stream.readline(_LONGEST))
            number = 0
            while line := stream.readline(min(_LONGEST, left)):
                number, left = number + 1, left - len(line)
                if len(line) == _LONGEST:
                    raise _damaged(self.path, number)
                yield number, line

    def __iter__(self) -> Iterator[Row]:
        for number, line in self.lines():
            row = parsed(self.path, number, line)
            if LOST not in row:
                yield row

    @property
    def last(self) -> Row:
        """The last row, searched from the end."""
        end = min(self._end, self.path.stat().st_size) if self.path.exists() else 0
        size = files.BLOCK
        while end:
            begin = max(end - size, 0)
            lines = b"".join(blocks_of(self.path, end, begin)).removesuffix(b"\n").split(b"\n")
            for line in reversed(lines[1:] if begin else lines):
                row = _row_of(line)
                if row is None:
                    raise Damaged(self.path, f"The last row of {self.path} is damaged: {_FIX}")
                if LOST not in row:
                    return row
            if not begin:
                break
            size *= 2
        return {}

    def thinned(self) -> Thinned[Row]:
        """Kinds of rows differ in their number of columns. Only kept lines are parsed: a million
        takes seconds."""
        if self._kept is None:
            self._kept = Thinned[tuple[int, bytes]]()
            for number, line in self.lines():
                if not line.startswith(_LOST_LINE):
                    kind = line.count(b'": ') - line.count(b'": null')
                    self._kept.add((number, line), kind)

        def row(numbered: tuple[int, bytes]) -> Row:
            # Interned, so that rows share the strings of their names.
            return {sys.intern(name): v for name, v in parsed(self.path, *numbered).items()}

        return self._kept.mapped(row)

    def after(self, step: int, step_of: Callable[[Row], int]) -> Iterator[Row]:
        """Found by bisection, which reads few rows."""
        for number, line in self.lines(self._before(step, step_of)):
            row = parsed(self.path, number, line)
            if LOST not in row and step_of(row) > step:
                yield row

    def _before(self, step: int, step_of: Callable[[Row], int]) -> int:
        """A byte position before all rows after the step."""
        if not self.path.exists():
            return 0
        low, high = 0, min(self._end, self.path.stat().st_size)
        with _open(self.path) as stream:
            while high - low > files.BLOCK:
                middle = (low + high) // 2
                stream.seek(middle)
                stream.readline(_LONGEST)
                row = _row_of(stream.readline(_LONGEST))
                if row is None or LOST in row or step_of(row) > step:
                    high = middle
                else:
                    low = middle
        return low


_FIX = "`etude resume` of the run goes on without it and marks it as lost."


def _damaged(path: Path, number: int) -> Damaged:
    return Damaged(path, f"Row {number:,} of {path} is damaged: {_FIX}")


def _row_of(line: bytes) -> Row | None:
    """Parse a line; None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def parsed(path: Path, number: int, line: bytes) -> Row:
    """Parse a line; raises `Damaged`."""
    row = _row_of(line)
    if row is None:
        raise _damaged(path, number)
    return row


def named(lost: list[int]) -> str:
    """Row numbers in words."""
    if len(lost) > 5 and lost[-1] - lost[0] == len(lost) - 1:
        return f"rows {lost[0]:,} to {lost[-1]:,}"
    few = ", ".join(f"{number:,}" for number in lost[:5])
    more = f" and {len(lost) - 5:,} more" if len(lost) > 5 else ""
    return f"row{'s' if len(lost) > 1 else ''} {few}{more}"


def _finite(value: Any) -> Any:
    """Convert a value for strict JSON: NaN and infinities to None."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
