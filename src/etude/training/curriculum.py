"""Curricula: training begins with an easier task. Evaluation always has the whole task."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from etude.core.clock import Clock
from etude.core.config import Config
from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.metrics.declared import Curve, Metric, Metrics


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
