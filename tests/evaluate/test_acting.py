"""Loaded policies in a loop of one's own: what they take, what they refuse, whole episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import etude
from etude.core.contracts import ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.evaluate.acting import LoadedPolicy
from etude.models.policies import PolicyConfig, make_policy
from toy_envs import BOX
from toys import EnvSpec


def loaded(kind: Any = "mlp", *reads: str) -> LoadedPolicy:
    reads = reads or ("state",)
    spec = EnvSpec({name: ArraySpec((4,)) for name in reads}, BOX, 6, ())
    config = PolicyConfig(kind=kind, hidden=(8,), units=6, actor_reads=reads, critic_reads=reads)
    return LoadedPolicy(make_policy(config, spec, Key(0)))


@pytest.mark.parametrize(
    ("obs", "sentence"),
    [
        ((np.zeros(4), {}), "act() takes the observation alone"),
        ("x", "The observation 'state' must be an array of numbers, not str"),
        ([1.0, [2.0]], "The observation 'state' must be an array of numbers, not list"),
        (np.zeros(3), "This policy reads 'state' as (4,), or as [num_envs, ...]"),
        (np.zeros((2, 3)), "it was given 'state' (2, 3)."),
        (None, "it was given 'state' ()."),
        ({"obs": np.zeros(4)}, "This policy acts on 'state'; 'state' is missing from 'obs'."),
        ({}, "'state' is missing from an empty observation."),
    ],
)
def test_wrong_observations_are_refused_in_a_sentence(obs: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        loaded().act(obs)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_several_observations_are_named() -> None:
    policy = loaded("mlp", "state", "goal")
    with pytest.raises(UsageError, match="instead of one array"):
        policy.act(np.zeros(4))
    with pytest.raises(UsageError, match="'goal' is missing from 'state'"):
        policy.act({"state": np.zeros(4)})
    assert policy.act({"state": np.zeros(4), "goal": np.zeros(4)}).shape == (2,)
    assert "state (4,), goal (4,)" in repr(policy)


def test_a_mask_of_ended_episodes_resets_them() -> None:
    policy, obs = loaded("lstm"), np.ones((3, 4), np.float32)
    assert policy.is_recurrent
    first = policy.act(obs)
    second = policy.act(obs)
    assert not np.array_equal(first, second)
    policy.reset(np.array([False, True, False]))
    third = policy.act(obs)
    assert np.allclose(third[1], first[1])
    assert not np.allclose(third[0], first[0])
    with pytest.raises(UsageError, match=r"call reset\(\) where episodes begin"):
        policy.act(obs[:2])
    policy.reset()
    assert np.allclose(policy.act(obs[:2]), first[:2])


def test_actions_are_drawn_from_a_generator() -> None:
    policy, obs = loaded(), np.ones(4, np.float32)
    one, two = (policy.act(obs, deterministic=False, rng=np.random.default_rng(3)) for _ in "ab")
    assert np.array_equal(one, two)
    assert not np.array_equal(one, policy.act(obs))


class Counting:
    """A Gymnasium environment without a limit; its reward is 1 a step."""

    def __init__(self, ends_at: int | None) -> None:
        self.ends_at, self.steps, self.seed = ends_at, 0, None

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps, self.seed = 0, seed
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        done = self.steps == self.ends_at
        return np.full(4, self.steps, np.float32), 1.0, done, False, {"at": self.steps}


def test_a_whole_episode() -> None:
    env = Counting(ends_at=5)
    played = loaded("lstm").episode(env, seed=7)
    assert (env.seed, played.length, played.total_reward, played.terminated) == (7, 5, 5.0, True)
    assert played.actions.shape == (5, 2)
    assert len(played.observations) == 6
    assert played.info == {"at": 5}
    cut = loaded().episode(Counting(None), max_steps=3)
    assert (cut.length, cut.terminated) == (3, False)
    with pytest.raises(UsageError, match=r"not with make_vec"):
        loaded().episode(etude.make_vec("reach", 2))


def test_tasks_are_made_by_name() -> None:
    env = etude.make("reach", max_episode_steps=3)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape
    ends = [env.step(env.action_space.sample())[3] for _ in range(3)]
    assert ends == [False, False, True]
    for wrong, sentence in (
        (lambda: etude.make("rech"), "There is no task 'rech'; did you mean 'reach'?"),
        (lambda: etude.make("CartPole-v1"), "use gymnasium.make for tasks of Gymnasium"),
        (lambda: etude.make("reach", tolerance=-1), "tolerance must be more than 0, not -1."),
        (lambda: etude.make("reach", toleranse=1), "did you mean tolerance?"),
        (lambda: etude.make("reach", ["stat"]), "This task has no observation 'stat': it has"),
    ):
        with pytest.raises(UsageError) as error:
            wrong()
        assert sentence in str(error.value)
