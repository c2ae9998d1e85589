"""How learning is spread out over shards, threads, ranks and devices."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from etude.core.clock import IntervalText
from etude.core.config import SECONDS, Config
from etude.core.errors import UsageError


class LearnerConfig(Config):
    """How learning is spread out. Shards and threads are part of a run's geometry."""

    shards: int = Field(
        1, ge=1, le=1024, description="Buffer parts, whose gradients are summed in order."
    )
    threads: int = Field(1, ge=1, le=1024, description="Torch threads of a gradient step.")
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="Device of the learner; auto is a GPU where torch finds one. Runs on a GPU are "
        "not exact, and none has been tested.",
    )
    reduce: Literal["exact", "fast"] = Field(
        "exact",
        description="How ranks sum gradients: in shard order, with the same bits on any number of "
        "ranks, or as fast as possible.",
    )
    timeout: float = Field(
        120.0,
        gt=3,
        le=SECONDS,
        description="Seconds without a heartbeat after which a rank counts as lost.",
    )
    compare_every: IntervalText = Field(
        "10 iterations",
        description="How often ranks compare their weights; they also do so before every save.",
    )

    def torch_device(self) -> torch.device:
        """The device that the learner computes on; refuses a GPU that is not there."""
        there = torch.cuda.is_available()
        if self.device == "cuda" and not there:
            raise UsageError("learner.device is cuda, but no GPU was found: use cpu.")
        return torch.device("cuda" if there and self.device != "cpu" else "cpu")
