"""Practice of motions and of their parts by where training episodes failed."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.training.curriculum import Curriculum, MotionCurriculumConfig


def visited(start: Array, played: Array, bins: int) -> Array:
    """[episodes, bins] bool: the parts of its motion that each episode was in.

    start, played: [episodes], where it began and how far it went, as fractions of the motion; a
    loop continues in its first part.
    """
    first = np.floor(start * bins).astype(np.int64)
    count = np.floor((start + played) * bins).astype(np.int64) - first
    after = (np.arange(bins) - first[:, None]) % bins
    found: Array = after <= count[:, None]
    return found


def run_up_weights(rates: Array, run_up: int, decay: float) -> Array:
    """Distribute failure rates [motions, bins] over the bins from which they are practised: the
    bin of the failure and the `run_up - 1` before it in the motion, each with `decay` times the
    weight of the next. The sums of motions stay the same."""
    bins, weights = rates.shape[1], np.zeros_like(rates)
    for last in range(bins):
        from_ = max(0, last - run_up + 1)
        kernel = decay ** np.arange(last - from_, -1.0, -1.0)
        weights[:, from_ : last + 1] += rates[:, last, None] * (kernel / kernel.sum())
    return weights


def practice_weights(weights: Array, mix: float) -> Array:
    """Probabilities with sum 1, each at least `floor(weights.size, mix)`.

    The fraction `mix` is distributed in proportion to the weights; less of it if their sum is below
    1, so that a part that fails seldom does not get all of it.
    """
    total, even = float(weights.sum()), 1.0 / weights.size
    if total <= 0.0:
        return np.full(weights.shape, even)
    share = mix * min(total, 1.0)
    found: Array = share * (weights / total) + (1.0 - share) * even
    return found


def floor(num_parts: int, mix: float) -> float:
    """The lowest probability that one of `num_parts` parts of motions can have."""
    return (1.0 - mix) / num_parts


class MotionCurriculum(Curriculum):
    """Start training episodes more often where earlier ones failed: by motion and part of it.

    The failure rate of a part is the share of episodes that failed in it among those that came to
    it, over the last iterations. Unlike a number of failures it does not grow with the number of
    starts before it, so practice does not draw more practice.
    """

    def __init__(self, config: MotionCurriculumConfig, num_motions: int, bins: int) -> None:
        """bins: 1 for an environment that does not report parts of motions."""
        self._config = config
        self.failures: Array = np.zeros((num_motions, bins))
        """[motions, bins]: episodes that failed in each part; earlier iterations weigh less."""
        self.visits: Array = np.zeros((num_motions, bins))
        """[motions, bins]: episodes that came to each part; earlier iterations weigh less."""

    @property
    def rates(self) -> Array:
        """[motions, bins]: failure rates."""
        rates: Array = self.failures / np.maximum(self.visits, 1.0)
        return rates

    @property
    def weights(self) -> Array:
        """[motions, bins] float64: probabilities of starting in each part, with sum 1."""
        config = self._config
        rates = run_up_weights(self.rates, config.run_up, config.run_up_decay)
        return practice_weights(rates, config.mix)

    def broadcast(self) -> Tree:
        """{"starts": [motions, bins], probabilities with sum 1; "weights": [motions], their sums
        over bins}, float64."""
        weights = self.weights
        return {"starts": weights, "weights": weights.sum(axis=1)}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        self.failures *= self._config.decay
        self.visits *= self._config.decay
        bins = self.visits.shape[1]
        for group in episodes:
            motion, failed = group["motion"].astype(np.int64), group["is_success"] == 0
            if bins == 1:
                start = played = np.zeros(len(motion))
            else:
                start, played = group["start"], group["played"]
            np.add.at(self.visits, motion, visited(start, played, bins))
            last = np.floor((start + played) * bins).astype(np.int64) % bins
            np.add.at(self.failures, (motion[failed], last[failed]), 1.0)
        return {
            "curriculum/failing": float((self.rates >= 0.5).sum()),
            "curriculum/largest_weight": float(self.weights.max()),
        }

    def state_dict(self) -> Tree:
        return {"failures": self.failures.copy(), "visits": self.visits.copy()}

    def load_state_dict(self, state: Tree) -> None:
        """Failures in evaluations, which earlier versions counted, are discarded."""
        if "visits" in state:
            self.failures, self.visits = np.array(state["failures"]), np.array(state["visits"])
