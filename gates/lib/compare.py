"""Comparison of runs: fingerprints that must be equal, intervals over seeds, and the rule by which
trainings are compared with those of a peer.

A peer is another library, or another method on the same task. `compare_with_peer` has the rule:

- At least `LEAST_SEEDS` seeds of either side, or nothing is shown.
- The score of a seed is the mean over its last evaluations, at least `LEAST_EVALUATIONS`: one
  policy is a sample of what the last updates happened to do.
- The mean of ours may be lower than the peer's by one standard error of the difference, from the
  pooled spread, but by at least `FLOOR` and at most `CEILING` of the peer's mean. Without the
  ceiling, a collapsed seed would widen the tolerance by which it is judged.
- The lower end of the 95 % interval of our share of the peer's score (bootstrap over the seeds of
  both sides, `etude.compare`) must reach `SURELY`, or the seeds are too few for their spread.

Of three seeds each with the same normal distribution, ours passes with a probability of 90 % at a
standard deviation of 5 % of the mean, 82 % at 10 %, and 60 % at 20 %, where a fifth ends as "not
shown". The peer's own scores less 20 %, or with one of three seeds at zero, never pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import etude
from gates.lib.report import Gate

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
LEAST_SEEDS, LEAST_EVALUATIONS = 3, 3
FLOOR, CEILING, SURELY = 0.05, 0.15, 0.7
DRAWS = 20_000
"""Bootstrap samples of an interval."""
Scores = Sequence[Sequence[float]]
"""The scores of the last evaluations of each seed."""


def compare_with_peer(
    gate: Gate, what: str, ours: Scores, theirs: Scores, *, peer: str, unit: float | None = None
) -> None:
    """Judge by the rule above whether our scores reach those of a peer.

    what: name of the score. unit: what tolerances are shares of, and differences are given in; 1
    for success rates. None: the peer's mean. At the smallest size of a gate nothing is judged.
    """
    from etude.compare.comparison import estimate, improvement

    gate.details.setdefault("comparisons", {})[what] = {
        "peer": peer,
        "ours": [list(map(float, seed)) for seed in ours],
        "theirs": [list(map(float, seed)) for seed in theirs],
    }
    if not ours or not theirs:
        gate.fail(f"{what}: no score of {'Etude' if not ours else peer}")
        return
    us, them = (np.array([[np.mean(seed)] for seed in side]) for side in (ours, theirs))
    scale = abs(float(them.mean())) if unit is None else unit
    if not scale:
        gate.fail(f"{what}: the mean score of {peer} is 0, of which there is no share")
        return

    def share(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Our mean as a share of theirs, [...]; also for scores below zero."""
        found: np.ndarray = 1.0 + (x.mean(axis=(-2, -1)) - y.mean(axis=(-2, -1))) / scale
        return found

    reached, lower, upper = estimate(share, us, them, draws=DRAWS)
    name = f"{what}, share of that of {peer}" if unit is None else f"{what} less that of {peer}"
    zero = 0.0 if unit is None else 1.0
    allowed = min(max(tolerance(us[:, 0], them[:, 0]) / scale, FLOOR), CEILING)
    few = too_few(ours, theirs, peer)
    judged = not gate.smallest and not few
    gate.figure(name, reached - zero, at_least=1.0 - allowed - zero if judged else None)
    if min(len(ours), len(theirs)) >= LEAST_SEEDS:
        better = improvement(us, them)
        gate.figure(f"{name}, lower end", lower - zero)
        gate.figure(f"{name}, upper end", upper - zero)
        gate.figure(f"{what}, probability of being above {peer}", better.value)
        gate.figure(f"{what}, p-value", better.p_value)
    if few:
        gate.not_shown(f"{what}: {few}")
    elif lower < SURELY:
        gate.not_shown(
            f"{what}: with this spread of seeds it may be {lower:.2f} or {upper:.2f} of that of "
            f"{peer}"
        )


def too_few(ours: Scores, theirs: Scores, peer: str) -> str:
    """Name what a comparison has too few of; "" if it has enough."""
    for who, side in (("Etude", ours), (peer, theirs)):
        if len(side) < LEAST_SEEDS:
            return f"{len(side)} seed{'s' * (len(side) > 1)} of {who}"
    for who, side in (("Etude", ours), (peer, theirs)):
        least = min(map(len, side))
        if least < LEAST_EVALUATIONS:
            return f"{least} evaluation{'s' * (least > 1)} of each seed of {who}"
    return ""


def tolerance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Standard error of the difference of means of [n] and [m], from their pooled spread."""
    n, m = len(ours), len(theirs)
    if n + m < 3:
        return 0.0
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in (ours, theirs))
    return math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))


def fingerprint(run: str | Path) -> str:
    """The first 16 digits of the SHA-256 of weights, training state and metrics of a run."""
    return " ".join(value[:16] for value in etude.Run(run).fingerprint().values())


def half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % interval (Student's t) of the mean of values [n]; NaN for one."""
    n = len(values)
    if n < 2:
        return math.nan
    return T95[min(n - 1, len(T95)) - 1] * float(values.std(ddof=1)) / math.sqrt(n)
