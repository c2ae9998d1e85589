"""What gates compare runs by: fingerprints that must be equal, and intervals over seeds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

import etude

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 97.5 %, of 1, 2, ... degrees of freedom."""


def fingerprint(run: str | Path) -> str:
    """The start of each SHA-256 of a finished run: weights, training state, metrics."""
    return " ".join(value[:16] for value in etude.Run(run).fingerprint().values())


def lower_end(values: np.ndarray) -> float:
    """Lower end of the 95 % interval of the mean of values [n], by bootstrap: a wider spread of the
    same mean makes it lower."""
    drawn = np.random.default_rng(0).choice(values, (20_000, len(values)))
    return float(np.quantile(drawn.mean(axis=1), 0.025))


def half_width(values: np.ndarray) -> float:
    """Half the 95 % interval of the mean of values [n]; not a number for a single one."""
    n = len(values)
    if n < 2:
        return math.nan
    return T95[min(n - 1, len(T95)) - 1] * float(values.std(ddof=1)) / math.sqrt(n)
