"""The checks of the contract that play twice and compare every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from etude.core.contracts import BatchEnv
from etude.core.keys import Key
from etude.core.trees import digest, leaves
from etude.envs.probe import play, random_actions

MakeEnv = Callable[[int, int], BatchEnv]
"""(number of environments, threads) -> env."""
KEY = Key(7, ("contract",))
ENVIRONMENTS = 3


class Broken(Exception):
    """A check that failed."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


def _break(problem: str, fix: str) -> NoReturn:
    raise Broken(problem, fix)


def check_determinism(make: MakeEnv, steps: int) -> None:
    """A key fixes everything; another key gives other episodes; threads change nothing."""
    first, second = make(ENVIRONMENTS, 1), make(ENVIRONMENTS, 2)
    draw = "Draw from key.episode(row, episode) alone: no global or unseeded generator, no clock."
    obs = first.reset(KEY)
    start = digest(obs)
    if digest(second.reset(KEY)) != start:
        _break("two resets with one key give different starts", draw)
    actions = random_actions(first, steps, KEY.child("play"), reach=1.2)
    expected = play(first, actions)
    found = play(second, actions)
    if found != expected:
        step = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
        _break(f"two instances with one key and the same actions differ at step {step + 1}", draw)
    other = second.reset(KEY.child("other"))
    varied = any(len({row.tobytes() for row in array}) > 1 for array in obs.values())
    if varied and digest(other) == start:
        _break("another key gives the same starts", draw)
    if digest(second.reset(KEY)) != start or play(second, actions) != expected:
        _break(
            "a reset with the same key does not give the same episodes again",
            getattr(
                first,
                "state_advice",
                "Let reset put back everything a step changes, the episode counters too.",
            ),
        )


def check_independence(make: MakeEnv, steps: int) -> None:
    """Other actions in environment 1, mostly one row, leave every bit of 0 and 2 as it was."""
    first, second = make(ENVIRONMENTS, 1), make(ENVIRONMENTS, 1)
    first.reset(KEY)
    second.reset(KEY)
    at = np.arange(first.num_envs) // first.spec.agents == 1
    where = "row 1" if first.spec.agents == 1 else "environment 1"
    others = random_actions(first, steps, KEY.child("other play"), reach=1.2)
    actions = random_actions(first, steps, KEY.child("play"), reach=1.2)
    for step, (action, other) in enumerate(zip(actions, others, strict=True)):
        changed = action.copy()
        changed[at] = other[at]
        one, two = first.step(action), second.step(changed)
        arrays = {f"obs '{name}'": (one.obs[name], two.obs[name]) for name in one.obs}
        for name in ("reward", "terminated", "truncated"):
            arrays[name] = (getattr(one, name), getattr(two, name))
        for name, (a, b) in arrays.items():
            if a[~at].tobytes() != b[~at].tobytes():
                _break(
                    f"another action in {where} changes {name} of other rows at step {step + 1}",
                    "Look for a sum over rows, a shared generator or a shared array.",
                )


def check_snapshot(make: MakeEnv, steps: int) -> None:
    """A snapshot continues bit for bit in its own, a used and a new instance."""
    env = make(ENVIRONMENTS, 1)
    env.reset(KEY)
    play(env, random_actions(env, 30, KEY.child("before")))
    snapshot = env.snapshot()
    for path, leaf in leaves(snapshot):
        if not isinstance(leaf, dict) and np.shape(leaf)[:1] != (env.num_envs,):
            _break(
                f"'{path}' in the snapshot has no leading row axis",
                "Keep arrays [rows, ...] alone in a snapshot; what is the same always is no state.",
            )
    before = digest(snapshot)
    actions = random_actions(env, steps, KEY.child("after"), reach=1.2)
    expected = play(env, actions)
    if digest(snapshot) != before:
        _break("a step changed an earlier snapshot", "Copy every array in snapshot().")
    end = digest(env.snapshot())
    used, new = make(ENVIRONMENTS, 2), make(ENVIRONMENTS, 3)
    used.reset(KEY.child("elsewhere"))
    play(used, random_actions(used, 11, KEY.child("past")))
    for place, instance in (("its own", env), ("a used", used), ("a new", new)):
        instance.restore(snapshot, KEY)
        again = digest(instance.snapshot())
        found = play(instance, actions)
        keep = getattr(
            env,
            "state_advice",
            "Put everything a step reads into snapshot(), and copy it back in restore().",
        )
        if found != expected:
            step = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
            _break(f"restored in {place} instance it differs after {step + 1} steps", keep)
        if again != before or digest(instance.snapshot()) != end:
            _break(f"restored in {place} instance its snapshot is not the one restored", keep)
