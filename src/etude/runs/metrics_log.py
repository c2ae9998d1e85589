"""metrics.jsonl: one JSON row per line, cut back on resume to where the checkpoint saw it."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import Damaged, EtudeError
from etude.core.trees import Tree
from etude.runs import files
from etude.runs.files import AppendFile, DiskFault

Say = Callable[[str], None]
LOST = "lost"
"""The one name in a line that stands for a row that was damaged: its number."""


class MetricsLog:
    """Rows on disk, and hashes of them.

    They cover every byte, `time/` columns too: they tell whether a file is the one that a
    checkpoint saw, not whether two runs agree. The CRC-32 of each row tells which of them are not.
    """

    def __init__(
        self,
        path: Path,
        say: Say = lambda text: None,
        check_writer: Callable[[], None] = lambda: None,
    ) -> None:
        """`say` is told what was lost; `check_writer` raises where rows must not be written."""
        self.path = path
        self._say, self._check_writer = say, check_writer
        self._file = AppendFile(path)
        self._take(path.read_bytes())

    def _take(self, data: bytes) -> None:
        self._size, self._sha, self._crcs = len(data), hashlib.sha256(data), _crcs(data)

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; a number that is not finite becomes null, since JSON has no other word."""
        self._check_writer()
        line = (json.dumps(_finite(row), allow_nan=False) + "\n").encode()
        try:
            self._file.append(line)
        except DiskFault:
            with suppress(DiskFault):  # half a line must not stay before the next one
                self._file.truncate(self._size)
            raise
        self._sha.update(line)
        self._size += len(line)
        self._crcs.append(zlib.crc32(line[:-1]))

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Nothing: as a log of the run, the file was cut back with the rest of its state."""

    write = append

    def position(self) -> Tree:
        """All rows so far, on disk for good: {"bytes", "sha256", "rows": their CRC-32}."""
        self._file.fsync()
        return {"bytes": self._size, "sha256": self._sha.hexdigest(), "rows": [*self._crcs]}

    def cut_back(self, position: Tree) -> None:
        """Forget all rows after a recorded position.

        Rows before it that are not as recorded are lost: each becomes a line that says so, and
        the file as it was is kept beside.
        """
        data = self.path.read_bytes()
        kept = data[: int(position["bytes"])]
        if hashlib.sha256(kept).hexdigest() == position["sha256"]:
            self._file.truncate(len(kept))
            self._take(kept)
            return
        if "rows" not in position:  # saved by a version that did not name rows
            raise EtudeError(
                f"{self.path} is not the file the checkpoint saw: earlier rows were changed or "
                "lost. Put the original file back to resume this run."
            )
        kept, lost = salvage(data, position["rows"])
        what = f"{self.path} was damaged, and put right: every row is whole"
        if lost:
            what = (
                f"{self.path} is damaged: of {len(position['rows']):,} rows it has lost "
                f"{named(lost)}, marked so in it. Nothing else is lost, but the log is not that of "
                "an untouched run; `etude resume --checkpoint STEP` from before them makes them "
                "again"
            )
        if kept == data:  # as an earlier resume has left it
            self._say(f"{what}.")
            return
        self._say(f"{what}. The file as it was is kept as {self._keep(data).name}.")
        self._file.close()
        files.replace_file(self.path, [kept])
        self._file = AppendFile(self.path)
        self._take(kept)

    def _keep(self, data: bytes) -> Path:
        aside = files.free_path(self.path.with_name(f"{self.path.name}.damaged"))
        files.write_file(aside, [data])
        return aside

    def state_dict(self) -> Tree:
        return self.position()

    def load_state_dict(self, state: Tree) -> None:
        self.cut_back(state)

    def close(self) -> None:
        self._file.close()


def salvage(data: bytes, rows: list[int]) -> tuple[bytes, list[int]]:
    """The file that `data` was, and the numbers of rows that are lost; `rows` are their CRC-32.

    A row is found wherever it now stands, so one that is cut out does not take those after it.
    """
    found = {zlib.crc32(line): line for line in data.split(b"\n")}
    lost = [number for number, crc in enumerate(rows, 1) if crc not in found]
    gaps = {number: json.dumps({LOST: number}).encode() for number in lost}
    lines = [gaps.get(i) or found[crc] for i, crc in enumerate(rows, 1)]
    return b"".join(line + b"\n" for line in lines), lost


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl but for lost ones; raises `Damaged` where one cannot be read."""
    rows: list[dict[str, Any]] = []
    if not path.exists() or not path.stat().st_size:
        return rows
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise Damaged(
                path,
                f"Row {number:,} of {path} is damaged: `etude resume` of the run goes on without "
                "it and marks it as lost.",
            )
        if LOST not in row:
            rows.append(row)
    return rows


def digest_of(rows: list[dict[str, Any]]) -> str:
    """SHA-256 of rows without `time/` and `system/` columns: two exact runs agree in it."""
    free = ("time/", "system/")
    kept = [{k: v for k, v in row.items() if not k.startswith(free)} for row in rows]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _crcs(data: bytes) -> list[int]:
    return [zlib.crc32(line) for line in data.split(b"\n")[:-1]]


def named(lost: list[int]) -> str:
    """Numbers of rows, in words."""
    few = ", ".join(f"{number:,}" for number in lost[:5])
    more = f" and {len(lost) - 5:,} more" if len(lost) > 5 else ""
    return f"row{'s' if len(lost) > 1 else ''} {few}{more}"


def _finite(value: Any) -> Any:
    """A value as strict JSON can hold it."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
