"""Which motions are practised how often: what fails in evaluation, more; nothing, never.

A failure history [motions] is 0 for a motion that never fails, 1 for one that always does.
"""

from __future__ import annotations

import numpy as np

from etude.core.clock import Clock
from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.training.curriculum import Curriculum, MotionCurriculumConfig


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


class MotionCurriculum(Curriculum):
    """Gives motions that fail in evaluation to more environments; all restart at epoch ends.

    Episodes of training do not count: they begin anywhere in a motion.
    """

    def __init__(self, config: MotionCurriculumConfig, num_motions: int) -> None:
        self._config = config
        self.failures: Array = np.zeros(num_motions)
        self.weights = motion_weights(self.failures, config.mix)
        self.round = 0

    def broadcast(self) -> Tree:
        """{"weights": [motions] float64, together 1; "round": how often they were renewed}."""
        return {"weights": self.weights.copy(), "round": self.round}

    def evaluated(self, episodes: dict[str, Array]) -> None:
        self.failures = remember(
            self.failures, episodes["motion"], episodes["is_success"], self._config.decay
        )

    def turn(self, clock: Clock) -> dict[str, float]:
        """Renew the weights where an epoch ended, from all evaluations up to here."""
        if clock.epoch_ended:
            self.weights = motion_weights(self.failures, self._config.mix)
            self.round += 1
        return {
            "curriculum/failing": float((self.failures >= 0.5).sum()),
            "curriculum/largest_weight": float(self.weights.max()),
            "curriculum/round": float(self.round),
        }

    def state_dict(self) -> Tree:
        return {
            "failures": self.failures.copy(),
            "weights": self.weights.copy(),
            "round": self.round,
        }

    def load_state_dict(self, state: Tree) -> None:
        self.failures, self.weights = np.array(state["failures"]), np.array(state["weights"])
        self.round = int(state["round"])
