from __future__ import annotations

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.adapters.gym import GymConfig
from etude.envs.config import EnvConfig
from etude.gym import AsGymnasium
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.tasks.reach import ReachConfig

SHORT = [PickPlaceConfig(max_episode_steps=12), ReachConfig(max_episode_steps=12)]


@pytest.mark.parametrize("config", [*SHORT, GymConfig(id="CartPole-v1")], ids=lambda c: c.kind)
def test_gymnasium_accepts_it(config: EnvConfig) -> None:
    env = AsGymnasium(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Neither of these is a fault here: no registry entry, and observations without bounds.
        warnings.filterwarnings("ignore", message=".*spec.*")
        warnings.filterwarnings("ignore", message=".*infinity.*")
        check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("config", SHORT, ids=lambda c: c.kind)
def test_it_is_the_batch_step_for_step(config: EnvConfig) -> None:
    batch, env = config.make(1), AsGymnasium(config, ("state",))
    stream, ends = np.random.default_rng(0), 0
    expected = batch.reset(Key(7).child("gymnasium"))["state"][0]
    obs, info = env.reset(seed=7)
    assert info == {}
    np.testing.assert_array_equal(obs, expected)
    for _ in range(40):
        action = stream.uniform(-1, 1, len(batch.spec.action.low)).astype(np.float32)
        result = batch.step(action[None])
        obs, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated) == (result.reward[0], result.terminated[0])
        assert truncated == result.truncated[0]
        if not (terminated or truncated):
            assert info == {}
            np.testing.assert_array_equal(obs, result.obs["state"][0])
            continue
        ends += 1
        np.testing.assert_array_equal(obs, result.final_obs["state"][0])
        assert set(info) == set(batch.spec.statistics)
        assert isinstance(info["is_success"], bool)
        assert info == {name: values[0] for name, values in result.episodes.items()}
        start, _ = env.reset()
        np.testing.assert_array_equal(start, result.obs["state"][0])
        assert not np.array_equal(start, obs)
    assert ends == 3


def test_several_observations_are_a_dict() -> None:
    env = AsGymnasium(PickPlaceConfig())
    assert isinstance(env.observation_space, spaces.Dict)
    obs, _ = env.reset(seed=1)
    assert {name: array.shape for name, array in obs.items()} == {"state": (28,), "critic": (9,)}


def test_an_episode_given_up_halfway_is_not_repeated() -> None:
    env = AsGymnasium(ReachConfig())
    first, _ = env.reset(seed=3)
    env.step(np.zeros(7, np.float32))
    second, _ = env.reset()
    assert not np.array_equal(first, second)
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(first, again)


def test_actions_outside_the_box_are_clipped() -> None:
    env, other = AsGymnasium(ReachConfig()), AsGymnasium(ReachConfig())
    env.reset(seed=3)
    other.reset(seed=3)
    np.testing.assert_array_equal(env.step(np.full(7, 9.0))[0], other.step(np.ones(7))[0])


def test_choices() -> None:
    env = AsGymnasium(GymConfig(id="CartPole-v1"))
    assert env.action_space == spaces.Discrete(2)
    env.reset(seed=0)
    assert env.step(1)[1] == 1.0


def test_it_has_one_row_and_wants_a_reset() -> None:
    with pytest.raises(UsageError, match="2 rows"):
        AsGymnasium(ReachConfig().make(2))
    env = AsGymnasium(ReachConfig(max_episode_steps=1).make(1))
    with pytest.raises(UsageError, match="reset"):
        env.step(np.zeros(7))
    env.reset()
    assert env.step(np.zeros(7))[3]
    with pytest.raises(UsageError, match="reset"):
        env.step(np.zeros(7))
