"""Curricula: training starts with an easier task. Evaluation always uses the whole task."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

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
    """Practice of motions, and of their parts, in proportion to failures in training."""

    metrics: ClassVar[Metrics] = (
        Metric("curriculum/failing", "parts failing", ".0f", curve=Curve(5, "yellow", (0, None))),
        Metric(
            "curriculum/largest_weight", "largest weight", ".1%", curve=Curve(6, "yellow", (0, 1))
        ),
    )
    enabled: bool = Field(False, description="Practise failing parts of motions more often.")
    bins: int = Field(
        10, ge=1, le=1000, description="Parts of equal length in which a motion's failures count."
    )
    mix: float = Field(
        0.8, ge=0, lt=1, description="Fraction of episodes chosen by failures; others are uniform."
    )
    decay: float = Field(
        0.9, ge=0, lt=1, description="Weight of earlier iterations in the failure rates."
    )
    run_up: int = Field(
        3,
        ge=1,
        le=1000,
        description="Parts up to that of a failure in which episodes that practise it start.",
    )
    run_up_decay: float = Field(
        0.8, gt=0, le=1, description="Weight of a part of the run-up by that of the next part."
    )


class Curriculum:
    """Base class: the whole task from the start."""

    def broadcast(self) -> Tree:
        """The curriculum for the next rollouts."""
        return {}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        """Update with the episodes {name: [k]} of each group that ended in an iteration; returns
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
