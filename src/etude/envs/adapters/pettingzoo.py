"""Parallel PettingZoo environments as a `BatchEnv`: agents are rows of one shared policy."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Protocol, Self

import numpy as np
from gymnasium import spaces
from pydantic import Field

from etude.core.contracts import Array, EnvSpec, Exactness, Observations, StepResult
from etude.core.errors import EtudeError, UsageError, describe_error, exits_as_errors
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.core.user_code import Untrusted, load_object
from etude.envs.adapters import object_state
from etude.envs.adapters.gym_spaces import FILM_RATE, Spaces, rendered
from etude.envs.config import EnvConfig
from etude.envs.probe import probe

Agent = Any
"""Identifier of an agent, usually a string."""
Given = Mapping[Agent, Any]
"""{agent: observation, reward, ...}."""
_EXTRA = ("pettingzoo", "mpe2")
_NEEDED = ("possible_agents", "reset", "step", "observation_space", "action_space")


class ParallelEnv(Protocol):
    """The part of PettingZoo's class of that name that is used here."""

    agents: list[Agent]
    possible_agents: list[Agent]

    def reset(self, *, seed: int) -> tuple[Given, Given]: ...

    def step(self, actions: Given) -> tuple[Given, Given, Given, Given, Given]: ...

    def observation_space(self, agent: Agent) -> spaces.Space[Any]: ...

    def action_space(self, agent: Agent) -> spaces.Space[Any]: ...

    def close(self) -> None: ...


def make_parallel(name: str, kwargs: Mapping[str, Any]) -> ParallelEnv:
    """Make one instance; errors are one sentence."""
    # MPE imports pygame, which would print a greeting in the output of commands.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    factory = _factory(name)
    try:
        with exits_as_errors(lambda: f"The constructor of '{name}'"):
            env: Any = factory(**kwargs)
    except EtudeError:
        raise
    except TypeError as error:
        raise UsageError(
            f"'{name}' does not take these arguments: {describe_error(error)}."
        ) from error
    except Exception as error:  # third-party code may raise anything
        raise UsageError(f"'{name}' cannot be made: {describe_error(error)}.") from error
    if hasattr(env, "agent_iter"):
        raise UsageError(f"In '{name}' agents act in turn: give its parallel_env instead.")
    missing = [part for part in _NEEDED if not hasattr(env, part)]
    if missing or not env.possible_agents:
        raise UsageError(
            f"'{name}' is not a parallel environment of PettingZoo: it lacks "
            f"{', '.join(missing) or 'any possible_agents'}."
        )
    made: ParallelEnv = env
    return made


def _factory(name: str) -> Callable[..., Any]:
    example = "a module such as mpe2.simple_spread_v3, or module:factory"
    try:
        factory = load_object(name, example, default="parallel_env")
    except Untrusted:
        raise
    except UsageError as error:
        clear = _hint_about(name, error.__cause__)
        raise error if clear is None else UsageError(clear) from error
    if not callable(factory):
        raise UsageError(f"{name} cannot be called: give a function that makes the environment.")
    made: Callable[..., Any] = factory
    return made


def _hint_about(name: str, cause: BaseException | None) -> str | None:
    """A more helpful message than that of `load_object`; None if there is none."""
    if cause is None:
        if ":" in name or not name:
            return None
        return f"{name} has no parallel_env: give what makes the environment, as module:factory."
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing in _EXTRA:
        return f"'{name}' needs the package '{missing}': pip install 'etude[multiagent]'."
    module = name.rpartition(":")[0] or name
    package, dot, last = module.rpartition(".")
    if missing != module or not dot:
        return None
    inside = importlib.import_module(package)
    known = [found.name for found in pkgutil.iter_modules(getattr(inside, "__path__", []))]
    near = difflib.get_close_matches(last, known, n=3, cutoff=0.5)
    hint = f" Nearest: {', '.join(f'{package}.{found}' for found in near)}." if near else ""
    return f"The package '{package}' has no module '{last}': check the name.{hint}"


def shared_spaces(env: ParallelEnv, name: str) -> Spaces:
    """The spaces of the agents, which must be equal, because one policy acts for all."""
    first, *others = env.possible_agents
    for what, space in (("observe", env.observation_space), ("act in", env.action_space)):
        for other in others:
            if space(other) != space(first):
                raise UsageError(
                    f"One policy acts for all agents of '{name}', but '{first}' and '{other}' "
                    f"{what} different spaces, {space(first)} and {space(other)}: pad them to "
                    "equal spaces in a factory of your own, for example with SuperSuit."
                )
    return Spaces(env.observation_space(first), env.action_space(first), name)


STEP_LIMIT = 1000
"""Step limit of environments without one."""


class PettingZooConfig(EnvConfig):
    """A parallel environment from PettingZoo; each agent is a row, and one policy acts for all."""

    kind: Literal["pettingzoo"] = "pettingzoo"
    parallel: str = Field(
        "mpe2.simple_spread_v3",
        description="Module with a `parallel_env`; or module:factory, file.py:factory.",
    )
    kwargs: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments of `parallel_env`."
    )
    max_episode_steps: int | None = Field(
        None,
        ge=1,
        description="Steps after which all living agents are truncated and a new episode starts; "
        f"None: the environment's `max_cycles`, {STEP_LIMIT} without one.",
    )

    @property
    def task_name(self) -> str:
        return self.parallel.rpartition(":")[2].rpartition(".")[2]

    def build(self, num_envs: int, threads: int = 1) -> PettingZooEnv:
        return PettingZooEnv(self, num_envs, threads)

    def for_film(self, size: tuple[int, int] = (1280, 720)) -> Self:
        return self.replace(kwargs={**self.kwargs, "render_mode": "rgb_array"})

    def exactness(self) -> Exactness:
        """The verdict of the probe, cached per process."""
        return probe(unprobed, self, 2 * self.num_agents, self.parallel)

    @property
    def num_agents(self) -> int:
        """Number of agents of one environment, cached per process."""
        name = self.model_dump_json()
        if name not in _counts:
            env = make_parallel(self.parallel, self.kwargs)
            _counts[name] = len(env.possible_agents)
            env.close()
        return _counts[name]


class PettingZooEnv:
    """Separate instances with A agents each, stepped in sequence.

    Rows e*A .. e*A+A-1 are the agents of environment e in the order of `possible_agents`. The
    episode of a row ends in one of these ways:

    - its agent is terminated or truncated, independent of the other agents;
    - its agent is missing from `env.agents` without having been terminated, which truncates it;
    - the step limit is reached, which truncates every living agent.

    Its final observation is that of this step, or the last one if there is none. After it the row
    is absent: observations, rewards and flags are zero, and its action is ignored. An agent starts
    an episode of its own in the step that first lists it in `env.agents`, which need not be the
    first step, and may return after its episode ended. Rewards of absent agents are dropped.

    When no agent lives any more, the environment is reset in the same step, with a seed from
    `key.episode(e*A, episode)`.
    """

    def __init__(
        self,
        config: PettingZooConfig,
        num_envs: int,
        threads: int = 1,
        *,
        exact: bool | None = None,
    ) -> None:
        """exact: verdict of the probe; None runs it for the first snapshot.

        `threads` is part of every environment's signature, and unused here.
        """
        first = make_parallel(config.parallel, config.kwargs)
        self.num_envs = num_envs
        self._agents: list[Agent] = list(first.possible_agents)
        _check_rows(num_envs, len(self._agents), config.parallel)
        self._spaces = shared_spaces(first, config.parallel)
        others = range(num_envs // len(self._agents) - 1)
        self._envs: list[ParallelEnv] = [
            first,
            *(make_parallel(config.parallel, config.kwargs) for _ in others),
        ]
        self._config = config
        self.step_rate = float(getattr(first, "metadata", {}).get("render_fps") or FILM_RATE)
        self.watch: Callable[[int], None] | None = None
        """Called with each row after its step, before a finished row is reset."""
        self._exact = exact
        self._key: Key | None = None
        self._started = False
        self._limit = _step_limit(config, first)
        self._slots = {agent: slot for slot, agent in enumerate(self._agents)}
        self._episode = [0] * len(self._envs)
        self._elapsed = [0] * len(self._envs)
        self._living: list[list[tuple[int, Agent]]] = [[] for _ in self._envs]
        self._obs = self._spaces.empty(num_envs)
        self.present: Array = np.zeros(num_envs, np.bool_)
        """[rows] bool: rows with a living agent in the last observation."""
        self.spec = EnvSpec(
            observations=self._spaces.observations,
            action=self._spaces.action,
            max_episode_steps=self._limit,
            agents=len(self._agents),
        )

    def reset(self, key: Key) -> Observations:
        """Reset every environment to its episode 0."""
        self._key = key
        self._episode = [0] * len(self._envs)
        obs = self._spaces.empty(self.num_envs)
        for index in range(len(self._envs)):
            self._begin(index, obs)
        self._started = True
        self._show(obs)
        return obs

    def step(self, actions: Array) -> StepResult:
        """One step of every environment; those without living agents are reset.

        actions: [rows, n] float32 for a box, [rows] or [rows, n] integers for choices.
        """
        obs = self._spaces.empty(self.num_envs)
        endings: Observations = {}
        reward = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, np.bool_)
        finished = np.zeros(self.num_envs, np.bool_)
        sent = self._spaces.actions(actions)
        for index, env in enumerate(self._envs):
            living = self._living[index]
            seen, given, ended, cut, _ = env.step({agent: sent[row] for row, agent in living})
            self._elapsed[index] += 1
            if self.watch is not None:
                for row, _ in living:
                    self.watch(row)
            staying = {a for a in env.agents if not (ended.get(a) or cut.get(a))}
            over = not staying or self._elapsed[index] >= self._limit
            for row, agent in living:
                reward[row] = self._spaces.number(given.get(agent, 0.0), "a reward")
                if over or agent not in staying:
                    finished[row] = True
                    # An episode that terminates at the step limit is not truncated.
                    terminated[row] = self._spaces.flag(ended.get(agent, False), "terminated")
                    # Stored before the reset, which may write to the observation.
                    endings = endings or self._spaces.empty(self.num_envs)
                    self._store_last(endings, row, seen.get(agent))
            if over:
                self._episode[index] += 1
                self._begin(index, obs)
            else:
                self._enter(index, staying, seen, obs)
        rows = np.flatnonzero(finished)
        final_obs = {name: array[rows] for name, array in (endings or obs).items()}
        self._show(obs)
        return StepResult(obs, reward, terminated, finished & ~terminated, rows, final_obs)

    def picture(self, row: int) -> Array:
        """[height, width, 3] uint8: rendering of the row's environment in the mode "rgb_array"."""
        env: Any = self._envs[row // len(self._agents)]
        return rendered(env.render, self._config.parallel)

    def _begin(self, index: int, obs: Observations) -> None:
        """Start an episode of an environment, and write the observations of its agents to `obs`."""
        if self._key is None:
            raise UsageError("reset or restore an environment before stepping it.")
        stream = self._key.episode(index * len(self._agents), self._episode[index])
        env = self._envs[index]
        seen, _ = env.reset(seed=int(stream.integers(2**31)))
        self._elapsed[index] = 0
        if not env.agents:
            raise UsageError(f"'{self._config.parallel}' has no agents after a reset.")
        self._enter(index, env.agents, seen, obs)

    def _enter(self, index: int, agents: Collection[Agent], seen: Given, obs: Observations) -> None:
        """Set the living agents, and write their observations to their rows."""
        first = index * len(self._agents)
        try:
            living = sorted((self._slots[agent], agent) for agent in agents)
            for slot, agent in living:
                self._spaces.store(obs, first + slot, seen[agent])
        except KeyError as error:
            raise UsageError(
                f"'{self._config.parallel}' lists the agent {error} in `agents`, but not in "
                "`possible_agents` or without an observation: it must be in both."
            ) from error
        self._living[index] = [(first + slot, agent) for slot, agent in living]

    def _store_last(self, endings: Observations, row: int, value: object) -> None:
        if value is not None:
            self._spaces.store(endings, row, value)
            return
        for name, array in endings.items():
            array[row] = self._obs[name][row]

    def _show(self, obs: Observations) -> None:
        self._obs = obs
        self.present = np.zeros(self.num_envs, np.bool_)
        self.present[[row for living in self._living for row, _ in living]] = True

    def snapshot(self) -> Tree:
        """The state of an exact environment; {} for others, whose rows start new episodes.

        {"episode", "elapsed": [rows] int64, "present": [rows] bool, "obs": {name: [rows, ...]},
        "objects": [rows, n] uint8}; an environment's text is spread over the rows of its agents.
        """
        if self._exact is None:
            self._exact = self._config.exactness().exact
        if not self._exact:
            return {}
        num_agents = len(self._agents)
        texts = [object_state.save(env).encode("utf-8") for env in self._envs]
        # JSON may end in blanks: pad texts of different lengths to one array.
        share = -(-max(map(len, texts)) // num_agents)
        padded = b"".join(text.ljust(share * num_agents) for text in texts)
        return {
            "episode": np.repeat(self._episode, num_agents),
            "elapsed": np.repeat(self._elapsed, num_agents),
            "present": self.present.copy(),
            "obs": {name: array.copy() for name, array in self._obs.items()},
            "objects": np.frombuffer(padded, np.uint8).reshape(self.num_envs, share).copy(),
        }

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Restore a snapshot; an empty one resets."""
        if not snapshot:
            self.reset(key)
            return
        rows = len(snapshot["episode"])
        if rows != self.num_envs:
            raise UsageError(f"This snapshot has {rows} rows, and the environment {self.num_envs}.")
        if not self._started:
            # Creates what an environment only creates in its first reset.
            self.reset(key)
        num_agents = len(self._agents)
        self._key = key
        self._episode = snapshot["episode"][::num_agents].tolist()
        self._elapsed = snapshot["elapsed"][::num_agents].tolist()
        present = snapshot["present"].reshape(-1, num_agents)
        for index, env in enumerate(self._envs):
            first = index * num_agents
            text = snapshot["objects"][first : first + num_agents].tobytes().decode()
            object_state.load(env, text)
            slots = np.flatnonzero(present[index]).tolist()
            self._living[index] = [(first + slot, self._agents[slot]) for slot in slots]
        self._show({name: array.copy() for name, array in snapshot["obs"].items()})

    def close(self) -> None:
        for env in self._envs:
            env.close()


def unprobed(config: PettingZooConfig, num_envs: int) -> PettingZooEnv:
    """Environments whose snapshots are taken without a probe."""
    return PettingZooEnv(config, num_envs, exact=True)


_counts: dict[str, int] = {}


def _check_rows(num_envs: int, num_agents: int, name: str) -> None:
    below = num_envs // num_agents * num_agents
    if below == num_envs and num_envs:
        return
    fit = f"{below} or {below + num_agents}" if below else f"{num_agents}"
    raise UsageError(
        f"collector.envs_per_group {num_envs} is not a multiple of the {num_agents} agents of "
        f"'{name}': {fit} would fit."
    )


def _step_limit(config: PettingZooConfig, env: ParallelEnv) -> int:
    inner = getattr(env, "unwrapped", env)
    own = config.kwargs.get("max_cycles", getattr(inner, "max_cycles", None))
    limits = [limit for limit in (config.max_episode_steps, own) if isinstance(limit, int)]
    return min((limit for limit in limits if limit > 0), default=STEP_LIMIT)
