"""Changes of where a run collects, for resumes and for what is computed again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.core.config import SECONDS, Config
from etude.rollout.local import COLLECTORS, GROUPS, THREADS, CollectorConfig


class Placement(Config):
    """Where a resumed run collects; fields that are None do not change."""

    kind: Literal["local", "ray"] | None = Field(
        None, description="Threads of this process, or actors on a Ray cluster."
    )
    threads: int | None = Field(
        None, ge=1, le=THREADS, description="Threads; with ray, in each actor."
    )
    actors: int | None = Field(
        None, ge=1, le=GROUPS, description="Ray actors; default one per machine."
    )
    address: str | None = Field(None, description="The Ray cluster: host:port, auto or local.")
    deadline: float | None = Field(
        None,
        gt=0,
        le=SECONDS,
        description="Seconds that one call of an environment may take; with ray, a rollout.",
    )
    allow_inexact: bool | None = Field(
        None,
        description="Use Ray actors whose CPU computes different bits, and mark the run not exact.",
    )

    def applied(self, config: CollectorConfig) -> CollectorConfig:
        """A recipe's collector config with these fields replaced."""
        return COLLECTORS.validate(config.model_dump() | self.model_dump(exclude_none=True))
