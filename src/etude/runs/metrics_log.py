"""metrics.jsonl: one JSON row per line, cut back on resume to where the checkpoint saw it."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import EtudeError
from etude.core.trees import Tree
from etude.runs.files import BLOCK, AppendFile, DiskFault


class MetricsLog:
    """Rows on disk, and a running hash of them.

    The hash covers every byte, `time/` columns too: it tells whether a file is the one that a
    checkpoint saw, not whether two runs agree.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)
        self._size, self._sha = self._hash_prefix(None)

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; a number that is not finite becomes null, since JSON has no other word."""
        line = (json.dumps(_finite(row), allow_nan=False) + "\n").encode()
        try:
            self._file.append(line)
        except DiskFault:
            with suppress(DiskFault):  # half a line must not stay before the next one
                self._file.truncate(self._size)
            raise
        self._sha.update(line)
        self._size += len(line)

    def position(self) -> Tree:
        """{"bytes", "sha256"} of all rows so far, on disk for good: for a checkpoint to record."""
        self._file.fsync()
        return {"bytes": self._size, "sha256": self._sha.hexdigest()}

    def cut_back(self, position: Tree) -> None:
        """Forget all rows after a recorded position; what stays must be what was recorded."""
        wanted = int(position["bytes"])
        size, sha = self._hash_prefix(wanted)
        if size < wanted:
            raise EtudeError(
                f"{self.path} has {size} bytes, but the checkpoint saw {wanted}: rows were lost. "
                "Put the original file back to resume this run."
            )
        if sha.hexdigest() != position["sha256"]:
            raise EtudeError(
                f"{self.path} is not the file the checkpoint saw: earlier rows were changed. "
                "Put the original file back to resume this run."
            )
        self._file.truncate(wanted)
        self._size, self._sha = size, sha

    def state_dict(self) -> Tree:
        return self.position()

    def load_state_dict(self, state: Tree) -> None:
        self.cut_back(state)

    def close(self) -> None:
        self._file.close()

    def _hash_prefix(self, limit: int | None) -> tuple[int, Any]:
        """(bytes, hash) of the file up to `limit`."""
        size, sha = 0, hashlib.sha256()
        with self.path.open("rb") as stream:
            while block := stream.read(BLOCK if limit is None else min(BLOCK, limit - size)):
                sha.update(block)
                size += len(block)
        return size, sha


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
