"""What every log reads from a row: in one way, so that a resumed run logs what any other does.

A number that is not finite is null in metrics.jsonl, so it comes back from there as nothing; it is
nothing here from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol


def step_of(row: Mapping[str, Any]) -> int:
    """The x axis: environment steps, or gradient updates where a run collects nothing."""
    return int(row.get("timesteps") or row.get("updates") or 0)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns that are finite numbers."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }


class Finding(Protocol):
    """One thing that looks wrong, and what to try."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...


class Judge(Protocol):
    """Follows a run's rows and says what they mean; `metrics.health.Health` is one."""

    def add(self, row: Mapping[str, float]) -> None: ...

    @property
    def phase(self) -> str: ...

    @property
    def warnings(self) -> Sequence[Finding]: ...
