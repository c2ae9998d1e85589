"""One environment of a task, played step by step: to be filmed, or shown as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from etude.core.contracts import Array, BatchEnv, EnvSpec, Observations
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.env import MujocoEnv, Term
from etude.envs.mujoco.recorder import Recorder, Recording
from etude.models.policies import BasePolicy
from etude.reports import fresh
from etude.rollout.group import Inference, restart

ZERO, RANDOM = "zero", "random"
_LATE = 0.25
"""Seconds behind real time after which the time that was lost is not caught up."""


class Actor(Protocol):
    """What chooses the actions of one environment."""

    def act(self, obs: Observations) -> Array:
        """[1, n], as a policy acts: -1 to 1."""
        ...

    def restart(self) -> None:
        """The next observation begins an episode."""
        ...


class ZeroActor:
    """The middle of every range."""

    def __init__(self, spec: EnvSpec) -> None:
        self._action = np.zeros((1, *spec.action.array.shape), np.float32)

    def act(self, obs: Observations) -> Array:
        return self._action

    def restart(self) -> None:
        """Nothing is remembered."""


class RandomActor:
    """Uniform in every range, a new action in every step."""

    def __init__(self, spec: EnvSpec, key: Key) -> None:
        self._shape = (1, *spec.action.array.shape)
        self._generator = key.generator()

    def act(self, obs: Observations) -> Array:
        return self._generator.uniform(-1.0, 1.0, self._shape).astype(np.float32)

    def restart(self) -> None:
        """Nothing is remembered."""


class PolicyActor:
    """A policy's most likely actions."""

    def __init__(self, policy: BasePolicy) -> None:
        self._policy, self._infer = policy, Inference(policy)
        self._state = policy.initial_state(1)

    def act(self, obs: Observations) -> Array:
        actions, _, self._state = self._infer(obs, self._state, None)
        return actions

    def restart(self) -> None:
        restart(self._state, self._policy, np.zeros(1, np.int64))


def actor(name: str, spec: EnvSpec, key: Key, trust: bool = False) -> Actor:
    """zero, random, or the best policy of a run; trust: code that the run names may be used."""
    if name == ZERO:
        return ZeroActor(spec)
    if name == RANDOM:
        return RandomActor(spec, key)
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"There is no run {name}: the policy is zero, random, or the path of a run's folder."
        )
    policy = fresh.load(path, trust)
    fresh.check_fits(policy, spec, path)
    return PolicyActor(policy)


@dataclass(frozen=True)
class Episode:
    """An episode so far."""

    number: int
    """Counted from 0."""
    length: int
    """Control steps."""
    seconds: float
    total: float
    """The return."""
    terms: dict[str, float]
    """What each term of the reward has added to the return."""
    ending: str = ""
    """The terminations that ended it, or "time limit"; "" while it goes on."""

    def lines(self) -> list[str]:
        """For a person: how far it is and its return, then a line for every term."""
        now = f"episode {self.number}, step {self.length}, {self.seconds:.1f} s"
        return [now, f"return {self.total:.2f}", *self._terms()]

    def sentence(self) -> str:
        """The same in one line."""
        end = {"": "cut there", "time limit": "ended by the time limit"}
        how = end.get(self.ending, f"ended by '{self.ending}'")
        terms = ", ".join(self._terms())
        return (
            f"The episode has a return of {self.total:.2f} in {self.length} steps "
            f"({self.seconds:.1f} s), {how}. Terms of the reward: {terms}."
        )

    def _terms(self) -> list[str]:
        return [f"{name} {value:.2f}" for name, value in self.terms.items()]


class Player:
    """Episode after episode of a task's one environment, step by step."""

    def __init__(self, env: MujocoEnv, actor: Actor, key: Key) -> None:
        self.env = env
        self._actor, self._key = actor, key
        self._stepped: BatchEnv = env
        self._fired: list[str] = []
        self._number, self._length, self._total = 0, 0, 0.0
        # Names of terminations are no part of a step's result.
        named = env.task.terminations.items()
        env.task = replace(env.task, terminations={n: self._noted(n, term) for n, term in named})

    def _noted(self, name: str, term: Term) -> Term:
        def ends(view: object) -> Array:
            found = term(view)
            if found[0]:
                self._fired.append(name)
            return found

        return ends

    def begin(self) -> None:
        """The start of the first episode."""
        self._obs = self._stepped.reset(self._key)

    @property
    def episode(self) -> Episode:
        """The episode that is being played."""
        return self._episode({name: float(sums[0]) for name, sums in self.env.reward_sums.items()})

    def _episode(self, terms: dict[str, float], ending: str = "") -> Episode:
        seconds = self._length * self.env.dt
        return Episode(self._number, self._length, seconds, self._total, terms, ending)

    def step(self) -> Episode | None:
        """One control step; the episode, if it ended with this."""
        self._fired.clear()
        actions = self._actor.act(self._obs)
        result = self._stepped.step(self.env.spec.action.to_env(actions))
        self._obs = result.obs
        self._length += 1
        self._total += float(result.reward[0])
        if not len(result.final_envs):
            return None
        sums = {n.removeprefix("reward/"): v for n, v in result.episodes.items() if "reward/" in n}
        ending = ", ".join(self._fired) or "time limit"
        ended = self._episode({name: float(values[0]) for name, values in sums.items()}, ending)
        self._number, self._length, self._total = self._number + 1, 0, 0.0
        self._actor.restart()
        return ended

    def record(self, seconds: float) -> tuple[Episode, Recording]:
        """The first episode, cut after so many seconds."""
        self._stepped = recorder = Recorder(self.env, [(0, 0)])
        self.begin()
        for _ in range(max(1, round(seconds / self.env.dt))):
            ended = self.step()
            if ended is not None:
                break
        recorder.close()
        return ended or self.episode, recorder.recordings[0, 0]


class Window(Protocol):
    """Shows a simulation."""

    def is_running(self) -> bool:
        """Whether it has not been closed."""
        ...

    def show(self, env: MujocoEnv, lines: Sequence[str]) -> None:
        """The state of the environment, and lines about it where the window has a place."""
        ...


def watch(player: Player, window: Window, stopped: Callable[[], bool] = lambda: False) -> None:
    """Episode after episode in real time, until the window is closed or it is stopped."""
    player.begin()
    begin, seconds = time.monotonic(), player.env.dt
    for step in count(1):
        if stopped() or not window.is_running():
            return
        window.show(player.env, player.episode.lines())
        player.step()
        ahead = begin + step * seconds - time.monotonic()
        time.sleep(max(0.0, ahead))
        if ahead < -_LATE:
            begin -= ahead


def hold(env: MujocoEnv, command: Sequence[float] | None) -> None:
    """Give a task that follows velocity commands this one, if any: x, y in m/s, yaw in rad/s."""
    if command is None:
        return
    part = env.ability(VelocityCommand)
    if part is None:
        raise UsageError("This task follows no velocity commands: leave out --command.")
    part.hold(command)
