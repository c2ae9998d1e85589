"""From terms to observations: noise, clipping, scale, delay and history, each where asked for.

A measurement is disturbed once: noise depends on the episode and the step it was made in, so what
is shown late, or again as history, is shown as it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.envs.mujoco.task import Draws, Function, Group, Observation, TaskEnv


def check_terms(env: TaskEnv) -> None:
    """Refuse rewards and terminations that do not give one number or bool per environment."""
    task = env.task
    terms = {f"reward '{name}'": term for name, (term, weight) in task.rewards.items() if weight}
    terms |= {f"termination '{name}'": term for name, term in task.terminations.items()}
    for name, term in terms.items():
        shape = np.shape(term(env.view))
        if shape != (env.num_envs,):
            raise UsageError(
                f"The {name} gives an array of shape {list(shape)} for {env.num_envs} "
                f"environments, where one number each is needed: [{env.num_envs}]."
            )


def _columns(env: TaskEnv, name: str, term: Function) -> Function:
    """The term as [num_envs, n], or as it is where it has more axes; or what is wrong with it."""
    shape = np.shape(term(env.view))
    if shape == (env.num_envs,):
        return lambda view: term(view)[:, None]
    if shape[:1] != (env.num_envs,):
        raise UsageError(
            f"The observation '{name}' gives an array of shape {list(shape)} for {env.num_envs} "
            f"environments, where [{env.num_envs}] or [{env.num_envs}, n] is needed."
        )
    return term


def _beside(channels: list[Function], dtype: str) -> Function:
    """[num_envs, n]: what channels give, side by side."""
    return lambda view: np.concatenate([channel(view) for channel in channels], axis=1, dtype=dtype)


class Reader:
    """One observation of a task: its terms side by side."""

    def __init__(
        self, env: TaskEnv, name: str, terms: Mapping[str, Function | Observation] | Group
    ) -> None:
        group = Group.of(terms)
        self._view = env.view
        self._late: list[_Buffer] = []
        channels = [
            self._channel(env, f"{name}/{label}", Observation.of(term))
            for label, term in group.terms.items()
        ]
        if group.delay[1] or group.history > 1:
            whole = Observation(
                _beside(channels, group.dtype), delay=group.delay, history=group.history
            )
            channels = [self._channel(env, name, whole)]
        self._read = _beside(channels, group.dtype)

    def _channel(self, env: TaskEnv, name: str, channel: Observation) -> Function:
        channel = replace(channel, term=_columns(env, name, channel.term))
        if channel.is_plain:
            return channel.term
        measure = _Measurement(env, name, channel)
        if not channel.delay[1] and channel.history == 1:
            return measure
        buffer = _Buffer(env, name, measure, channel)
        self._late.append(buffer)
        return buffer

    def read(self) -> Array:
        """[num_envs, n], a new array."""
        return self._read(self._view)

    def push(self) -> None:
        """A control step has passed: delayed terms are measured."""
        for buffer in self._late:
            buffer.push()

    def begin(self, env_ids: Array, draws: Draws) -> None:
        """Environments [k] begin an episode: nothing else was ever measured."""
        for buffer in self._late:
            buffer.begin(env_ids, draws)


class _Measurement:
    """A term with noise, clipped and scaled."""

    def __init__(self, env: TaskEnv, name: str, channel: Observation) -> None:
        self._env, self._name, self._channel = env, name, channel

    def __call__(self, view: Any) -> Array:
        channel = self._channel
        value = channel.term(view)
        if np.any(channel.noise):
            noise = self._env.draws.uniform(self._name, *value.shape[1:], low=-1.0)
            value = value + noise * channel.noise
        if channel.clip is not None:
            value = np.clip(value, *channel.clip)
        return value * channel.scale


class _Buffer:
    """The latest measurements of a term, of which an episode's delay chooses."""

    def __init__(self, env: TaskEnv, name: str, measure: Function, channel: Observation) -> None:
        self._env, self._name, self._measure, self._channel = env, name, measure, channel
        shape = measure(env.view).shape[1:]
        self._kept = env.state(
            f"{name}/kept", channel.delay[1] + channel.history, *shape, dtype="float32"
        )
        self._delay = env.state(f"{name}/delay", dtype="int64")

    def push(self) -> None:
        self._kept[:, 1:] = self._kept[:, :-1].copy()
        self._kept[:, 0] = self._measure(self._env.view)

    def begin(self, env_ids: Array, draws: Draws) -> None:
        low, high = self._channel.delay
        self._delay[env_ids] = draws.integers(f"{self._name}/delay", low, high)
        self._kept[env_ids] = self._measure(self._env.view)[env_ids, None]

    def __call__(self, view: Any) -> Array:
        steps = self._delay[:, None] + np.arange(self._channel.history)
        shown = self._kept[np.arange(len(steps))[:, None], steps]
        return shown.reshape(len(steps), -1)
