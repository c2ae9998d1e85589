"""Whether the returns of a dataset can teach a reward, and clips that help where they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.core.keys import Key

Array = np.ndarray[Any, Any]
SAME = 1e-6
"""Spreads below this part of the largest number are rounding."""
SHORTEST = 0.1
"""Share of an episode that a clip of it has at least, and lacks at least."""
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
        value = float(returns.mean())
        advice = "Add successes, such as `etude data record` makes."
        if value:
            advice = (
                "Learning a reward adds clips that end before their episode does; failures, such "
                "as `etude data record` makes, teach more."
            )
        reason = f"all {len(returns):,} returns are {value:.6g}"
        return Contrast(False, reason, f"Every return is {value:g}: {_NOTHING}. {advice}")
    if _spread(per_step) < SAME:
        each = f"{float(per_step.mean()):.6g} per step, whatever is done"
        sentence = (
            f"Every episode gives {each}: {_NOTHING}. Add some that earn more or less in the same "
            "time, such as `etude data record` makes."
        )
        return Contrast(False, f"all {len(returns):,} episodes give {each}", sentence)
    common = float(np.isclose(returns, np.median(returns)).mean())
    sentence = (
        f"Returns differ ({returns.min():g} to {returns.max():g}, standard deviation "
        f"{returns.std():.3g}): a return decomposition has something to learn from."
    )
    if common > 0.95:
        sentence = (
            f"Returns differ, but {common:.0%} of them are {np.median(returns):g}: few episodes "
            "carry all there is to learn. More failures would help: `etude data import "
            "--add-truncated N`, or --algorithm.add-truncated N when a reward is learned."
        )
    return Contrast(True, "returns differ", sentence)


def draw_clips(lengths: Array, num: int, key: Key) -> tuple[Array, Array]:
    """Episodes [num] int64 and how many of their first steps [num] a clip of each has.

    They are spread evenly over all episodes of two steps or more; without any there are none.
    """
    long, generator = np.flatnonzero(lengths >= 2), key.child("data", "clips").generator()
    episodes, steps = list[int](), list[int]()
    while len(long) and len(episodes) < num:
        for episode in generator.permutation(long)[: num - len(episodes)].tolist():
            length = int(lengths[episode])
            least = max(1, round(SHORTEST * length))
            length_of_clip = int(generator.integers(least, max(least, length - least) + 1))
            episodes.append(episode)
            steps.append(min(length_of_clip, length - 1))
    return np.array(episodes, np.int64), np.array(steps, np.int64)


def _spread(values: Array) -> float:
    """Standard deviation in parts of the largest size."""
    return float(values.std() / max(float(np.abs(values).max()), np.finfo(np.float64).tiny))
