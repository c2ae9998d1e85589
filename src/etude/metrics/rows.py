"""What every log reads from a row: in one way, so that a resumed run logs what any other does.

A number that is not finite is null in metrics.jsonl, so it comes back from there as nothing; it is
nothing here from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol


def step_of(row: Mapping[str, Any]) -> int:
    """The x axis: environment steps, or gradient updates where a run collects nothing."""
    return int((not is_offline(row) and row.get("timesteps")) or row.get("updates") or 0)


def is_offline(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a run that learns from a dataset and collects nothing.

    Its columns `episodes` and `timesteps` are then those of the dataset, and do not move.
    """
    return "dataset/passes" in row


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns that are finite numbers."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }


def fleet(row: Mapping[str, float]) -> list[str]:
    """Workers on other processes or machines, in words; [] where a run has none."""
    if "system/workers" not in row:
        return []
    workers, restarts = int(row["system/workers"]), int(row.get("system/restarts", 0))
    rate = row.get("system/bytes_per_second", 0.0) / 1e6
    many = "" if workers == 1 else "s"
    return [
        f"{workers:,} worker{many}, {row['system/groups']:,.0f} groups, {restarts:,} restarts",
        f"{rate:,.1f} MB/s, bottleneck {bottleneck(row)}",
    ]


def bottleneck(row: Mapping[str, float]) -> str:
    """What most of the time went to."""
    transport = row.get("time/transport", 0.0)
    parts = {
        "collection": row.get("time/collect", 0.0) - transport,
        "transport": transport,
        "learning": row.get("time/train", 0.0),
        "evaluation": row.get("time/test", 0.0),
        "saving": row.get("time/save", 0.0),
    }
    return max(parts, key=lambda name: parts[name])


class Finding(Protocol):
    """One thing that looks wrong, and what to try."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...


class Judge(Protocol):
    """Follows a run's rows and says what they mean; `metrics.health.Health` is one."""

    def add(self, row: Mapping[str, float]) -> None: ...

    @property
    def phase(self) -> str: ...

    @property
    def warnings(self) -> Sequence[Finding]: ...
