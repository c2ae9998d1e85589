"""Records of runs as they are on disk. No code of a run is executed, and torch is not loaded."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from etude.core.errors import Damaged, UsageError
from etude.core.history import Row, Thinned
from etude.core.metrics import ELAPSED, is_offline, numbers, step_of
from etude.planning import FREE, among
from etude.runs.changes import changes_of
from etude.runs.folder import METRICS, RECIPE, RunFolder
from etude.runs.metrics_log import DiskHistory

_MOST_RECIPE, _MOST_ITEMS = 1 << 18, 1 << 16
"""Largest recipe that is read, in bytes and in items."""


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder that is compared."""

    path: Path
    settings: dict[str, Any]
    """{section.key: value} of its recipe, not validated."""
    history: Thinned[Row]
    """Log rows; an evenly spaced part of them if there are many."""
    manifest: dict[str, Any]
    """The manifest; {} if it is damaged."""

    @cached_property
    def rows(self) -> list[Row]:
        return [*self.history]

    @property
    def name(self) -> str:
        return str(self.settings.get("name", ""))

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @cached_property
    def compared(self) -> dict[str, Any]:
        """The settings that decide results and times, except for the seed."""
        chosen = {name: v for name, v in self.settings.items() if not among(name, FREE)}
        return {name: v for name, v in chosen.items() if name != "seed"}

    @property
    def unit(self) -> str:
        return "updates" if self.rows and is_offline(self.rows[-1]) else "steps"

    @property
    def last_step(self) -> int:
        return step_of(self.rows[-1])

    def series(self, metric: str) -> list[tuple[int, float, float]]:
        """(step, value, seconds since the start) of every row that has the metric."""
        found = []
        for row in self.rows:
            known = numbers(row)
            if metric in known:
                found.append((step_of(known), known[metric], known.get(ELAPSED, 0.0)))
        return found


def find(texts: Sequence[str]) -> list[Path]:
    """Find the run folders of arguments: runs, folders of runs, or patterns.

    Files that a pattern of the shell matched beside the runs are left out.
    """
    found: list[Path] = []
    for text in texts:
        is_pattern = glob.has_magic(text) and not Path(text).exists()
        matches = sorted(map(Path, glob.glob(text, recursive=True))) if is_pattern else [Path(text)]
        chosen = [run for path in matches for run in _runs_in(path)]
        if not chosen and is_pattern:
            raise UsageError(f"There is no run that matches '{text}'.")
        if not chosen and not (len(texts) > 1 and matches[0].is_file()):
            if not matches[0].exists():
                raise UsageError(f"There is no run {text}. Check the path.")
            raise UsageError(f"{text} is not a run and holds none.")
        found += chosen
    if not found:
        raise UsageError("There is no run among these: name folders of runs.")
    unique = {path.resolve(): path for path in reversed(found)}
    return [path for path in dict.fromkeys(found) if unique[path.resolve()] is path]


def _runs_in(path: Path) -> list[Path]:
    if (path / RECIPE).is_file():
        return [path]
    return sorted(inside.parent for inside in path.glob(f"*/{RECIPE}")) if path.is_dir() else []


def read(path: Path) -> RunRecord:
    """Read the record of a run; raises if recipe or rows cannot be read."""
    folder = RunFolder.open(path, write=False)
    try:
        manifest = folder.manifest()
    except Damaged:
        manifest = {}
    settings = flat(_content(str(folder.copies()["recipe"]), path / RECIPE))
    for change in changes_of(manifest):
        for name, (_, value) in change.fields.items():
            if not among(name, FREE):
                settings[printable(f"{name} from step {change.step:,} on")] = value
    return RunRecord(path, settings, DiskHistory(path / METRICS).thinned(), manifest)


def _content(text: str, path: Path) -> dict[str, Any]:
    """A recipe of any version as plain data, not validated."""
    try:
        if len(text) > _MOST_RECIPE:
            raise ValueError(f"it has more than {_MOST_RECIPE:,} characters")
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise ValueError("it holds no fields")
    except Exception as error:  # the parser has many, some of them its own mistakes
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise UsageError(f"{path} cannot be read: {words}.") from error
    return content


def flat(content: Mapping[Any, Any]) -> dict[str, Any]:
    """{section.key: value} of nested mappings."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", content)]
    for _ in range(_MOST_ITEMS):
        if not waiting:
            return found
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            start = f"{name}." if name else ""
            waiting += [(f"{start}{key}", each) for key, each in [*value.items()][::-1]]
        else:
            found[printable(name)] = value
    raise UsageError(f"A recipe holds more than {_MOST_ITEMS:,} items.")


def shown(value: Any) -> str:
    """A setting as short text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = "none" if value is None else printable(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: object) -> str:
    """A text with control characters replaced by question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def key_of(settings: Mapping[str, Any]) -> str:
    """A key that is equal for equal settings."""
    return json.dumps(settings, sort_keys=True, default=str)
