"""Comparison of runs: fingerprints that must be equal, and intervals over seeds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

import etude

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""


def fingerprint(run: str | Path) -> str:
    """The first 16 digits of the SHA-256 of weights, training state and metrics of a run."""
    return " ".join(value[:16] for value in etude.Run(run).fingerprint().values())


def lower_end(values: np.ndarray) -> float:
    """Lower end of the 95 % bootstrap interval of the mean of values [n]."""
    drawn = np.random.default_rng(0).choice(values, (20_000, len(values)))
    return float(np.quantile(drawn.mean(axis=1), 0.025))


def half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % interval (Student's t) of the mean of values [n]; NaN for one."""
    n = len(values)
    if n < 2:
        return math.nan
    return T95[min(n - 1, len(T95)) - 1] * float(values.std(ddof=1)) / math.sqrt(n)
