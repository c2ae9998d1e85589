"""The base of tasks in numpy: a subclass defines the rows, and this adds the rest of a
`BatchEnv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec, Observations, StepResult
from etude.core.errors import UsageError
from etude.core.keys import Key, Streams
from etude.core.trees import Tree


class State:
    """A state array [rows, *shape] of a task: `place = State(2)`.

    It starts at zero and is part of every snapshot. Assignments are copied into it, and keep its
    dtype.
    """

    def __init__(self, *shape: int, dtype: str = "float64") -> None:
        self.shape = shape
        self.dtype = dtype
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, task: None, owner: type) -> State: ...

    @overload
    def __get__(self, task: ArrayTask, owner: type) -> Array: ...

    def __get__(self, task: ArrayTask | None, owner: type) -> State | Array:
        return self if task is None else task._arrays[self._name]

    def __set__(self, task: ArrayTask, value: Any) -> None:
        array = task._arrays[self._name]
        if value is array:  # after `self.place += ...`
            return
        if np.shape(value) not in ((), array.shape):
            raise UsageError(
                f"{type(task).__name__}.{self._name} has shape {list(array.shape)}, and the value "
                f"{list(np.shape(value))}: assign all rows, or write to {self._name}[rows]."
            )
        array[...] = value


class Outcome(NamedTuple):
    """Result of a control step for every row."""

    reward: Array
    """[rows]."""
    terminated: Array
    """[rows] bool: the episode terminates; truncation at the time limit is added."""
    statistics: Mapping[str, Array] = {}
    """{name: [rows]}: statistics such as "is_success", used for rows whose episode ends."""


class ArrayTask(ABC):
    """A task as numpy arrays with a row per environment. A subclass declares its fields:

        class Seek(ArrayTask):
            observations = {"state": 4}
            action = ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0))
            max_episode_steps = 50
            statistics = ("is_success",)
            place = State(2)

    It implements `reset_rows`, `advance` and `observe`. This class adds episode counters, the time
    limit, resets in the step in which an episode ends, and snapshots that resume bit for bit.
    Options are further arguments of `__init__`, which calls `super().__init__(num_envs)`.
    """

    observations: Mapping[str, int | ArraySpec]
    """{name: size} for float32, or {name: ArraySpec}. By default policies read "state"."""
    action: ActionSpec
    max_episode_steps: int | None = None
    """Steps until an episode is truncated; None: never."""
    statistics: tuple[str, ...] = ()
    """Names of `Outcome.statistics`."""
    motions: tuple[str, ...] = ()
    """Names of the reference motions, in the order of the statistic "motion"."""
    step_rate: float = 30.0
    """Steps per second in films, for tasks with a method `picture(row)`: [height, width, 3]
    uint8."""
    watch: Callable[[int], None] | None = None
    """Called with each row after its step, before finished rows are reset."""

    def __init__(self, num_envs: int, threads: int = 1) -> None:
        """`threads` is part of every environment's signature, and unused here."""
        for name in ("observations", "action"):
            if not hasattr(self, name):
                raise UsageError(f"{type(self).__name__} has no field `{name}`: declare it.")
        self.num_envs = num_envs
        self.episode: Array = np.zeros(num_envs, np.int64)
        """[rows]: number of each row's current episode."""
        self.elapsed: Array = np.zeros(num_envs, np.int64)
        """[rows]: control steps since the start of the episode."""
        self._arrays: dict[str, Array] = {
            name: np.zeros((num_envs, *state.shape), state.dtype)
            for base in reversed(type(self).__mro__)
            for name, state in vars(base).items()
            if isinstance(state, State)
        }
        self._streams = Streams(num_envs)
        self.spec = EnvSpec(
            observations={
                name: ArraySpec((size,)) if isinstance(size, int) else size
                for name, size in self.observations.items()
            },
            action=self.action,
            max_episode_steps=self.max_episode_steps,
            statistics=self.statistics,
            motions=self.motions,
        )

    @abstractmethod
    def reset_rows(self, rows: Array, streams: Sequence[np.random.Generator]) -> None:
        """Write the initial state of an episode of rows [k].

        Draw random numbers for `rows[i]` from `streams[i]` only, so that an episode depends only on
        its row and number.
        """

    @abstractmethod
    def advance(self, actions: Array) -> Outcome:
        """One control step of every row.

        actions: [rows, n] float32 for a box, [rows] int64 for one choice, [rows, n] for several.
        """

    @abstractmethod
    def observe(self) -> Observations:
        """Observations {name: [rows, ...]} of the current state."""

    def reset(self, key: Key) -> Observations:
        """Reset every row to its episode 0."""
        self._streams.use(key)
        self.episode[:] = 0
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def restart(self) -> Observations:
        """Reset every row to its next episode; the open episodes are not reported."""
        self.episode += 1
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def step(self, actions: Array) -> StepResult:
        """One control step; finished rows are reset in it."""
        self.elapsed += 1
        outcome = self.advance(actions)
        reward = self._per_row("reward", outcome.reward, np.float32)
        terminated = self._per_row("terminated", outcome.terminated, np.bool_)
        if self.max_episode_steps is None:
            truncated: Array = np.zeros(self.num_envs, np.bool_)
        else:
            truncated = (self.elapsed >= self.max_episode_steps) & ~terminated
        rows = np.flatnonzero(terminated | truncated)
        obs = self._observe()
        final_obs = {name: array[rows] for name, array in obs.items()}
        episodes = self._statistics(outcome.statistics, rows)
        if self.watch is not None:
            for row in range(self.num_envs):
                self.watch(row)
        if rows.size:
            self.episode[rows] += 1
            self._begin(rows)
            obs = self._observe()
        return StepResult(obs, reward, terminated, truncated, rows, final_obs, episodes)

    def _begin(self, rows: Array) -> None:
        self.elapsed[rows] = 0
        streams = self._streams.begin(rows.tolist(), self.episode[rows].tolist())
        self.reset_rows(rows, streams)

    def _observe(self) -> Observations:
        """Copies of the declared dtype, so that returned arrays do not change later."""
        given = self.observe()
        if set(given) != set(self.spec.observations):
            raise UsageError(
                f"{type(self).__name__}.observe returns {_list(given)}, but `observations` "
                f"declares {_list(self.spec.observations)}: make them agree."
            )
        obs: Observations = {}
        for name, spec in self.spec.observations.items():
            obs[name] = np.array(given[name], spec.dtype)
            if obs[name].shape != (self.num_envs, *spec.shape):
                raise UsageError(
                    f"{type(self).__name__}.observe returns '{name}' as {list(obs[name].shape)}, "
                    f"but `observations` declares {[self.num_envs, *spec.shape]}: make them agree."
                )
        return obs

    def _per_row(self, name: str, values: Any, dtype: Any) -> Array:
        array = np.array(values, dtype)
        if array.shape != (self.num_envs,):
            raise UsageError(
                f"{type(self).__name__}.advance returns {name} as {list(array.shape)}: it must be "
                f"one number per row, [{self.num_envs}]."
            )
        return array

    def _statistics(self, given: Mapping[str, Array], rows: Array) -> dict[str, Array]:
        """Statistics {name: [k] float64} of the episodes that end in rows [k]."""
        if set(given) != set(self.statistics):
            raise UsageError(
                f"{type(self).__name__}.advance returns the statistics {_list(given)}, but "
                f"`statistics` declares {_list(self.statistics)}: make them agree."
            )
        if not rows.size:
            return {}
        return {name: self._per_row(name, given[name], np.float64)[rows] for name in given}

    def snapshot(self) -> Tree:
        """Episode counters and every declared `State`, copied."""
        return {
            "episode": self.episode.copy(),
            "elapsed": self.elapsed.copy(),
            "state": {name: array.copy() for name, array in self._arrays.items()},
        }

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Restore a snapshot of an instance with the same number of rows."""
        rows = len(snapshot["episode"])
        if rows != self.num_envs:
            raise UsageError(f"This snapshot has {rows} rows, and the task {self.num_envs}.")
        self._streams.use(key)
        self.episode[:] = snapshot["episode"]
        self.elapsed[:] = snapshot["elapsed"]
        for name, array in self._arrays.items():
            array[...] = snapshot["state"][name]

    def close(self) -> None:  # noqa: B027
        """Release what the task has opened; nothing by default."""


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
