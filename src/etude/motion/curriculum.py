"""Which motions are practised how often: what fails in evaluation, more; nothing, never.

Pure functions of a failure history [motions]: 0 for a motion that never fails, 1 for one that
always does.
"""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array


def remember(failures: Array, motions: Array, success: Array, decay: float) -> Array:
    """The failure history [motions] after an evaluation; motions that were not played keep theirs.

    motions [episodes]: the number of each episode's motion; success [episodes]: 0 or 1. `decay` is
    how much of the past stays.
    """
    number = motions.astype(np.int64)
    played = np.bincount(number, minlength=len(failures))
    failed = np.bincount(number, weights=1.0 - success, minlength=len(failures))
    now = failed / np.maximum(played, 1)
    mixed: Array = np.where(played > 0, decay * failures + (1.0 - decay) * now, failures)
    return mixed


def motion_weights(failures: Array, mix: float) -> Array:
    """The probability [motions] of each motion: at least `floor(motions, mix)`, together 1.

    At most the share `mix` goes by failures, and less where they add up to less than one motion
    that always fails: one that failed once, long ago, does not take it all.
    """
    total = float(failures.sum())
    if total <= 0.0:
        return np.full(len(failures), 1.0 / len(failures))
    share = mix * min(total, 1.0)
    weights: Array = share * (failures / total) + (1.0 - share) / len(failures)
    return weights


def floor(num_motions: int, mix: float) -> float:
    """The probability below which no motion ever falls."""
    return (1.0 - mix) / num_motions
