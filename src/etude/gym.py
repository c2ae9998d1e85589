"""Etude's tasks in Gymnasium's registry: `import etude.gym; gymnasium.make("etude/Reach-v0")`.

`gymnasium.make("etude.gym:etude/Reach-v0")` imports this module itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register

from etude.core.contracts import ActionSpec, Array, ArraySpec, BatchEnv, Observations
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.config import EnvConfig

if TYPE_CHECKING:
    from etude.planning.recipe import Recipe

TASKS = {
    "Reach": "reach",
    "PickPlace": "pick-place",
    "PickPlaceAnywhere": "pick-place-anywhere",
    "ImitateWalk": "imitate-walk",
    "WalkGo1": "walk-go1",
    "WalkGo1Rough": "walk-go1-rough",
}
"""{name in Gymnasium: recipe with the environment}."""
STATE = ("state",)


def register_tasks() -> None:
    """Register every task as etude/NAME-v0, single and vectorised."""
    for name, recipe in TASKS.items():
        register(
            id=f"etude/{name}-v0",
            entry_point=f"{__name__}:make",
            vector_entry_point=f"{__name__}:make_vec",
            kwargs={"task": recipe},
        )


def task_config(task: str | EnvConfig | Recipe, **options: Any) -> EnvConfig:
    """Config of the environment of a recipe or a kind, with changed options."""
    from etude.core.catalogue import RECIPES
    from etude.core.explain import nearest
    from etude.envs.config import ENVS
    from etude.planning import recipes
    from etude.planning.recipe import Recipe

    if isinstance(task, EnvConfig):
        config = task
    elif isinstance(task, Recipe):
        config = task.task
    elif task in RECIPES.names():
        config = recipes.find(task).task
    elif ENVS.has(task):
        config = ENVS.make(task)
    else:
        near = nearest(task, [*RECIPES.names(), *ENVS.names()])
        hint = f"did you mean '{near}'? " if near else ""
        raise UsageError(
            f"There is no task '{task}'; {hint}`etude list` shows the recipes, whose tasks can be "
            "made; use gymnasium.make for tasks of Gymnasium."
        )
    return config.replace(**options)


def make_vec(
    task: str | EnvConfig | Recipe,
    num_envs: int = 1,
    observations: Sequence[str] | None = STATE,
    threads: int = 1,
    **options: Any,
) -> AsVectorEnv:
    """Make a `gymnasium.vector.VectorEnv` of `num_envs` environments, with automatic resets.

    task: a recipe or its name ("walk-go1"), a kind of environment, module:Class, or a config.
    observations: names to return, None for all; by default "state" alone.
    threads: of the physics. options: fields of the task's config, such as max_episode_steps=100.
    """
    return AsVectorEnv(task_config(task, **options).make(num_envs, threads), observations)


def make(
    task: str | EnvConfig | Recipe, observations: Sequence[str] | None = STATE, **options: Any
) -> AsGymnasium:
    """Make a `gymnasium.Env` of a task; see `make_vec`."""
    return AsGymnasium(task_config(task, **options), observations)


class AsGymnasium(gymnasium.Env):  # type: ignore[misc]  # Gymnasium is not read by the checker.
    """One environment of a task as a `gymnasium.Env`.

    Observations are an array if the task has one, and a dict if it has several. `info` of an
    episode's last step has its statistics, such as `is_success`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium's declaration)

    def __init__(
        self, env: BatchEnv | EnvConfig, observations: Sequence[str] | None = None
    ) -> None:
        """env: config of a task, or a batch of one environment, which this takes over.

        observations: names to return, such as ("state",) without "critic"; None returns all.
        """
        batch = env.make(1) if isinstance(env, EnvConfig) else env
        if batch.num_envs != 1:
            raise UsageError(
                f"`gymnasium.Env` is one environment, and this batch has {batch.num_envs} rows: "
                "make it with one row."
            )
        self.batch = batch
        named = _boxes(batch, observations)
        self._names = tuple(named)
        self._single = next(iter(named)) if len(named) == 1 else None
        self.observation_space = named[self._single] if self._single else spaces.Dict(named)
        self.action_space = _action_space(batch.spec.action)
        self._next: Observations | None = None
        self._ended = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode.

        A seed starts a new sequence of episodes. Without a seed the sequence continues, or a new
        one is drawn if the last episode was not finished.
        """
        super().reset(seed=seed)
        obs = self._next
        if seed is not None or obs is None:
            number = int(self.np_random.integers(2**63)) if seed is None else seed
            obs = self.batch.reset(Key(number).child("gymnasium"))
        self._next, self._ended = None, False
        return self._one(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One control step; the last one of an episode returns its final observation."""
        if self._ended:
            raise UsageError("reset the environment before its first step and after an episode.")
        result = self.batch.step(self._rows_of(action))
        terminated, truncated = bool(result.terminated[0]), bool(result.truncated[0])
        obs, info = result.obs, {}
        if terminated or truncated:
            # The batch has already started the next episode, which `reset` returns.
            obs, self._next, self._ended = result.final_obs, result.obs, True
            info = {name: float(values[0]) for name, values in result.episodes.items()}
            if "is_success" in info:
                info["is_success"] = bool(info["is_success"])
        return self._one(obs), float(result.reward[0]), terminated, truncated, info

    def close(self) -> None:
        self.batch.close()

    def _one(self, obs: Observations) -> Any:
        if self._single is not None:
            return obs[self._single][0].copy()
        return {name: obs[name][0].copy() for name in self._names}

    def _rows_of(self, action: Any) -> Array:
        """Convert an action of the space to the batch's: [1, n], or [1] for a single choice."""
        space = self.action_space
        if isinstance(space, spaces.Box):
            inside: Array = np.minimum(np.maximum(action, space.low), space.high)
            return inside.astype(np.float32, copy=False)[None]
        return np.asarray(action, np.int64)[None]


class AsVectorEnv(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    """Environments of a task as a `gymnasium.vector.VectorEnv`, with automatic resets in the same
    step (`AutoresetMode.SAME_STEP`).

    Observations are an array [num_envs, n] if the task has one, and a dict if it has several. In
    steps in which episodes end, `infos` has "final_obs" [num_envs] objects, "final_info"
    {statistic: [num_envs]}, and the masks "_final_obs", "_final_info" [num_envs] bool.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium's declaration)
        "render_modes": [],
        "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP,
    }

    def __init__(self, env: BatchEnv, observations: Sequence[str] | None = None) -> None:
        """observations: names to return; None returns all."""
        self.batch, self.num_envs = env, env.num_envs
        named = _boxes(env, observations)
        self._names = tuple(named)
        self._single = next(iter(named)) if len(named) == 1 else None
        self.single_observation_space = named[self._single] if self._single else spaces.Dict(named)
        self.single_action_space = _action_space(env.spec.action)
        batched = gymnasium.vector.utils.batch_space
        self.observation_space = batched(self.single_observation_space, self.num_envs)
        self.action_space = batched(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all environments; without a seed, a random one is drawn."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**63)) if seed is None else seed
        return self._shown(self.batch.reset(Key(number).child("gymnasium"))), {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """One control step of all environments with actions [num_envs, n] or [num_envs]."""
        space = self.action_space
        if isinstance(space, spaces.Box):
            actions = np.clip(actions, space.low, space.high).astype(np.float32, copy=False)
        result = self.batch.step(np.asarray(actions))
        ended, infos = result.final_envs, {}
        if ended.size:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[ended] = True
            final = np.full(self.num_envs, None, object)
            shown = self._shown(result.final_obs)
            for i, env_id in enumerate(ended):
                final[env_id] = (
                    shown[i] if self._single else {name: shown[name][i] for name in self._names}
                )
            statistics = {}
            for name, values in result.episodes.items():
                statistics[name] = np.zeros(self.num_envs)
                statistics[name][ended] = values
            infos = {
                "final_obs": final,
                "_final_obs": mask,
                "final_info": statistics,
                "_final_info": mask.copy(),
            }
        rewards = result.reward.astype(np.float64)
        return self._shown(result.obs), rewards, result.terminated, result.truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.batch.close()

    def _shown(self, obs: Observations) -> Any:
        return obs[self._single] if self._single else {name: obs[name] for name in self._names}


def _boxes(env: BatchEnv, wanted: Sequence[str] | None) -> dict[str, spaces.Box]:
    """Spaces of the wanted observations, None for all; refuses unknown names."""
    given = env.spec.observations
    for name in (each for each in wanted or () if each not in given):
        raise UsageError(
            f"This task has no observation '{name}': it has {', '.join(map(repr, given))}."
        )
    return {name: _box(given[name]) for name in wanted or given}


def _box(spec: ArraySpec) -> spaces.Box:
    if spec.dtype == "uint8":
        return spaces.Box(0, 255, spec.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, spec.shape, np.dtype(spec.dtype).type)


def _action_space(spec: ActionSpec) -> spaces.Space[Any]:
    if spec.kind == "box":
        low, high = np.array(spec.low, np.float32), np.array(spec.high, np.float32)
        return spaces.Box(low, high, dtype=np.float32)
    if spec.kind == "discrete":
        return spaces.Discrete(spec.sizes[0])
    return spaces.MultiDiscrete(spec.sizes)


__all__ = ["TASKS", "make", "make_vec", "register_tasks"]

register_tasks()
