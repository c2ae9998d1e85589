"""The probe of foreign environments: this process, and two fresh ones with other hash seeds."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from etude.envs import probe
from etude.envs.adapters.gym import GymConfig
from etude.envs.adapters.pettingzoo import PettingZooConfig
from etude.envs.named_task import TaskConfig

COLOURS = '''
import gymnasium
import numpy as np
from gymnasium import spaces


NAMES = {"red", "green", "blue", "yellow", "white", "black", "brown", "orange"}


class Colours(gymnasium.Env):
    """Shows what comes first in a set of strings, which is another in each process."""

    observation_space = spaces.Box(0, 9, (8,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ordered=False):
        self.ordered = ordered

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def observe(self):
        names = sorted(NAMES) if self.ordered else NAMES
        return np.array([len(name) for name in names], np.float32)

    def step(self, action):
        print("an environment that prints")
        return self.observe(), float(self.np_random.normal()), False, False, {}


gymnasium.register("Colours-v0", Colours, max_episode_steps=20)
'''
pytestmark = pytest.mark.usefixtures("fresh_probes")


@pytest.fixture
def colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that registers an environment, where both this process and others find it."""
    (tmp_path / "own_colours.py").write_text(COLOURS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("colours")
def test_an_environment_that_iterates_a_set_of_strings_is_not_exact() -> None:
    verdict = GymConfig(id="own_colours:Colours-v0").exactness()
    assert not verdict.exact
    assert "in another process" in verdict.reason
    assert "the order of a set" in verdict.reason
    sorted_names = GymConfig(id="own_colours:Colours-v0", kwargs={"ordered": True})
    verdict = sorted_names.exactness()
    assert verdict.exact, verdict.reason
    assert verdict.reason.endswith("in this and in two fresh processes")


@pytest.mark.parametrize(
    "config",
    [
        GymConfig(id="HalfCheetah-v5"),
        PettingZooConfig(),
        pytest.param(TaskConfig(), marks=pytest.mark.rotated),
        pytest.param(GymConfig(id="Humanoid-v5"), marks=pytest.mark.rotated),
    ],
)
def test_what_is_exact_stays_so(config: Any) -> None:
    verdict = config.exactness()
    assert verdict.exact, verdict.reason
    assert verdict.reason.endswith("in this and in two fresh processes")
    start = time.perf_counter()
    assert config.exactness() is verdict  # asked once
    assert time.perf_counter() - start < 0.1


class Known(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_one_that_only_this_process_knows_is_judged_here_and_says_so() -> None:
    gymnasium.register("etude/Known-v0", Known)
    try:
        verdict = GymConfig(id="etude/Known-v0").exactness()
    finally:
        del gymnasium.registry["etude/Known-v0"]
    assert verdict.exact
    assert "but only in this process" in verdict.reason
    assert "Gymnasium has no environment" in verdict.reason


def test_a_process_that_hangs_or_dies_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    order = json.dumps({"config": ["time", "sleep"]}).encode()
    monkeypatch.setattr(probe, "PATIENCE", 0.01)
    for answer in probe._ask(order):
        assert "it did not answer within" in answer["unmade"]
    monkeypatch.setattr(probe, "PATIENCE", 60.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for answer in probe._ask(order):
        assert answer["unmade"] == "the process ended with code 1"


def test_the_current_folder_does_not_take_the_place_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert GymConfig(id="CartPole-v1").exactness().exact
    assert os.listdir(tmp_path) == ["numpy.py"]
