"""Curricula: training starts with an easier task. Evaluation always uses the whole task."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from etude.core.clock import Clock
from etude.core.config import Config
from etude.core.contracts import Array
from etude.core.metrics import Curve, Metric, Metrics
from etude.core.trees import Tree


class CurriculumConfig(Config):
    """A curriculum by success; tasks scale the areas in which episodes start by its level."""

    metrics: ClassVar[Metrics] = (Metric("curriculum/level", "level"),)
    enabled: bool = Field(False, description="Start with an easier task.")
    start: float = Field(0.25, gt=0, le=1, description="Level at the start; 1 is the whole task.")
    step: float = Field(0.25, gt=0, le=1, description="Increment of the level.")
    raise_at: float = Field(0.7, ge=0, le=1, description="Success rate that raises the level.")
    episodes: int = Field(
        100, ge=1, le=1_000_000, description="Finished episodes per success rate."
    )


class MotionCurriculumConfig(Config):
    """Practice of motions in proportion to their failures in evaluation."""

    metrics: ClassVar[Metrics] = (
        Metric("curriculum/failing", "motions failing", ".0f", curve=Curve(5, "yellow", (0, None))),
        Metric(
            "curriculum/largest_weight", "largest weight", ".1%", curve=Curve(6, "yellow", (0, 1))
        ),
    )
    enabled: bool = Field(False, description="Practise failing motions more often.")
    mix: float = Field(
        0.5, ge=0, lt=1, description="Fraction of episodes chosen by failures; others are uniform."
    )
    decay: float = Field(
        0.5, ge=0, lt=1, description="Weight of earlier evaluations in a motion's failure rate."
    )


class Curriculum:
    """Base class: the whole task from the start."""

    def broadcast(self) -> Tree:
        """The curriculum for the next rollouts. A new "round" restarts every environment."""
        return {}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        """Update with the episodes {name: [k]} of each group that ended in an iteration; returns
        metrics."""
        return {}

    def evaluated(self, episodes: dict[str, Array]) -> None:
        """Update with the episodes {name: [n]} of an evaluation."""

    def turn(self, clock: Clock) -> dict[str, float]:
        """Called at the end of an iteration, after its evaluation if one was due; returns
        metrics."""
        return {}

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        """By default there is no state."""


class SuccessCurriculum(Curriculum):
    """Raise the level whenever the success rate of training episodes is high enough."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self.level = config.start
        self._episodes = self._successes = 0

    def broadcast(self) -> Tree:
        return {"level": self.level}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        for group in episodes:
            self._episodes += len(group["is_success"])
            self._successes += int(group["is_success"].sum())
        if self._episodes >= self._config.episodes:
            if self._successes >= self._config.raise_at * self._episodes:
                self.level = min(1.0, self.level + self._config.step)
            self._episodes = self._successes = 0
        return {"curriculum/level": self.level}

    def state_dict(self) -> Tree:
        return {"level": self.level, "seen": self._episodes, "won": self._successes}

    def load_state_dict(self, state: Tree) -> None:
        self.level = float(state["level"])
        self._episodes, self._successes = int(state["seen"]), int(state["won"])


def remember(failures: Array, motions: Array, success: Array, decay: float) -> Array:
    """Update failure rates [motions] after an evaluation; motions that were not played keep theirs.

    motions [episodes]: the number of each episode's motion; success [episodes]: 0 or 1. decay: the
    weight of the earlier failure rate.
    """
    number = motions.astype(np.int64)
    played = np.bincount(number, minlength=len(failures))
    failed = np.bincount(number, weights=1.0 - success, minlength=len(failures))
    now = failed / np.maximum(played, 1)
    mixed: Array = np.where(played > 0, decay * failures + (1.0 - decay) * now, failures)
    return mixed


def motion_weights(failures: Array, mix: float) -> Array:
    """Probabilities [motions], each at least `floor(motions, mix)`.

    The fraction `mix` is distributed by failure rates; less of it if their sum is below 1, so that
    a motion that failed once, long ago, does not get all of it.
    """
    total = float(failures.sum())
    if total <= 0.0:
        return np.full(len(failures), 1.0 / len(failures))
    share = mix * min(total, 1.0)
    weights: Array = share * (failures / total) + (1.0 - share) / len(failures)
    return weights


def floor(num_motions: int, mix: float) -> float:
    """The lowest probability that a motion can have."""
    return (1.0 - mix) / num_motions


class MotionCurriculum(Curriculum):
    """Practise motions that fail in evaluation more often; environments restart at epoch ends.

    Training episodes do not count, since they begin anywhere in a motion.
    """

    def __init__(self, config: MotionCurriculumConfig, num_motions: int) -> None:
        self._config = config
        self.failures: Array = np.zeros(num_motions)
        self.weights = motion_weights(self.failures, config.mix)
        self.round = 0

    def broadcast(self) -> Tree:
        """{"weights": [motions] float64 with sum 1; "round": the number of their updates}."""
        return {"weights": self.weights.copy(), "round": self.round}

    def evaluated(self, episodes: dict[str, Array]) -> None:
        self.failures = remember(
            self.failures, episodes["motion"], episodes["is_success"], self._config.decay
        )

    def turn(self, clock: Clock) -> dict[str, float]:
        """At the end of an epoch, update the weights from all evaluations so far."""
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
