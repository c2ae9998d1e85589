"""Tasks for others: vector environments and Gymnasium's registry."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import etude
from etude.core.keys import Key
from etude.gym import TASKS, task_config


def test_a_vector_environment_is_the_batch() -> None:
    env = etude.make_vec("walk-go1", num_envs=6, observations=None, max_episode_steps=20)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    batch = task_config("walk-go1", max_episode_steps=20).make(6)
    obs, _ = env.reset(seed=3)
    expected = batch.reset(Key(3).child("gymnasium"))
    assert env.observation_space.contains(obs)
    for name, array in expected.items():
        np.testing.assert_array_equal(obs[name], array)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(45):
        actions = rng.uniform(-1.5, 1.5, (6, 12)).astype(np.float32)
        obs, reward, terminated, truncated, infos = env.step(actions)
        result = batch.step(np.clip(actions, -1, 1))
        np.testing.assert_array_equal(reward, result.reward.astype(np.float64))
        np.testing.assert_array_equal(terminated, result.terminated)
        np.testing.assert_array_equal(truncated, result.truncated)
        for name in obs:
            np.testing.assert_array_equal(obs[name], result.obs[name])
        done = terminated | truncated
        assert ("final_obs" in infos) == done.any()
        for i, env_id in enumerate(result.final_envs):
            ended += 1
            assert infos["_final_obs"][env_id]
            np.testing.assert_array_equal(
                infos["final_obs"][env_id]["state"], result.final_obs["state"][i]
            )
            assert infos["final_info"]["is_success"][env_id] == result.episodes["is_success"][i]
    assert ended >= 12
    env.close()


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"ImitateWalk"}))
def test_gymnasium_finds_every_task(name: str) -> None:
    env = gymnasium.make(f"etude/{name}-v0")
    assert (
        env.observation_space.shape
        == task_config(TASKS[name]).make(1).spec.observations["state"].shape
    )
    check_env(env.unwrapped, skip_render_check=True)
    vector = gymnasium.make_vec(
        f"etude/{name}-v0", num_envs=3, vectorization_mode="vector_entry_point"
    )
    obs, _ = vector.reset(seed=1)
    assert obs.shape == (3, *env.observation_space.shape)
    vector.close()


def test_a_recipe_itself_names_its_task() -> None:
    recipe = etude.recipes.find("reach").replace(env__max_episode_steps=7)
    assert task_config(recipe) == task_config("reach", max_episode_steps=7)


def test_what_acts_is_not_shown_what_only_a_value_function_may_read() -> None:
    env = etude.make_vec("pick-place", num_envs=2)
    assert isinstance(env.single_observation_space, gymnasium.spaces.Box)


def test_stable_baselines3_trains_on_it() -> None:
    """The wrapper of docs/robots.md."""
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import VecEnv

    class ForSB3(VecEnv):
        def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
            super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
            self.env = env

        def reset(self) -> Any:
            return self.env.reset()[0]

        def step_async(self, actions: Any) -> None:
            self.result = self.env.step(actions)

        def step_wait(self) -> Any:
            obs, rewards, terminated, truncated, infos = self.result
            ends, final = terminated | truncated, infos.get("final_obs")
            each = [
                {"terminal_observation": final[i], "TimeLimit.truncated": bool(truncated[i])}
                if end
                else {}
                for i, end in enumerate(ends)
            ]
            return obs, rewards.astype(np.float32), ends, each

        def close(self) -> None:
            self.env.close()

        def get_attr(self, name: str, indices: Any = None) -> Any:
            return [None] * self.num_envs

        set_attr = env_method = get_attr

        def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

    env = ForSB3(etude.make_vec("reach", num_envs=8, max_episode_steps=20))
    model = sb3.PPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, device="cpu")
    model.learn(512)
    assert model.num_timesteps == 512
