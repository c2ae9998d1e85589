"""Rewards held back until the end add up to those given on the way, and nothing else changes."""

from __future__ import annotations

import numpy as np

from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from etude.core.contracts import AbsentAgents, Restarts, TimedPhysics, ability
from etude.envs.adapters.gym import GymConfig
from etude.tasks.reach import ReachConfig


def test_contract() -> None:
    config = ReachConfig(max_episode_steps=12, episodic=True)
    check_contract(lambda rows, threads: config.make(rows, threads), exact_steps=200)


def test_an_episode_earns_the_same_in_the_end() -> None:
    config = ReachConfig(max_episode_steps=7)
    plain = config.make(5)
    late = config.model_copy(update={"episodic": True}).make(5)
    assert_same_bits(plain.reset(KEY)["state"], late.reset(KEY)["state"])
    earned = np.zeros(5)
    finished = 0
    for action in random_actions(plain, 30):
        given, held = plain.step(action), late.step(action)
        assert_same_bits(given.obs["state"], held.obs["state"])
        earned += given.reward
        over = held.terminated | held.truncated
        assert (held.reward[~over] == 0).all()
        np.testing.assert_array_equal(held.reward[over], earned[over].astype(np.float32))
        finished += int(over.sum())
        earned[over] = 0.0
    assert finished > 10


def test_what_some_environments_have_is_passed_through() -> None:
    env = ReachConfig(episodic=True).make(2)
    env.reset(KEY)
    env.step(np.zeros((2, 7), np.float32))
    timed = ability(env, TimedPhysics)
    assert timed is not None
    assert timed.physics_seconds > 0.0
    assert ability(env, Restarts) is env  # What was earned is forgotten at a restart.
    foreign = GymConfig(episodic=True).make(1)
    assert ability(foreign, AbsentAgents) is None
    assert ability(foreign, Restarts) is None
