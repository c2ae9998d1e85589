"""Runs at a glance: state, steps, success, age and size, from a few small reads per run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from etude.core.errors import UsageError
from etude.core.metrics import numbers, step_of
from etude.runs import files
from etude.runs.changes import changes_of
from etude.runs.file_system import is_locked
from etude.runs.finding import disk_bytes, last_modified

State = Literal["running", "finished", "stopped", "failed"]
_STEP = re.compile(r"[0-9]{12,}")
_BLOCK, _MOST = 1 << 16, 1 << 22
"""Bytes that are read from the end of metrics.jsonl: block size and limit."""
_SCORES = {
    "eval/success_rate": "success",
    "eval/mean_reward": "return",
    "rollout/success_rate": "success",
    "rollout/ep_rew_mean": "return",
}
"""{column of the score: its name}, by priority."""


@dataclass(frozen=True)
class RunEntry:
    """The state of a run."""

    path: Path
    recipe: str
    seed: int | None
    state: State
    steps: int
    """Environment steps, or updates on a dataset, at the last row or checkpoint."""
    total: int | None
    """Planned steps."""
    score: float | None
    """Success rate or mean return of the last evaluation; without one, of rollouts."""
    score_name: str
    age: float
    """Seconds since the last change."""
    bytes: int
    changes: tuple[str, ...] = ()
    """The settings that resumes have changed, each with its step."""
    url: str = ""
    """Its place in an object store."""

    @property
    def name(self) -> str:
        return self.url or str(self.path)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON."""
        document = {**asdict(self), "path": self.name}
        del document["url"]
        return document


def entry_in_store(url: str) -> RunEntry:
    """The state of a run in an object store."""
    from etude.runs import stored

    path = stored.mirror(url, stored.is_listed, "listed")
    copy, found = stored.StoredCopy(url, path), entry(path)
    age, is_alive = copy.signs()
    state: State = "running" if is_alive else found.state
    return replace(found, url=url, bytes=copy.num_bytes, age=age, state=state)


def entry(path: Path) -> RunEntry:
    """The state of a run; unreadable parts are left out."""
    rows = path / "metrics.jsonl"
    newest = _newest_step(path / "checkpoints")
    last, name, score = _read_end(rows)
    head = _start(path / "recipe.yaml")
    saved = path / "checkpoints" / f"{newest or 0:012d}"
    changed = last_modified(rows, path / "recipe.yaml", saved, path / "summary.json")
    return RunEntry(
        path=path,
        recipe=_field(head, "name") or "?",
        seed=int(seed) if (seed := _field(head, "seed")).isdecimal() else None,
        state=_state(path, newest),
        steps=max(step_of(last), newest or 0),
        total=_total(path / "plan.json"),
        score=score,
        score_name=name,
        age=max(time.time() - changed, 0.0),
        bytes=disk_bytes(path),
        changes=_changes(path / "manifest.json"),
    )


def _changes(manifest: Path) -> tuple[str, ...]:
    with suppress(OSError, ValueError, RecursionError, UsageError):
        document = json.loads(_start(manifest, 1 << 20))
        return tuple(change.words() for change in changes_of(document))
    return ()


def _state(path: Path, newest: int | None) -> State:
    if is_locked(path):
        return "running"
    counts = _counts(path / "summary.json")
    if newest is not None and newest in (counts.get("timesteps"), counts.get("updates")):
        return "finished"
    failed = last_modified(*_entries(path / "failures"))
    saved = 0.0 if newest is None else last_modified(path / "checkpoints" / f"{newest:012d}")
    return "failed" if failed > saved else "stopped"


def _newest_step(folder: Path) -> int | None:
    return max((int(p.name) for p in _entries(folder) if _STEP.fullmatch(p.name)), default=None)


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [folder / name for name in os.listdir(folder)]
    return []


def _counts(file: Path) -> dict[str, Any]:
    """`counts` of a plan or a summary; {} if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads(_start(file, 1 << 20))
        counts = document.get("counts") if isinstance(document, dict) else None
        return counts if isinstance(counts, dict) else {}
    return {}


def _total(plan: Path) -> int | None:
    counts = _counts(plan)
    total = counts.get("timesteps") or counts.get("updates")
    return total if isinstance(total, int) else None


def _start(file: Path, size: int = 4096) -> str:
    """The start of a text file; symbolic links are not followed."""
    return files.read_start(file, size).decode(errors="replace")


def _field(text: str, name: str) -> str:
    """A top-level field of a recipe, as written."""
    found = re.search(rf"^{name}: *(.*)$", text, re.MULTILINE)
    value = found[1].strip().strip("'\"") if found else ""
    return "".join(letter for letter in value if letter.isprintable())[:80]


def _read_end(file: Path) -> tuple[dict[str, Any], str, float | None]:
    """(last row, name of the score, score) from the end of metrics.jsonl."""
    last: dict[str, Any] = {}
    other: tuple[str, float | None] = ("", None)
    for row in _rows_from_end(file):
        known = numbers(row)
        last = last or row
        found = next(((name, known[c]) for c, name in _SCORES.items() if c in known), None)
        if found and any(column in known for column in [*_SCORES][:2]):
            return last, *found
        if found and other[1] is None:
            other = found
    return last, *other


def _rows_from_end(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of metrics.jsonl from the end, of its last megabytes."""
    with suppress(OSError), files.open_regular(file) as stream:
        end = stream.seek(0, os.SEEK_END)
        start, rest = end, b""
        while start > max(end - _MOST, 0):
            size = min(_BLOCK, start)
            start -= size
            stream.seek(start)
            *lines, _ = [*(stream.read(size) + rest).split(b"\n")[::-1], b""]
            rest = lines.pop() if start else b""
            for line in lines:
                with suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
