"""The base of tasks written in numpy: say what a row is, and the rest of a `BatchEnv` follows."""

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
    """An array [rows, *shape] of a task that decides its future: `place = State(2)`.

    It starts at zero, is part of every snapshot, and keeps its memory and its type whatever is
    assigned to it.
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
                f"{type(task).__name__}.{self._name} is {list(array.shape)} and was given "
                f"{list(np.shape(value))}: assign all rows, or write to {self._name}[rows]."
            )
        array[...] = value


class Outcome(NamedTuple):
    """What a control step gave every row."""

    reward: Array
    """[rows]."""
    terminated: Array
    """[rows] bool: the task ended here; running out of time is counted for you."""
    statistics: Mapping[str, Array] = {}
    """{name: [rows]}: read where an episode ends, such as "is_success"."""


class ArrayTask(ABC):
    """Rows of a task as numpy arrays. A subclass declares, and implements three methods:

        class Seek(ArrayTask):
            observations = {"state": 4}
            action = ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0))
            max_episode_steps = 50
            statistics = ("is_success",)
            place = State(2)

    Episode counters, the time limit, resets in the step an episode ends in, and snapshots that
    resume bit for bit come from here. Options are further arguments of `__init__`, which calls
    `super().__init__(num_envs)`.
    """

    observations: Mapping[str, int | ArraySpec]
    """{name: size}, float32, or {name: ArraySpec}. Policies read "state" unless told otherwise."""
    action: ActionSpec
    max_episode_steps: int | None = None
    """Steps before time runs out; None when only the task itself ends an episode."""
    statistics: tuple[str, ...] = ()
    """Names in `Outcome.statistics`."""
    motions: tuple[str, ...] = ()
    """Names of the motions that are imitated, by the number in the statistic "motion"."""
    step_rate: float = 30.0
    """Steps of a second in films, which show a task that has `picture(row)`: [height, width, 3]
    uint8."""
    watch: Callable[[int], None] | None = None
    """Called with each row after its step, while a finished one still stands where it ended."""

    def __init__(self, num_envs: int, threads: int = 1) -> None:
        """`threads` is part of every environment's signature; numpy needs none."""
        for name in ("observations", "action"):
            if not hasattr(self, name):
                raise UsageError(f"{type(self).__name__} does not say its {name}: declare them.")
        self.num_envs = num_envs
        self.episode: Array = np.zeros(num_envs, np.int64)
        """[rows]: which episode each row is in."""
        self.elapsed: Array = np.zeros(num_envs, np.int64)
        """[rows]: control steps since the episode's start."""
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
        """Write the start of an episode into the state of rows [k].

        Draw from `streams[i]` for `rows[i]` and from nothing else, so that an episode depends on
        its row and number only.
        """

    @abstractmethod
    def advance(self, actions: Array) -> Outcome:
        """One control step of every row.

        actions: [rows, n] float32 for a box, [rows] int64 for one choice, [rows, n] for several.
        """

    @abstractmethod
    def observe(self) -> Observations:
        """{name: [rows, ...]} of the state as it is."""

    def reset(self, key: Key) -> Observations:
        """Every row at the start of its episode 0."""
        self._streams.use(key)
        self.episode[:] = 0
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def restart(self) -> Observations:
        """Every row leaves its episode, unreported, and begins its next one."""
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
        """New arrays of the declared type, so that what was given out stays as it was."""
        given = self.observe()
        if set(given) != set(self.spec.observations):
            raise UsageError(
                f"{type(self).__name__}.observe gives {_list(given)}, but `observations` declares "
                f"{_list(self.spec.observations)}: make them agree."
            )
        obs: Observations = {}
        for name, spec in self.spec.observations.items():
            obs[name] = np.array(given[name], spec.dtype)
            if obs[name].shape != (self.num_envs, *spec.shape):
                raise UsageError(
                    f"{type(self).__name__}.observe gives '{name}' as {list(obs[name].shape)}, but "
                    f"`observations` declares {[self.num_envs, *spec.shape]}: make them agree."
                )
        return obs

    def _per_row(self, name: str, values: Any, dtype: Any) -> Array:
        array = np.array(values, dtype)
        if array.shape != (self.num_envs,):
            raise UsageError(
                f"{type(self).__name__}.advance gives {name} as {list(array.shape)}: it must be "
                f"one number per row, [{self.num_envs}]."
            )
        return array

    def _statistics(self, given: Mapping[str, Array], rows: Array) -> dict[str, Array]:
        """{name: [k] float64} of the episodes that end in rows [k]."""
        if set(given) != set(self.statistics):
            raise UsageError(
                f"{type(self).__name__}.advance gives the statistics {_list(given)}, but "
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
        """Continue from a snapshot, on any instance with as many rows."""
        rows = len(snapshot["episode"])
        if rows != self.num_envs:
            raise UsageError(f"This snapshot has {rows} rows, the task {self.num_envs}.")
        self._streams.use(key)
        self.episode[:] = snapshot["episode"]
        self.elapsed[:] = snapshot["elapsed"]
        for name, array in self._arrays.items():
            array[...] = snapshot["state"][name]

    def close(self) -> None:  # noqa: B027
        """Nothing to release, unless a task opens something."""


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
