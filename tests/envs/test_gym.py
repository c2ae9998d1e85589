from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from batch_env_contract import KEY, assert_same_bits, check_contract, random_actions
from etude.core.contracts import ActionSpec, ArraySpec
from etude.core.errors import NonFinite, UsageError
from etude.core.trees import copy_arrays
from etude.envs.adapters import gym
from etude.envs.adapters.gym import GymConfig, GymEnv
from etude.rollout.group import Group
from toys import toy_buffer, toy_policy


class Walk(gymnasium.Env[Any, Any]):
    """A random walk on a line; the noise comes from the environment's own generator."""

    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space: spaces.Space[Any] = spaces.Box(-2, 4, (1,), np.float32)

    def __init__(self) -> None:
        self.place = 0.0
        self.last_action: Any = None

    def noise(self) -> float:
        return float(self.np_random.normal())

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.noise()
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.place, 1.0])

    def step(self, action: Any) -> Any:
        self.last_action = action
        self.place += float(np.sum(action)) + self.noise()
        return self.observe(), self.place, abs(self.place) > 20, False, {"won": self.place > 20}


class HiddenWalk(Walk):
    """Noise from a global generator, which no snapshot can hold."""

    def noise(self) -> float:
        return random.gauss(0.0, 1.0)


class PlainObject:
    def __init__(self) -> None:
        self.count = 0


class HelperWalk(Walk):
    """State in a helper object."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = PlainObject()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.helper = PlainObject()
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.helper.count += 1
        return super().step(action * self.helper.count)


class Rich(Walk):
    """Pictures and numbers to see, several choices to make."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (4, 5, 3), np.uint8), "state": spaces.Box(-9, 9, (2,))}
    )
    action_space = spaces.MultiDiscrete([3, 2])

    def observe(self) -> Any:
        picture = np.full((4, 5, 3), int(abs(self.place) * 1000) % 256, np.uint8)
        return {"image": picture, "state": np.array([self.place, 0.0], np.float32)}


class Offset(Walk):
    action_space = spaces.Discrete(2, start=5)


class Picture(Rich):
    observation_space = spaces.Box(0, 255, (4, 5, 3), np.uint8)

    def observe(self) -> Any:
        return super().observe()["image"]


class Boundless(Walk):
    action_space = spaces.Box(-np.inf, np.inf, (1,))


class Reused(Rich):
    """Every observation is written into the same arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"image": np.zeros((4, 5, 3), np.uint8), "state": np.zeros(2, np.float32)}

    def observe(self) -> Any:
        for name, array in super().observe().items():
            self.seen[name][...] = array
        return self.seen


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    classes = [Walk, HiddenWalk, HelperWalk, Rich, Offset, Picture, Boundless, Reused]
    for env in classes:
        gymnasium.register(f"etude/{env.__name__}-v0", env, max_episode_steps=30)
    yield
    for env in classes:
        del gymnasium.registry[f"etude/{env.__name__}-v0"]


def config(name: str, **options: Any) -> GymConfig:
    return GymConfig(id=f"etude/{name}-v0", **options)


@pytest.mark.parametrize(
    "chosen",
    [
        GymConfig(),
        GymConfig(id="Pendulum-v1"),
        config("Walk", success_key="won"),
        config("HelperWalk"),
        config("Rich"),
        config("Offset"),
        config("Picture"),
    ],
    ids=lambda chosen: chosen.id,
)
def test_contract(chosen: GymConfig) -> None:
    check_contract(lambda rows, threads: GymEnv(chosen, rows))
    assert chosen.exactness().exact


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_mujoco_contract(env_id: str) -> None:
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo environments import it")
    chosen = GymConfig(id=env_id)
    steps = 1000 if env_id == "HalfCheetah-v5" else 60
    check_contract(lambda rows, threads: GymEnv(chosen, rows), steps=20, exact_steps=steps)
    verdict = chosen.exactness()
    assert verdict.exact, verdict.reason


def test_diverged_physics_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo environments import it")
    monkeypatch.chdir(tmp_path)
    env = GymEnv(GymConfig(id="HalfCheetah-v5"), 2)
    env.reset(KEY)
    actions = np.zeros((2, 6), np.float32)
    env.step(actions)
    env._envs[1].unwrapped.data.qvel[0] = np.nan
    with pytest.raises(NonFinite, match="environment 1"):
        env.step(actions)


def test_probe_finds_what_cannot_be_saved() -> None:
    verdict = config("HiddenWalk").exactness()
    assert not verdict.exact
    assert "HiddenWalk" in verdict.reason


def test_an_inexact_environment_starts_new_episodes_when_restored() -> None:
    env = GymEnv(config("HiddenWalk"), 3)
    env.reset(KEY)
    for action in random_actions(env, 5):
        env.step(action)
    assert env.snapshot() == {}
    # What was true of an episode that nobody can continue is not carried on into a new one.
    group, policy = Group(env), toy_policy(env)
    first = group.begin(policy, KEY)
    out = toy_buffer(env.spec, 3, 5).part(slice(0, 3))
    _, after = group.rollout(policy, first, KEY, 0, out)
    assert after["open"]["lengths"].max() > 0
    other = Group(GymEnv(config("HiddenWalk"), 3))
    _, resumed = other.rollout(policy, copy_arrays(after), KEY, 1, out)
    assert resumed["open"]["lengths"].max() <= 5


def test_specs_follow_the_spaces() -> None:
    assert GymEnv(GymConfig(), 1).spec.action == ActionSpec("discrete", sizes=(2,))
    assert GymEnv(GymConfig(), 1).spec.observations == {"state": ArraySpec((4,), "float32")}
    assert GymEnv(GymConfig(), 1).spec.max_episode_steps == 500
    assert GymEnv(config("Walk"), 1).spec.action == ActionSpec("box", low=(-2.0,), high=(4.0,))
    assert GymEnv(config("Rich"), 1).spec.action == ActionSpec("multi_discrete", sizes=(3, 2))
    rich = {"image": ArraySpec((4, 5, 3), "uint8"), "state": ArraySpec((2,), "float32")}
    assert GymEnv(config("Rich"), 1).spec.observations == rich
    assert set(GymEnv(config("Picture"), 1).spec.observations) == {"image"}


def test_steps_equal_those_of_the_bare_environment() -> None:
    """CartPole alone, seeded and reset by hand, gives the same numbers as a row."""
    env = GymEnv(GymConfig(), 2)
    obs = env.reset(KEY)["state"]
    bare = gymnasium.make("CartPole-v1")
    episode = 0
    expected: Any = bare.reset(seed=int(KEY.episode(1, 0).integers(2**31)))[0]
    for action in random_actions(env, 300):
        assert_same_bits(obs[1], expected)
        result = env.step(action)
        expected, reward, terminated, truncated, _ = bare.step(int(action[1]))
        assert result.reward[1] == reward
        assert (result.terminated[1], result.truncated[1]) == (terminated, truncated)
        if terminated or truncated:
            index = result.final_envs.tolist().index(1)
            assert_same_bits(result.final_obs["state"][index], expected)
            episode += 1
            seed = int(KEY.episode(1, episode).integers(2**31))
            expected = bare.reset(seed=seed)[0]
        obs = result.obs["state"]
    assert episode > 3


def test_a_final_observation_outlives_the_array_it_was_given_in() -> None:
    """An environment that reuses its arrays gives the numbers of one that makes new ones."""
    reused, fresh = GymEnv(config("Reused"), 3), GymEnv(config("Rich"), 3)
    reused.reset(KEY)
    fresh.reset(KEY)
    ended = 0
    for action in random_actions(fresh, 100):
        one, two = reused.step(action), fresh.step(action)
        ended += len(two.final_envs)
        for name in ("image", "state"):
            assert_same_bits(one.obs[name], two.obs[name])
            assert_same_bits(one.final_obs[name], two.final_obs[name])
    assert ended > 3


def test_discrete_actions_start_where_the_space_does() -> None:
    env = GymEnv(config("Offset"), 2)
    env.reset(KEY)
    env.step(np.array([0, 1]))
    assert [each.unwrapped.last_action for each in env._envs] == [5, 6]  # type: ignore[attr-defined]


def test_success_is_read_from_info() -> None:
    env = GymEnv(config("Walk", success_key="won"), 1)
    env.reset(KEY)
    while True:
        result = env.step(np.array([[4.0]], np.float32))
        if result.final_envs.size:
            break
    assert result.terminated[0]
    assert result.episodes["is_success"] == [1.0]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (GymConfig(id="CartPol-v1"), "Nearest: CartPole-v1"),
        (GymConfig(id="FrozenLake-v1"), "observes Discrete"),
        (GymConfig(kwargs={"colour": "red"}), "does not take these arguments"),
        (config("Boundless"), "bounded Box"),
        (GymConfig(id="no_such_module:Env-v0"), "There is no module"),
    ],
)
def test_mistakes_end_in_one_sentence(chosen: GymConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GymEnv(chosen, 1)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith("gymnasium.envs.box2d"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("Box2D", "pygame"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError) as refused:
        GymEnv(GymConfig(id="LunarLander-v3"), 1)
    fix = "pip install 'etude[gymnasium]'."
    assert str(refused.value) == f"'LunarLander-v3' needs the package Box2D: {fix}"
    env = GymEnv(GymConfig().for_film(), 1)
    env.reset(KEY)
    with pytest.raises(UsageError) as refused:
        env.picture(0)
    assert str(refused.value) == f"'CartPole-v1' needs the package pygame: {fix}"


def test_a_snapshot_of_other_size_is_refused() -> None:
    env = GymEnv(GymConfig(), 2)
    env.reset(KEY)
    with pytest.raises(UsageError, match="2 rows"):
        GymEnv(GymConfig(), 3).restore(env.snapshot(), KEY)


def test_a_remark_on_a_model_is_made_once(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo environments import it")
    gym._WARNED.clear()
    GymEnv(GymConfig(id="HalfCheetah-v5"), 3).close()
    first = capfd.readouterr()
    assert first.err.count("settotalmass") == 1
    GymEnv(GymConfig(id="HalfCheetah-v5"), 2).close()
    again = capfd.readouterr()
    assert "settotalmass" not in first.out + again.out + again.err


@pytest.mark.parametrize("named", ["my_walk:MyWalk-v0", "my_walk.py:MyWalk-v0"])
def test_a_module_in_the_current_folder_may_register_it(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_walk.py").write_text(OWN_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_walk", raising=False)
    env = gym.make_gym(GymConfig(id=named))
    assert env.spec is not None
    assert env.spec.id == "MyWalk-v0"
    del gymnasium.registry["MyWalk-v0"]


OWN_MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

gymnasium.register("MyWalk-v0", CartPoleEnv, max_episode_steps=200)
"""
