"""Curricula: training begins with an easier task. Evaluation always has the whole task."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from etude.core.clock import Clock
from etude.core.config import Config
from etude.core.contracts import Array
from etude.core.metrics.declared import Curve, Metric, Metrics
from etude.core.trees import Tree


class CurriculumConfig(Config):
    """How training becomes harder; tasks scale the areas that episodes start in by the level."""

    metrics: ClassVar[Metrics] = (Metric("curriculum/level", "level"),)
    enabled: bool = Field(False, description="Start with an easier task.")
    start: float = Field(0.25, gt=0, le=1, description="Level at the start; 1 is the whole task.")
    step: float = Field(0.25, gt=0, le=1, description="What is added to the level.")
    raise_at: float = Field(0.7, ge=0, le=1, description="Success rate that raises the level.")
    episodes: int = Field(
        100, ge=1, le=1_000_000, description="Finished episodes that the success rate is of."
    )


class MotionCurriculumConfig(Config):
    """How often each motion is practised: more often the more it fails in evaluation."""

    metrics: ClassVar[Metrics] = (
        Metric("curriculum/failing", "motions failing", ".0f", curve=Curve(5, "yellow", (0, None))),
        Metric(
            "curriculum/largest_weight", "largest weight", ".1%", curve=Curve(6, "yellow", (0, 1))
        ),
    )
    enabled: bool = Field(False, description="Practise failing motions more often.")
    mix: float = Field(
        0.5, ge=0, lt=1, description="Share of episodes chosen by failures; the rest is uniform."
    )
    decay: float = Field(
        0.5, ge=0, lt=1, description="Weight of earlier evaluations in a motion's failure rate."
    )


class Curriculum:
    """The whole task from the start; a subclass eases it."""

    def broadcast(self) -> Tree:
        """For the next rollouts. Another "round" than before restarts every environment."""
        return {}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        """Take in the episodes {name: [k]} of each group that ended in an iteration; metrics."""
        return {}

    def evaluated(self, episodes: dict[str, Array]) -> None:
        """Take in the episodes {name: [n]} of an evaluation."""

    def turn(self, clock: Clock) -> dict[str, float]:
        """An iteration has ended, and its evaluation if one was due; metrics."""
        return {}

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        """There is nothing to load."""


class SuccessCurriculum(Curriculum):
    """Raises the level whenever enough of the last episodes of training have succeeded."""

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
