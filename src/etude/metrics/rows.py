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


EPISODES_CHART, TIMESTEPS = "time/episodes", "time/total_timesteps"
_COUNTERS = (
    *("epoch", "cycle", "iterations", "timesteps", "updates", "episodes"),
    *(TIMESTEPS, "time/iterations", "train/n_updates", "eval/episodes"),
)
"""Columns that count what is done: nearly straight lines. Of them, episodes and steps of a run that
collects are drawn, by the names that they have in stable-baselines3."""


def charted(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns that are drawn as curves, by the names of their charts.

    These are finite numbers that are no counters. Charts are sorted by name, and what is known
    per epoch must not come first.
    """
    known = numbers(row)
    chosen = {name: value for name, value in known.items() if name not in _COUNTERS}
    if not is_offline(row):
        counted = ((EPISODES_CHART, "episodes"), (TIMESTEPS, TIMESTEPS))
        chosen |= {chart: known[name] for chart, name in counted if name in known}
    return {f"per_{name}" if name.startswith("epoch/") else name: v for name, v in chosen.items()}
