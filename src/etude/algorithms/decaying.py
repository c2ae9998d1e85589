"""The learning rate of an algorithm that imitates: linear from its start to a fraction of it."""

from __future__ import annotations

from pydantic import Field

from etude.core.config import Config


class DecayingRate(Config):
    """Settings of an algorithm whose learning rate falls over the run."""

    learning_rate: float = Field(1e-3, gt=0, description="Learning rate of Adam at the start.")
    final_learning_rate: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Learning rate at the end as a fraction of learning_rate; linear in between.",
    )

    def schedules(self, progress: float) -> dict[str, float]:
        """The rate at a progress from 0 (the run's start) to 1 (its end)."""
        end = self.learning_rate * self.final_learning_rate
        return {"learning_rate": self.learning_rate + (end - self.learning_rate) * progress}
