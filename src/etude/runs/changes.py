"""The settings that resumes of a run have changed, as its manifest records them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from etude.core.errors import UsageError

CHANGES = "changes"
"""Field of the manifest."""


class Change(NamedTuple):
    """Settings of a run that changed at a step; recipe.yaml keeps those it started with."""

    step: int
    fields: dict[str, tuple[Any, Any]]
    """{section.key: (value before, value from the step on)}."""

    def words(self) -> str:
        """For example "changed at step 2,048: algorithm.learning_rate 0.001 -> 0.0001"."""
        each = (f"{n} {json.dumps(a)} -> {json.dumps(b)}" for n, (a, b) in self.fields.items())
        return f"changed at step {self.step:,}: {', '.join(each)}"

    def after(self, last: Change) -> Change:
        """Both changes of one step as one."""
        both = {n: (last.fields.get(n, pair)[0], pair[1]) for n, pair in self.fields.items()}
        both = {**last.fields, **both}
        return Change(self.step, {name: pair for name, pair in both.items() if pair[0] != pair[1]})


def changes_of(manifest: Mapping[str, Any]) -> list[Change]:
    """The changes that a manifest records, the first one first."""
    found = manifest.get(CHANGES, [])
    try:
        return [
            Change(int(each["step"]), {str(n): (a, b) for n, (a, b) in each["fields"].items()})
            for each in found
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError("The changes in manifest.json cannot be read.") from error
