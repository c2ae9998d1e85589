"""A curriculum: what training begins with. Evaluation is never eased."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pydantic import Field

from etude.core.clock import Clock
from etude.core.config import Config
from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.metrics.declared import Curve, Metric, Metrics


class CurriculumConfig(Config):
    """How training widens; tasks that have areas to start in scale them by the level."""

    metrics: ClassVar[Metrics] = (Metric("curriculum/level", "level"),)
    enabled: bool = Field(False, description="Start narrow; off trains at full width throughout.")
    start: float = Field(0.25, gt=0, le=1, description="Level at the start; 1 is the whole task.")
    step: float = Field(0.25, gt=0, le=1, description="What is added when success allows.")
    raise_at: float = Field(0.7, ge=0, le=1, description="Success rate that raises the level.")
    episodes: int = Field(100, ge=1, description="Finished episodes a level is judged by.")


class MotionCurriculumConfig(Config):
    """How often each motion is practised: more often the more it fails in evaluation."""

    metrics: ClassVar[Metrics] = (
        Metric("curriculum/failing", "motions failing", ".0f", curve=Curve(5, "yellow", (0, None))),
        Metric(
            "curriculum/largest_weight", "largest weight", ".1%", curve=Curve(6, "yellow", (0, 1))
        ),
    )
    enabled: bool = Field(False, description="Go by failures; off practises all motions evenly.")
    mix: float = Field(
        0.5, ge=0, lt=1, description="Share that goes by failures; the rest is spread evenly."
    )
    decay: float = Field(
        0.5, ge=0, lt=1, description="How much of the earlier failures an evaluation leaves."
    )


class Curriculum(Protocol):
    """What the loop needs of one: it is told what happened, and broadcasts where it stands."""

    def broadcast(self) -> Tree:
        """For the next rollouts. Another "round" than before makes every row begin anew."""
        ...

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        """An iteration was collected in which these ended, {name: [k]} of each group; metrics."""
        ...

    def evaluated(self, episodes: dict[str, Array]) -> None:
        """These episodes {name: [n]} were played in evaluation."""
        ...

    def turn(self, clock: Clock) -> dict[str, float]:
        """An iteration has ended, and its evaluation if one was due; metrics."""
        ...

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


class NoCurriculum:
    """The whole task from the start."""

    def broadcast(self) -> Tree:
        return {}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        return {}

    def evaluated(self, episodes: dict[str, Array]) -> None:
        """Nothing depends on it."""

    def turn(self, clock: Clock) -> dict[str, float]:
        return {}

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        """There is nothing to load."""


class SuccessCurriculum:
    """Raises the level each time enough episodes in a row of counting have succeeded."""

    def __init__(self, config: CurriculumConfig) -> None:
        self._config = config
        self.level = config.start
        self._seen = 0
        self._won = 0

    def broadcast(self) -> Tree:
        return {"level": self.level}

    def update(self, episodes: list[dict[str, Array]]) -> dict[str, float]:
        """Count finished episodes, in group order; metrics."""
        for group in episodes:
            success = group["is_success"]
            self._seen += len(success)
            self._won += int(success.sum())
        if self._seen >= self._config.episodes:
            if self._won >= self._config.raise_at * self._seen:
                self.level = min(1.0, self.level + self._config.step)
            self._seen = self._won = 0
        return {"curriculum/level": self.level}

    def evaluated(self, episodes: dict[str, Array]) -> None:
        """Levels go by the episodes of training."""

    def turn(self, clock: Clock) -> dict[str, float]:
        return {}

    def state_dict(self) -> Tree:
        return {"level": self.level, "seen": self._seen, "won": self._won}

    def load_state_dict(self, state: Tree) -> None:
        self.level = float(state["level"])
        self._seen, self._won = int(state["seen"]), int(state["won"])
