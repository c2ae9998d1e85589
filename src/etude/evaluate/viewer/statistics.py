"""Statistics of episodes: lengths, returns, successes, and every dimension of actions and
observations.

Lengths, returns and successes are of all episodes. Steps are read until `MAX_STEPS`, `MAX_NUMBERS`
or `SECONDS` are reached, in a random order of episodes, and the result says how many were read.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.evaluate.viewer.sources import Source

MAX_STEPS, MAX_NUMBERS, SECONDS = 500_000, 16_000_000, 10.0
MAX_DIMENSIONS = 64
"""Dimensions of a field that are drawn; pictures of other kinds may have millions."""
_BINS, _LARGE = 30, 1e150
_TASKS = 50


def statistics(source: Source) -> dict[str, Any]:
    """Statistics of the episodes that are not excluded, as JSON."""
    used = np.flatnonzero(~source.excluded)
    lengths, returns = source.table["length"][used], source.table["return"][used]
    successes = Counter(source.labels.successes[i] for i in used.tolist())
    tasks = Counter(source.labels.tasks[i] for i in used.tolist())
    fields, steps, episodes = _read(source, int(lengths.sum()))
    whole, num = steps == int(lengths.sum()), f"{episodes:,} {source.sampled}"
    return {
        "episodes": len(used),
        "excluded": int(source.excluded.sum()),
        "steps": int(lengths.sum()),
        "lengths": spread(lengths),
        "returns": spread(returns),
        "successes": {
            name: successes[key] for name, key in (("yes", True), ("no", False), ("unknown", None))
        },
        "tasks": tasks.most_common(_TASKS),
        "num_tasks": len(tasks),
        "read": f"all {steps:,} steps" if whole else f"{steps:,} steps of {num}",
        "fields": fields,
    }


def _read(source: Source, total: int) -> tuple[list[dict[str, Any]], int, int]:
    """Statistics of every field, and the numbers of steps and episodes they are of."""
    sizes = {n: min(MAX_DIMENSIONS, math.prod(source.specs[n].shape)) for n in source.curves}
    if not sizes:
        return [], 0, 0
    left = min(MAX_STEPS, MAX_NUMBERS // sum(sizes.values()))
    parts: dict[str, list[Array]] = {name: [] for name in sizes}
    steps = episodes = 0
    until = time.monotonic() + SECONDS
    for arrays in source.walk([*sizes]):
        for name, size in sizes.items():
            parts[name].append(flat(arrays[name][: left - steps], size).astype(np.float32))
        steps += min(left - steps, len(arrays["rewards"]))
        episodes += 1
        if steps >= left or time.monotonic() > until:
            break
    fields = []
    for name, size in sizes.items():
        joined = np.concatenate(parts[name]) if parts[name] else np.empty((0, size))
        fields.append({"name": name, "dims": [spread(joined[:, d]) for d in range(size)]})
        parts[name].clear()
    return fields, steps, episodes


def flat(array: Array, size: int) -> Array:
    """The first `size` numbers of every step, [n, size]."""
    return array.reshape(len(array), -1)[:, :size]


def spread(values: Array) -> dict[str, Any]:
    """Mean, standard deviation, extremes, median and histogram of the finite ones of `values`."""
    numbers = values.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return {"count": 0}
    low, high = float(numbers.min()), float(numbers.max())
    scale = max(-low, high) if max(-low, high) > _LARGE else 1.0  # squares must not overflow
    scaled = numbers / scale
    bins, edges = _BINS, (low / scale, high / scale)
    if high - low < _BINS and (numbers == np.rint(numbers)).all():
        bins, edges = int(high - low) + 1, (low - 0.5, high + 0.5)  # a bin for every integer
    elif not np.diff(np.linspace(*edges, _BINS + 1)).all():
        bins, edges = 1, (low, np.nextafter(high, np.inf))  # too close together
    counts, _ = np.histogram(scaled, bins, edges)
    return {
        "count": len(numbers),
        "mean": float(scaled.mean() * scale),
        "std": float(scaled.std() * scale),
        "min": low,
        "median": float(np.median(numbers)),
        "max": high,
        "counts": counts.tolist(),
    }
