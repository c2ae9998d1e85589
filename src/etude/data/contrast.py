"""Contrast of the returns in a dataset, which reward learning needs, and clips that add some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.core.keys import Key

Array = np.ndarray[Any, Any]
SAME = 1e-6
"""Standard deviations below this share of the largest number are rounding errors."""
SHORTEST = 0.1
"""Smallest share of an episode that a clip has, and smallest share that it lacks."""
_NOTHING = "a return decomposition learns nothing from this"


@dataclass(frozen=True)
class Contrast:
    """Whether returns differ enough for a return decomposition to learn from."""

    enough: bool
    reason: str
    """The reason as part of a sentence."""
    sentence: str
    """The reason as a whole sentence, with advice."""


def contrast(returns: Array, lengths: Array) -> Contrast:
    """Judge returns [episodes] and lengths [episodes].

    There is not enough contrast if all returns R or all R / T are equal. If all R / T are equal,
    the constant reward r = R / T solves the loss. If all returns are equal and lengths T differ,
    r = R / T solves it too: the reward is constant within an episode and only depends on its
    length, so a slow episode earns as much as a fast one, and no step is better than another.
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
        each = f"{float(per_step.mean()):.6g} per step, independent of the actions"
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
            "differ from the others. More failures would help: `etude data import "
            "--add-truncated N`, or --algorithm.add-truncated N when a reward is learned."
        )
    return Contrast(True, "returns differ", sentence)


def draw_clips(lengths: Array, num: int, key: Key) -> tuple[Array, Array]:
    """Draw clips: episodes [num] int64 and the number of first steps [num] that each clip has.

    They are spread evenly over all episodes of two steps or more; if there are none, [0].
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
    """Standard deviation relative to the largest absolute value."""
    return float(values.std() / max(float(np.abs(values).max()), np.finfo(np.float64).tiny))
