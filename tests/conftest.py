"""Shared by all tests. `tests/lib` is on the import path."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import rotation
from etude.core import user_code
from etude.envs import probe

# What tests trust is kept away from what the person who runs them trusts.
_state = tempfile.TemporaryDirectory()
os.environ["XDG_STATE_HOME"] = _state.name

# A busy machine is no failure.
settings.register_profile("etude", deadline=None)
settings.load_profile("etude")


def pytest_addoption(parser: pytest.Parser) -> None:
    rotation.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(rotation.Plugin(config))


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


@pytest.fixture(autouse=True)
def _fresh_trust() -> None:
    """What one test has loaded is neither doubted nor trusted in the next."""
    for memory in (user_code._doubted, user_code._vouched, user_code._used):
        memory.clear()
