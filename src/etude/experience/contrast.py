"""Whether the returns of a dataset can teach a reward: one verdict, for reports and for learners.

Nothing here loads more than numpy: the process that opens strangers' files may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SAME = 1e-6
"""Spreads below this part of the largest number are rounding."""
_NOTHING = "a return decomposition learns nothing from this"


@dataclass(frozen=True)
class Contrast:
    """Whether returns differ: where they do not, a return decomposition learns nothing."""

    enough: bool
    reason: str
    """What was found, as part of a sentence."""
    sentence: str
    """The same as a whole one, with what to do about it."""


def contrast(returns: Array, lengths: Array) -> Contrast:
    """The verdict on returns [episodes] and lengths [episodes].

    Not enough if the returns are all the same, or R / T is. The latter is plain: the constant
    r = R / T solves the loss. So does r = R / T where every return is R and lengths differ. This
    looks like a signal, since the targets differ, but all it can teach is how long an episode
    lasts: within an episode the reward is constant, its running sum is the share of time gone
    by, and an episode that dawdled earns in the end as much as one that went straight. Which
    steps made the difference cannot be told from episodes between which there is none.
    """
    returns = np.asarray(returns, np.float64)
    if not returns.size:
        return Contrast(False, "there is no episode", "There is no episode.")
    per_step = returns / lengths
    if _spread(returns) < SAME:
        return _equal_returns(returns)
    if _spread(per_step) < SAME:
        each = f"{float(per_step.mean()):.6g} per step, whatever is done"
        sentence = (
            f"Every episode gives {each}: {_NOTHING}. Add some that earn more or less in the same "
            "time, such as `etude data record` makes."
        )
        return Contrast(False, f"all {len(returns):,} episodes give {each}", sentence)
    return Contrast(True, "returns differ", _differ(returns))


def _equal_returns(returns: Array) -> Contrast:
    value = float(returns.mean())
    missing = "successes, such as `etude data record` makes."
    if value:
        missing = (
            "failures: import with --add-truncated N, or record some with `etude data record`."
        )
    reason = f"all {len(returns):,} returns are {value:.6g}"
    return Contrast(False, reason, f"Every return is {value:g}: {_NOTHING}. Add {missing}")


def _differ(returns: Array) -> str:
    common = float(np.isclose(returns, np.median(returns)).mean())
    if common > 0.95:
        return (
            f"Returns differ, but {common:.0%} of them are {np.median(returns):g}: few episodes "
            "carry all there is to learn. More failures would help: --add-truncated N."
        )
    return (
        f"Returns differ ({returns.min():g} to {returns.max():g}, standard deviation "
        f"{returns.std():.3g}): a return decomposition has something to learn from."
    )


def _spread(values: Array) -> float:
    """Standard deviation in parts of the largest size."""
    return float(values.std() / max(float(np.abs(values).max()), np.finfo(np.float64).tiny))
