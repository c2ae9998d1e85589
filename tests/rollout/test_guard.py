"""Guarded environments: exits, deadlines and values."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.core.errors import EtudeError, Exited, UsageError, exits_as_errors
from etude.core.guard import Guard, Hung
from etude.core.keys import Key
from etude.envs.adapters.gym import GymConfig, GymEnv
from etude.rollout.local import Workers
from toy_envs import ToyEnv

ACTIONS = np.zeros((2, 2), np.float32)


class Acts(ToyEnv):
    """Does something in its step."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(2)
        self.act = act

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        changed = self.act()
        return result if changed is None else changed(result)


def stepped(act: Callable[[], Any], deadline: float | None = None) -> None:
    """Step a guarded environment in a thread of rollouts."""
    workers = Workers(1, deadline)
    env = workers.guard(Acts(act), "group 7")
    try:
        workers.run([lambda: (env.reset(Key(0)), env.step(ACTIONS))])
    finally:
        workers.close()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: sys.exit(0), r"sys\.exit\(0\)"),
        (lambda: os._exit(0), r"os\._exit\(0\)"),
        (interrupt, "KeyboardInterrupt"),
    ],
)
def test_an_exit_is_an_error_that_names_group_and_line(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(Exited, match=rf"of group 7 called {said} \(test_guard\.py, line"):
        stepped(act)


def test_a_call_that_hangs_is_named_and_left_behind() -> None:
    free = threading.Event()
    begin = time.monotonic()
    with pytest.raises(Hung, match=r"of group 7 has not come back from step for 0\.2 s"):
        stepped(lambda: free.wait(30) and None, 0.2)
    assert time.monotonic() - begin < 10
    free.set()


def test_a_child_that_an_environment_forks_exits_as_it_likes() -> None:
    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    stepped(fork)


def test_an_interrupt_of_the_main_thread_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt), exits_as_errors(lambda: "It"):
        raise KeyboardInterrupt
    with pytest.raises(Exited, match="It called"), exits_as_errors(lambda: "It"):
        os._exit(0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", np.float32(1.0)),
        ("reward", np.array(["1.5", "2"])),
        ("reward", np.array([None, 1.0])),
        ("terminated", np.zeros(2)),
        ("obs", {"state": np.zeros(4, np.float32)}),
        ("obs", {"state": np.array([["1", "2", "3", "4"]] * 2)}),
        ("obs", {}),
    ],
)
def test_what_a_batch_may_not_give(field: str, value: Any) -> None:
    def change(result: Any) -> Any:
        setattr(result, field, value)
        return result

    with pytest.raises(UsageError, match=r"gives .* is needed\.$"):
        stepped(lambda: change)


@pytest.mark.parametrize("act", ["scalar", "short", "text", "none", "reward text", "ended none"])
def test_what_a_gymnasium_environment_may_not_give(act: str, tmp_path: Path) -> None:
    """One environment: numpy would take each of these for a row of one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.txt").touch()
    kwargs: dict[str, Any] = {"act": act, "mark": str(tmp_path / "mark")}
    env = Guard(GymEnv(GymConfig(id="unruly_gym:Unruly-v0", kwargs=kwargs), 1))
    env.reset(Key(0))
    with pytest.raises(EtudeError, match=r"'unruly_gym:Unruly-v0' gives .* is needed"):
        env.step(np.zeros((1, 1), np.float32))
