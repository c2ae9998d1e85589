"""Gymnasium's walkers on the batch engine give what Gymnasium gives."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import mujoco
import numpy as np
import pytest

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.adapters.gym import GymConfig
from etude.envs.adapters.gym_native import WALKERS, WalkerBody, native_task
from etude.envs.check import check_env
from etude.envs.mujoco.env import MujocoEnv

TOLERANCE = 1e-9


def forces(name: str, seen: Array) -> slice:
    """Where an observation has contact forces: the last numbers, of all bodies but the world."""
    bodies = {"Ant-v5": 13, "Humanoid-v5": 13}.get(name, 0)
    return slice(0, len(seen) - 6 * bodies)


@pytest.mark.parametrize("name", sorted(WALKERS))
def test_a_thousand_steps_are_those_of_gymnasium(name: str) -> None:
    """From the state of a reset here, random actions, until unhealthy; then from the next.

    All but contact forces: see the module's text, and the test below.
    """
    theirs = gymnasium.make(name, disable_env_checker=True).unwrapped
    theirs.reset(seed=0)
    ours = MujocoEnv(native_task(name), 1)
    body, rng = ours.task.action, np.random.default_rng(0)
    assert isinstance(body, WalkerBody)
    names = [n for n, (_, weight) in ours.task.rewards.items() if weight]
    ours.reset(Key(0))
    low, high = theirs.action_space.low, theirs.action_space.high
    steps, worst = 0, 0.0
    while steps < 1000:
        mujoco.mj_resetData(theirs.model, theirs.data)
        theirs.set_state(body.qpos[0].copy(), body.qvel[0].copy())
        np.testing.assert_array_equal(body.observe()[0], theirs._get_obs())
        for _ in range(100):
            action = rng.uniform(low, high).astype(np.float32)
            seen, _, terminated, _, info = theirs.step(action.astype(np.float64))
            result = ours.step(action[None])
            steps += 1
            assert bool(result.terminated[0]) == terminated
            # Rewards are given as float32; the weighted terms have all the digits.
            paid = dict(zip(names, ours._weighted[:, 0], strict=True))
            for term in set(paid) - {"contact"}:
                away = abs(paid[term] - info[f"reward_{term}"])
                worst = max(worst, float(away) / max(abs(paid[term]), 1.0))
            if result.final_envs.size:
                break
            where = forces(name, seen)
            worst = max(worst, float(np.abs(body.observe()[0] - seen)[where].max()))
        else:
            ours.restart()
    assert worst < TOLERANCE


@pytest.mark.parametrize("name", ["Ant-v5", "Humanoid-v5"])
def test_contact_forces_are_those_before_the_last_physics_step(name: str) -> None:
    ours = MujocoEnv(native_task(name), 1)
    model, body = ours.simulation.model, ours.task.action
    assert isinstance(body, WalkerBody)
    data, rng = mujoco.MjData(model), np.random.default_rng(1)
    ours.reset(Key(1))
    data.qpos[:], data.qvel[:] = body.qpos[0], body.qvel[0]
    touched = 0
    for _ in range(15):
        action = rng.uniform(*body._range.T).astype(np.float32)
        result = ours.step(action[None])
        data.ctrl[:] = action
        mujoco.mj_step(model, data, nstep=ours.task.substeps)
        if result.final_envs.size:
            break
        assert body._contact is not None
        np.testing.assert_array_equal(body._contact[0], data.cfrc_ext)
        touched += bool(data.cfrc_ext.any())
    assert touched >= 2


@pytest.mark.parametrize("name", sorted(WALKERS))
def test_native_walkers_keep_the_contract(name: str) -> None:
    config = GymConfig(id=name, engine="batch")
    findings = check_env(config.build_unchecked, 30)
    assert [f for f in findings if f.verdict == "failed"] == []


def test_spaces_and_options_are_those_of_gymnasium() -> None:
    for name in WALKERS:
        theirs = gymnasium.make(name, disable_env_checker=True)
        spec = GymConfig(id=name, engine="batch").build(1).spec
        assert spec.observations["state"].shape == theirs.observation_space.shape
        np.testing.assert_array_equal(spec.action.low, theirs.action_space.low)
        np.testing.assert_array_equal(spec.action.high, theirs.action_space.high)
        assert spec.max_episode_steps == theirs.spec.max_episode_steps
    strict = native_task("Hopper-v5", {"healthy_reward": 3.0})
    assert strict.rewards["survive"][1] == 3.0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GymConfig(id="CartPole-v1", engine="batch"), "env.engine gymnasium"),
        (GymConfig(id="Ant-v5", engine="batch", kwargs={"render_mode": "x"}), "render_mode"),
    ],
)
def test_what_the_batch_engine_cannot_do_is_said(config: GymConfig, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config.build(1)


def test_a_user_reads_nothing_about_gymnasiums_own_files() -> None:
    make = (
        "from etude.envs.adapters.gym import GymConfig as G; G(id='HalfCheetah-v5', engine='batch')"
    )
    command = [sys.executable, "-c", f"{make}.make(1)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""
