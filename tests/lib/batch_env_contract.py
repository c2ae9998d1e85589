"""What every environment must do; each environment's tests call `check_contract`."""

from __future__ import annotations

from typing import Any

from etude.core.contracts import Array, BatchEnv
from etude.core.keys import Key
from etude.envs import probe
from etude.envs.check import KEY, MakeEnv, check_env
from etude.envs.probe import play

__all__ = ["KEY", "assert_same_bits", "check_contract", "play", "random_actions"]


def random_actions(env: BatchEnv, steps: int, seed: int = 0) -> list[Array]:
    """Actions as a policy would send them, a little outside the bounds, through `to_env`."""
    return probe.random_actions(env, steps, Key(seed, ("actions",)), reach=1.2)


def check_contract(
    make: MakeEnv, *, steps: int = 200, exact_steps: int = 1000, agents: int = 1
) -> None:
    """All of the contract; what is broken is shown with its fix."""
    found = check_env(make, steps, exact_steps, agents)
    broken = [f for f in found if f.verdict == "failed"]
    assert not broken, "\n".join(f"{f.item}: {f.problem}. {f.fix}" for f in broken)


def assert_same_bits(one: Any, two: Any) -> None:
    """Two arrays are equal in type, shape and every bit."""
    assert one.dtype == two.dtype
    assert one.shape == two.shape
    assert one.tobytes() == two.tobytes()
