"""Gates in these tests measure stand-ins: nothing is trained for their results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "gates"))
import beginnings  # isort: skip
import trainings  # isort: skip


def nothing(gate: str, variant: str) -> beginnings.Begins:
    return {"computation": "here"}


@pytest.fixture(autouse=True)
def no_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (beginnings, trainings):
        monkeypatch.setattr(module, "kept", nothing)
