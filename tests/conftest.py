"""Shared by all tests. This folder is on the import path, so `toys` and `run_hash` can be used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from etude.envs import probe

# A busy machine is no failure.
settings.register_profile("etude", deadline=None)
settings.load_profile("etude")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Every test starts as a run does: results depend on the number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _probes_stay_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh processes for every probe of an environment would take most of the time; tests of
    them have `fresh_probes`."""
    if "fresh_probes" not in request.fixturenames:
        monkeypatch.setattr(probe, "_ask", lambda order: [{"unmade": "not in this test"}])


@pytest.fixture
def fresh_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are probed in fresh processes, as they are outside of tests."""
    monkeypatch.setattr(probe, "_verdicts", {})
