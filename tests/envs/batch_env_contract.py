"""What every environment must do; each environment's tests call `check_contract`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import digest, leaves

MakeEnv = Callable[[int, int], BatchEnv]
"""(num_rows, threads) -> env."""
KEY = Key(7, ("contract",))


def random_actions(env: BatchEnv, steps: int, seed: int = 0) -> list[Array]:
    """Actions as a policy would send them, [rows, n] each, then through `to_env`."""
    stream = np.random.default_rng(seed)
    spec = env.spec.action
    actions: list[Array] = []
    for _ in range(steps):
        if spec.kind == "box":
            drawn = stream.uniform(-1.2, 1.2, (env.num_rows, len(spec.low))).astype(np.float32)
        else:
            drawn = stream.integers(spec.sizes, size=(env.num_rows, len(spec.sizes)))
        actions.append(spec.to_env(drawn))
    return actions


def result_bits(result: StepResult) -> str:
    """A digest of everything a step gave."""
    episodes = {name.replace("/", "."): array for name, array in result.episodes.items()}
    return digest({**vars(result), "episodes": episodes})


def play(env: BatchEnv, actions: list[Array]) -> list[str]:
    return [result_bits(env.step(action)) for action in actions]


def check_contract(make: MakeEnv, *, steps: int = 200, exact_steps: int = 1000) -> None:
    """All of the contract, with three rows and several threads."""
    check_shapes(make(3, 1), steps)
    check_determinism(make, steps)
    check_row_independence(make, steps)
    check_round_trip(make, exact_steps)


def check_shapes(env: BatchEnv, steps: int) -> None:
    """Shapes, dtypes, and what finished rows look like."""
    rows = env.num_rows
    obs = env.reset(KEY)
    check_observations(env, obs, rows)
    lengths = np.zeros(rows, np.int64)
    for action in random_actions(env, steps):
        kept = {name: array.copy() for name, array in obs.items()}
        result = env.step(action)
        for name, array in obs.items():
            np.testing.assert_array_equal(array, kept[name], "a step wrote into earlier results")
        lengths += 1
        check_observations(env, result.obs, rows)
        assert result.reward.shape == (rows,)
        assert result.reward.dtype == np.float32
        assert result.terminated.dtype == result.truncated.dtype == np.bool_
        done = result.terminated | result.truncated
        np.testing.assert_array_equal(result.final_rows, np.flatnonzero(done))
        assert result.final_rows.dtype == np.int64
        assert not (result.terminated & result.truncated).any()
        check_observations(env, result.final_obs, result.final_rows.size)
        if result.final_rows.size:
            assert set(result.episodes) == set(env.spec.statistics)
        for array in result.episodes.values():
            assert array.shape == (result.final_rows.size,)
            assert array.dtype == np.float64
        if env.spec.max_episode_steps is not None:
            assert (lengths <= env.spec.max_episode_steps).all()
            assert done[lengths == env.spec.max_episode_steps].all()
        lengths[done] = 0
        obs = result.obs


def check_observations(env: BatchEnv, obs: Observations, rows: int) -> None:
    assert set(obs) == set(env.spec.observations)
    for name, spec in env.spec.observations.items():
        assert obs[name].shape == (rows, *spec.shape)
        assert obs[name].dtype == np.dtype(spec.dtype)
        assert np.isfinite(obs[name]).all()


def check_determinism(make: MakeEnv, steps: int) -> None:
    """A key fixes everything; another key gives other episodes; threads change nothing."""
    first, second = make(3, 1), make(3, 2)
    start = digest(first.reset(KEY))
    assert start == digest(second.reset(KEY))
    actions = random_actions(first, steps)
    expected = play(first, actions)
    assert play(second, actions) == expected
    assert digest(second.reset(KEY.child("other"))) != start
    # A reset leaves nothing of what came before.
    assert digest(second.reset(KEY)) == start
    assert play(second, actions) == expected


def check_row_independence(make: MakeEnv, steps: int) -> None:
    """Other actions in row 1 leave every bit of rows 0 and 2 as it was."""
    first, second = make(3, 1), make(3, 1)
    first.reset(KEY)
    second.reset(KEY)
    others = random_actions(first, steps, seed=1)
    for action, other in zip(random_actions(first, steps), others, strict=True):
        changed = action.copy()
        changed[1] = other[1]
        one, two = first.step(action), second.step(changed)
        for name in one.obs:
            assert one.obs[name][[0, 2]].tobytes() == two.obs[name][[0, 2]].tobytes()
        assert one.reward[[0, 2]].tobytes() == two.reward[[0, 2]].tobytes()
        assert (one.terminated == two.terminated)[[0, 2]].all()
        assert (one.truncated == two.truncated)[[0, 2]].all()


def check_round_trip(make: MakeEnv, steps: int) -> None:
    """A snapshot continues bit for bit in its own, a used and a new instance."""
    env = make(3, 1)
    env.reset(KEY)
    play(env, random_actions(env, 30, seed=2))
    snapshot = env.snapshot()
    for path, leaf in leaves(snapshot):
        empty = isinstance(leaf, dict)
        assert empty or leaf.shape[0] == 3, f"{path} has no leading row axis"
    before = digest(snapshot)
    actions = random_actions(env, steps, seed=3)
    expected = play(env, actions)
    assert digest(snapshot) == before, "a snapshot is a copy"
    end = digest(env.snapshot())
    used, new = make(3, 2), make(3, 3)
    used.reset(KEY.child("elsewhere"))
    play(used, random_actions(used, 11, seed=4))
    for instance in (env, used, new):
        instance.restore(snapshot, KEY)
        assert digest(instance.snapshot()) == before
        assert play(instance, actions) == expected
        assert digest(instance.snapshot()) == end


def assert_same_bits(one: Any, two: Any) -> None:
    """Two arrays are equal in type, shape and every bit."""
    assert one.dtype == two.dtype
    assert one.shape == two.shape
    assert one.tobytes() == two.tobytes()
