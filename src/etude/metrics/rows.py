"""What every log reads from a row: in one way, so that a resumed run logs what any other does.

A number that is not finite is null in metrics.jsonl, so it comes back from there as nothing; it is
nothing here from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

ITERATIONS, ELAPSED = "iterations", "time/time_elapsed"
_PHASES = {"transport": "transport", "train": "learning", "test": "evaluation", "save": "saving"}
"""Columns under `time/` and what they are called where they are shown."""


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


_COUNTERS = (
    *("epoch", "cycle", "iterations", "timesteps", "updates", "episodes"),
    *("time/total_timesteps", "time/iterations", "train/n_updates", "eval/episodes"),
)
"""Columns that count what is done: straight lines, which no chart needs."""


def charted(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns that are drawn as curves, by the names of their charts.

    These are finite numbers that are no counters. Charts are sorted by name, and what is known
    per epoch must not come first.
    """
    chosen = {name: value for name, value in numbers(row).items() if name not in _COUNTERS}
    return {f"per_{name}" if name.startswith("epoch/") else name: v for name, v in chosen.items()}


def seconds_of(row: Mapping[str, float], before: float) -> dict[str, float]:
    """Seconds since the row before, when `before` seconds had passed, by what they went to."""
    parts = {name: row.get(f"time/{name}", 0.0) for name in ("physics", "inference", "environment")}
    parts |= {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    inside = sum(parts[name] for name in ("physics", "inference", "environment", "transport"))
    parts["collecting"] = max(row.get("time/collect", 0.0) - inside, 0.0)
    return parts | {"other": max(row.get(ELAPSED, 0.0) - before - sum(parts.values()), 0.0)}


def machine(row: Mapping[str, float]) -> list[str]:
    """The `system/` columns in words."""
    words = fleet(row)
    if (cores := row.get("system/cpu_cores")) is not None:
        words.append(f"processor {cores:.2f} cores")
    for name, key in (("memory", "system/memory_mib"), ("GPU memory", "system/gpu_memory_mib")):
        if (mib := row.get(key)) is not None:
            size = f"{mib:,.0f} MiB" if mib < 10_240 else f"{mib / 1024:.1f} GiB"
            words.append(f"{name} {size}")
    return words


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
    parts = {"collection": row.get("time/collect", 0.0) - row.get("time/transport", 0.0)}
    parts |= {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    return max(parts, key=lambda name: parts[name])
