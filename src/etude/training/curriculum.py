"""A curriculum: training starts easy and widens with success. Evaluation is never eased."""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from etude.core.contracts import Fragment
from etude.core.recipe import Config
from etude.core.trees import Tree


class CurriculumConfig(Config):
    """How training widens; tasks that have areas to start in scale them by the level."""

    enabled: bool = Field(False, description="Start narrow; off trains at full width throughout.")
    start: float = Field(0.25, gt=0, le=1, description="Level at the start; 1 is the whole task.")
    step: float = Field(0.25, gt=0, le=1, description="What is added when success allows.")
    raise_at: float = Field(0.7, ge=0, le=1, description="Success rate that raises the level.")
    episodes: int = Field(100, ge=1, description="Finished episodes a level is judged by.")


class Curriculum(Protocol):
    """What the loop needs of one: it is told what was collected, and broadcasts where it stands."""

    def broadcast(self) -> Tree: ...

    def update(self, fragments: list[Fragment]) -> dict[str, float]: ...

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


class NoCurriculum:
    """The whole task from the start."""

    def broadcast(self) -> Tree:
        return {}

    def update(self, fragments: list[Fragment]) -> dict[str, float]:
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

    def update(self, fragments: list[Fragment]) -> dict[str, float]:
        """Count finished episodes, in group order; metrics."""
        for fragment in fragments:
            success = fragment.episodes["is_success"]
            self._seen += len(success)
            self._won += int(success.sum())
        if self._seen >= self._config.episodes:
            if self._won >= self._config.raise_at * self._seen:
                self.level = min(1.0, self.level + self._config.step)
            self._seen = self._won = 0
        return {"curriculum/level": self.level}

    def state_dict(self) -> Tree:
        return {"level": self.level, "seen": self._seen, "won": self._won}

    def load_state_dict(self, state: Tree) -> None:
        self.level = float(state["level"])
        self._seen, self._won = int(state["seen"]), int(state["won"])
