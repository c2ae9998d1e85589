"""Gates in these tests measure stand-ins: nothing is trained for their results."""

from __future__ import annotations

import pytest

from gates.learn import trainings
from gates.lib import beginnings


def nothing(gate: str, variant: str) -> beginnings.Begins:
    return {"computation": "here"}


@pytest.fixture(autouse=True)
def no_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (beginnings, trainings):
        monkeypatch.setattr(module, "kept", nothing)
