"""Worker processes of Gymnasium environments: the same bits, side by side."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from batch_env_contract import KEY, check_contract
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import digest
from etude.envs.adapters.gym import GymConfig, GymEnv
from etude.envs.adapters.workers import EnvWorkers
from etude.envs.probe import random_actions
from run_hash import run_hash

SLOW = GymConfig(id="slow_gym:Slow-v0", kwargs={"seconds": 0.0})


def spread(config: GymConfig, num_envs: int, workers: int) -> EnvWorkers:
    env = config.build(num_envs, workers)
    assert isinstance(env, EnvWorkers)
    return env


def played(env: Any, steps: int) -> list[str]:
    found = []
    for action in random_actions(env, steps, KEY.child("play")):
        result = env.step(action)
        arrays = {"obs": result.obs, "reward": result.reward, "final": result.final_obs}
        arrays |= {"ended": result.terminated, "cut": result.truncated, "at": result.final_envs}
        found.append(digest(arrays))
    return found


@pytest.mark.rotated
def test_contract() -> None:
    check_contract(lambda rows, threads: spread(SLOW, rows, 2), steps=60, exact_steps=60)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v5"])
def test_workers_change_nothing(env_id: str) -> None:
    """Steps, snapshots, and a snapshot of one continued by the other."""
    config = GymConfig(id=env_id)
    alone, shared = GymEnv(config, 5), spread(config, 5, 2)
    assert digest(alone.reset(KEY)) == digest(shared.reset(KEY))
    assert played(alone, 40) == played(shared, 40)
    one, two = alone.snapshot(), shared.snapshot()
    assert digest(one) == digest(two)
    expected = played(alone, 40)
    shared.restore(one, KEY)
    assert played(shared, 40) == expected
    alone.restore(two, KEY)
    assert played(alone, 40) == expected
    shared.close()


def test_a_run_has_the_same_bits(tmp_path: Any) -> None:
    from etude.api import train
    from etude.planning import recipes
    from toys import changed

    hashes = []
    for engine_threads in (1, 2):
        recipe = changed(
            recipes.find("ppo"),
            collector={"engine_threads": engine_threads},
            algorithm={"update_epochs": 2, "rollout_steps": 32},
            clock={"total_timesteps": 4 * 512, "iterations": 2, "cycles": 1},
            evaluation={"episodes": 4, "num_envs": 4, "envs_per_group": 4},
        )
        hashes.append(run_hash(train(recipe, tmp_path / str(engine_threads)).path))
    assert hashes[0] == hashes[1]


def test_errors_of_workers_are_said() -> None:
    config = GymConfig(id="slow_gym:Slow-v0", kwargs={"seconds": 0.0, "breaks": 3})
    env = spread(config, 4, 2)
    env.reset(KEY)
    with pytest.raises(EtudeError, match="the wheel came off"):
        played(env, 4)
    env.close()


def test_a_killed_worker_is_said_and_closing_ends_the_others() -> None:
    env = spread(SLOW, 4, 2)
    env.reset(KEY)
    first, second = (worker._process for worker in env._workers)
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(EtudeError, match=r"of environments 0 to 1 was ended by signal 9.*memory"):
        played(env, 4)
    env.close()
    assert second.returncode == 0


def test_an_environment_that_only_a_script_has_registered() -> None:
    import gymnasium

    from slow_gym import Slow

    gymnasium.register("OnlyHere-v0", Slow)
    try:
        with pytest.raises(UsageError, match=r"collector\.engine_threads 1 runs without workers"):
            spread(GymConfig(id="OnlyHere-v0"), 2, 2)
    finally:
        del gymnasium.registry["OnlyHere-v0"]


def test_uneven_parts() -> None:
    env = spread(SLOW, 2, 8)
    assert [part.stop - part.start for part in env._parts] == [1, 1]
    result = (env.reset(KEY), env.step(np.zeros((2, 1), np.float32)))[1]
    assert result.obs["state"].shape == (2, 2)
    env.close()
