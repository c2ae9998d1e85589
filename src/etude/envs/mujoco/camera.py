"""How a task is best seen in pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shot:
    """Where the camera stands, and how the view's `target` is drawn where a task has one."""

    look_at: tuple[float, float, float] | None = None
    """m; None: the middle of the model, seen whole."""
    follow: str | None = None
    """A body that stays above `look_at`, wherever it goes."""
    distance: float = 1.5
    """m from it."""
    azimuth: float = 140.0
    """deg about the vertical: 180 looks along -x, at the front of an arm that faces +x."""
    elevation: float = -25.0
    """deg."""
    floor: float | None = None
    """m: where to draw a floor, for a model that has none."""
    target: Literal["sphere", "disc"] = "sphere"
    target_radius: float = 0.02
    """m."""
    target_sink: float = 0.0
    """m that the mark lies below the target: a disc is drawn where things rest, not in them."""
