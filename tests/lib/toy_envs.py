"""Environments to test with whose every number is known; importing them is quick, without torch."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np

from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree

BOX = ActionSpec("box", low=(-2.0, 0.0), high=(2.0, 1.0))
DISCRETE = ActionSpec("discrete", sizes=(3,))
MULTI = ActionSpec("multi_discrete", sizes=(2, 4))
ACTIONS = {spec.kind: spec for spec in (BOX, DISCRETE, MULTI)}
LONGEST = 6


class ToyEnv:
    """Episodes of 1 to 6 steps; length, ending and a level come from the episode's own stream.

    Observation: steps so far, episode number, level, sum of the last action. Reward: level plus
    the sum of the action.
    """

    def __init__(self, num_envs: int, action: ActionSpec = BOX) -> None:
        self.num_envs = num_envs
        self.spec = EnvSpec({"state": ArraySpec((4,))}, action, LONGEST, ("is_success", "level"))
        self.key: Key | None = None
        self.state: dict[str, Array] = {
            "episode": np.zeros(num_envs, np.int64),
            "elapsed": np.zeros(num_envs, np.int64),
            "length": np.zeros(num_envs, np.int64),
            "terminates": np.zeros(num_envs, np.bool_),
            "level": np.zeros(num_envs),
            "acted": np.zeros(num_envs),
        }
        self.num_resets = 0

    def _begin(self, row: int) -> None:
        assert self.key is not None
        state, stream = self.state, self.key.episode(row, int(self.state["episode"][row]))
        state["elapsed"][row] = 0
        state["acted"][row] = 0.0
        state["length"][row] = stream.integers(1, LONGEST + 1)
        state["terminates"][row] = stream.random() < 0.5
        state["level"][row] = stream.normal()

    def _observe(self) -> Observations:
        columns = [self.state[name] for name in ("elapsed", "episode", "level", "acted")]
        return {"state": np.stack(columns, axis=1).astype(np.float32)}

    def reset(self, key: Key) -> Observations:
        self.key = key
        self.num_resets += 1
        self.state["episode"][:] = 0
        for row in range(self.num_envs):
            self._begin(row)
        return self._observe()

    def step(self, actions: Array) -> StepResult:
        state = self.state
        state["elapsed"] += 1
        state["acted"][:] = actions.reshape(self.num_envs, -1).sum(axis=1)
        reward = (state["level"] + state["acted"]).astype(np.float32)
        done = state["elapsed"] >= state["length"]
        terminated, truncated = done & state["terminates"], done & ~state["terminates"]
        rows = np.flatnonzero(done)
        final_obs = {name: array[rows] for name, array in self._observe().items()}
        episodes = {
            "is_success": state["terminates"][rows].astype(np.float64),
            "level": state["level"][rows].copy(),
        }
        for row in rows:
            state["episode"][row] += 1
            self._begin(int(row))
        return StepResult(self._observe(), reward, terminated, truncated, rows, final_obs, episodes)

    def snapshot(self) -> Tree:
        return {name: array.copy() for name, array in self.state.items()}

    def restore(self, snapshot: Tree, key: Key) -> None:
        self.key = key
        self.state = {name: np.array(array) for name, array in snapshot.items()}

    def close(self) -> None: ...


class SlowEnv(ToyEnv):
    """Steps of 20 ms."""

    def step(self, actions: Array) -> StepResult:
        time.sleep(0.02)
        return super().step(actions)


class VanishingEnv(ToyEnv):
    """A toy whose rows are absent for 0 to 3 steps before every episode; row `never` for good.

    Absent rows show `garbage`, which is zero in an environment that keeps to the contract.
    """

    def __init__(
        self,
        num_envs: int,
        action: ActionSpec = BOX,
        *,
        garbage: float = 0.0,
        never: int | None = None,
    ) -> None:
        super().__init__(num_envs, action)
        self.spec = replace(self.spec, max_episode_steps=LONGEST + 3)
        self.state["wait"] = np.zeros(num_envs, np.int64)
        self._garbage, self._never = garbage, never

    @property
    def present(self) -> Array:
        present: Array = self.state["wait"] == 0
        return present

    def _begin(self, row: int) -> None:
        super()._begin(row)
        assert self.key is not None
        stream = self.key.child("wait").episode(row, int(self.state["episode"][row]))
        self.state["wait"][row] = 10**9 if row == self._never else stream.integers(0, 4)

    def _observe(self) -> Observations:
        obs = super()._observe()
        obs["state"][~self.present] = self._garbage
        return obs

    def step(self, actions: Array) -> StepResult:
        absent = ~self.present
        self.state["wait"] -= absent
        self.state["elapsed"][absent] = -1  # The step in which it comes does not count.
        actions = actions.copy()
        actions[absent] = 0
        result = super().step(actions)
        result.reward[absent] = 0.0
        return result


class MotionEnv(ToyEnv):
    """A toy that imitates one of several motions in every episode; the first ones always fail.

    Its number stands where other toys show their level.
    """

    def __init__(
        self, num_envs: int, motions: int = 3, failing: int = 1, in_turn: bool = False
    ) -> None:
        super().__init__(num_envs)
        names = tuple(f"clip-{i}" for i in range(motions))
        self.spec = replace(self.spec, statistics=("is_success", "motion"), motions=names)
        self._failing = failing
        self._weights: Array = np.full(motions, 1.0 / motions)
        self._in_turn = in_turn

    def follow(self, curriculum: Tree) -> None:
        even = np.full(len(self._weights), 1.0 / len(self._weights))
        self._weights = curriculum.get("weights", even)

    def restart(self) -> Observations:
        self.state["episode"] += 1
        for row in range(self.num_envs):
            self._begin(row)
        return self._observe()

    def _begin(self, row: int) -> None:
        super()._begin(row)
        assert self.key is not None
        stream = self.key.child("motion").episode(row, int(self.state["episode"][row]))
        drawn = int(np.searchsorted(np.cumsum(self._weights), stream.random() * 0.999999))
        num = len(self._weights)
        self.state["level"][row] = row % num if self._in_turn else min(drawn, num - 1)

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        motion = result.episodes.pop("level")
        success = (motion >= self._failing).astype(np.float64)
        return replace(result, episodes={"is_success": success, "motion": motion})


class StyleEnv(ToyEnv):
    """A toy whose every frame of motion names its row, its episode and its time in it.

    An episode's history before its start are the times before 0, as a reference clip's would be.
    """

    FRAMES = 3

    def __init__(self, num_envs: int, action: ActionSpec = BOX, first_row: int = 0) -> None:
        super().__init__(num_envs, action)
        seen = {**self.spec.observations, "style": ArraySpec((self.FRAMES, 3))}
        self.spec = replace(self.spec, observations=seen)
        self._rows = first_row + np.arange(num_envs)

    def _observe(self) -> Observations:
        frames = self.frames(self._rows, self.state["episode"], self.state["elapsed"])
        return {**super()._observe(), "style": frames}

    @classmethod
    def frames(cls, rows: Array, episodes: Array, times: Array) -> Array:
        """[n, FRAMES, 3]: the window that ends at `times` [n] of `episodes` [n] in `rows` [n]."""
        before = times[:, None] + np.arange(1 - cls.FRAMES, 1)
        same = np.ones_like(before)
        named = [rows[:, None] * same, episodes[:, None] * same, before]
        return np.stack(named, axis=-1).astype(np.float32)


class PoisonedEnv(ToyEnv):
    """A toy that gives one bad number, in one field, at the first chance from step `at` on."""

    def __init__(self, num_envs: int, where: str, value: float, at: int = 2) -> None:
        super().__init__(num_envs)
        self._where, self._value, self._at = where, value, at
        self._steps = 0

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        self._steps += 1
        if self._where and self._steps >= self._at:
            if self._where == "reward":
                result.reward[1] = self._value
            elif self._where == "observation":
                result.obs["state"][1, 2] = self._value
            elif len(result.final_envs):
                result.final_obs["state"][-1, 2] = self._value
            else:
                return result
            self._where = ""
        return result


class IndividualEnv(ToyEnv):
    """A toy that is not the same in two processes."""

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        result.reward[:] = os.getpid()
        return result
