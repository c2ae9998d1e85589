"""Play one environment step by step, for films and for the viewer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from etude.core.contracts import Array, BatchEnv, EnvSpec, Observations, Pictured, ability
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.env import MujocoEnv
from etude.evaluate import fresh
from etude.evaluate.footage import FRAME_RATE, recorder
from etude.models.policies import BasePolicy
from etude.rollout.group import Inference, restart

ZERO, RANDOM = "zero", "random"
_OWN, _LIMIT = "environment", "time limit"
"""Endings of episodes whose termination has no name."""
_LATE = 0.25
"""Delay in seconds after which the viewer stops catching up with real time."""


class Actor(Protocol):
    """Chooses actions for one environment, or for all its agents."""

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, n], from -1 to 1."""
        ...

    def restart(self) -> None:
        """Start a new episode."""
        ...


class ZeroActor:
    """The middle of every range; the first of discrete choices."""

    def __init__(self, spec: EnvSpec, num_envs: int = 1) -> None:
        array = spec.action.array
        self._action = np.zeros((num_envs, *array.shape), array.dtype)

    def act(self, obs: Observations) -> Array:
        return self._action

    def restart(self) -> None:
        """There is no state."""


class RandomActor:
    """Uniformly distributed actions."""

    def __init__(self, spec: EnvSpec, key: Key, num_envs: int = 1) -> None:
        self._shape, self._sizes = (num_envs, *spec.action.array.shape), spec.action.sizes
        self._generator = key.generator()

    def act(self, obs: Observations) -> Array:
        if self._sizes:
            return self._generator.integers(0, self._sizes, self._shape)
        return self._generator.uniform(-1.0, 1.0, self._shape).astype(np.float32)

    def restart(self) -> None:
        """There is no state."""


class PolicyActor:
    """The most likely actions of a policy."""

    def __init__(self, policy: BasePolicy, num_envs: int = 1) -> None:
        self._policy, self._infer, self._num_envs = policy, Inference(policy), num_envs
        self._state = policy.initial_state(num_envs)

    def act(self, obs: Observations) -> Array:
        actions, _, self._state = self._infer(obs, self._state, None)
        return actions

    def restart(self) -> None:
        self.reset(np.arange(self._num_envs))

    def reset(self, env_ids: Array) -> None:
        """Start new episodes in the given environments."""
        restart(self._state, self._policy, env_ids)


def actor(name: str, env: BatchEnv, key: Key, trust: bool = False) -> Actor:
    """The actor "zero" or "random", or the best policy of a run; trust: its code may run."""
    spec, num_envs = env.spec, env.num_envs
    if name == ZERO:
        return ZeroActor(spec, num_envs)
    if name == RANDOM:
        return RandomActor(spec, key, num_envs)
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"There is no run {name}: the policy must be zero, random, or the folder of a run."
        )
    return load_actor(path, env, trust)


def load_actor(path: Path, env: BatchEnv, trust: bool = False) -> PolicyActor:
    """The policy at a path as an actor of an environment."""
    policy = fresh.load(path, trust)
    fresh.check_fits(policy, env.spec, path)
    return PolicyActor(policy, env.num_envs)


@dataclass(frozen=True)
class Episode:
    """An episode so far."""

    number: int
    """Index of the episode."""
    length: int
    """Control steps."""
    seconds: float
    total: float
    """The return."""
    terms: dict[str, float]
    """{reward term: its sum so far}"""
    ending: str = ""
    """The terminations that ended it, "environment" or "time limit"; "" before the end."""
    success: bool | None = None
    """Whether it ended in success; None before the end, or if the task does not report it."""

    def lines(self) -> list[str]:
        """Lines of text: progress, return, and one for every reward term."""
        now = f"episode {self.number}, step {self.length}, {self.seconds:.1f} s"
        return [now, f"return {self.total:.2f}", *self._terms()]

    def sentence(self) -> str:
        """The same in one line."""
        end = {"": "cut there", **{name: f"ended by the {name}" for name in (_OWN, _LIMIT)}}
        how = end.get(self.ending, f"ended by '{self.ending}'")
        terms = f" Terms of the reward: {', '.join(self._terms())}." if self.terms else ""
        return (
            f"The episode has a return of {self.total:.2f} in {self.length} steps "
            f"({self.seconds:.1f} s), {how}.{terms}"
        )

    def _terms(self) -> list[str]:
        return [f"{name} {value:.2f}" for name, value in self.terms.items()]


def outcome(episode: Episode) -> tuple[str, bool | None]:
    """(text, success) at the end of an episode's film."""
    if episode.success is None or not episode.ending:
        return episode.ending, None
    return ("success" if episode.success else "failure"), episode.success


class Player:
    """Plays episodes in one environment, step by step; reports the first of several agents."""

    def __init__(self, env: BatchEnv, actor: Actor, key: Key) -> None:
        self.env = env
        self._actor, self._key = actor, key
        self._stepped: BatchEnv = env
        self._number, self._length, self._total = 0, 0, 0.0
        self.dt = 1.0 / FRAME_RATE
        """Duration of a step in seconds."""
        drawing = ability(env, Pictured)
        if drawing is not None:
            self.dt = 1.0 / drawing.step_rate
        self.simulated = simulated = ability(env, MujocoEnv)
        """The simulation in the environment, if any."""
        if simulated is not None:
            self.dt = simulated.dt

    def begin(self) -> None:
        """Reset the environment for the first episode."""
        self._obs = self._stepped.reset(self._key)

    @property
    def episode(self) -> Episode:
        """The current episode."""
        sums = self.simulated.reward_sums if self.simulated else {}
        return self._episode({name: float(values[0]) for name, values in sums.items()})

    def _episode(self, terms: dict[str, float], ending: str = "") -> Episode:
        seconds = self._length * self.dt
        return Episode(self._number, self._length, seconds, self._total, terms, ending)

    def step(self) -> Episode | None:
        """Make one control step; return the episode if it ended."""
        actions = self._actor.act(self._obs)
        result = self._stepped.step(self.env.spec.action.to_env(actions))
        self._obs = result.obs
        self._length += 1
        self._total += float(result.reward[0])
        if 0 not in result.final_envs:
            return None
        sums = {n.removeprefix("reward/"): v for n, v in result.episodes.items() if "reward/" in n}
        ended_by = self.simulated.ended_by.items() if self.simulated else ()
        fired = [name for name, ended in ended_by if ended[0]]
        ending = ", ".join(fired) or (_OWN if result.terminated[0] else _LIMIT)
        ended = self._episode({name: float(values[0]) for name, values in sums.items()}, ending)
        if "is_success" in result.episodes:
            ended = replace(ended, success=bool(result.episodes["is_success"][0]))
        self._number, self._length, self._total = self._number + 1, 0, 0.0
        self._actor.restart()
        return ended

    def record(self, seconds: float, episodes: int = 1) -> list[tuple[Episode, Any]]:
        """Record at most `episodes` episodes, in `seconds` together."""
        self._stepped = recording = recorder(self.env, [(0, n) for n in range(episodes)])
        self.begin()
        played: list[Episode] = []
        for _ in range(max(1, round(seconds / self.dt))):
            ended = self.step()
            if ended is not None:
                played.append(ended)
            if len(played) == episodes:
                break
        if self._length:
            played.append(self.episode)
        recording.close()
        return [(episode, recording.recordings[0, episode.number]) for episode in played]


class Window(Protocol):
    """Shows a simulation."""

    def is_running(self) -> bool:
        """Whether the window is open."""
        ...

    def show(self, env: MujocoEnv, lines: Sequence[str]) -> None:
        """Show the state of the environment, and lines of text if the window has a place."""
        ...


def watch(
    player: Player,
    window: Window,
    stopped: Callable[[], bool] = lambda: False,
    report: Callable[[Episode], object] = lambda episode: None,
) -> None:
    """Show episodes in real time, until the window is closed or `stopped` returns True.

    report: called with every episode that ends.
    """
    player.begin()
    simulated, begin, seconds = player.simulated, time.monotonic(), player.dt
    for step in count(1):
        if stopped() or not window.is_running():
            return
        if simulated is not None:  # other environments show themselves
            window.show(simulated, player.episode.lines())
        if (ended := player.step()) is not None:
            report(ended)
        ahead = begin + step * seconds - time.monotonic()
        time.sleep(max(0.0, ahead))
        if ahead < -_LATE:
            begin -= ahead


def hold(env: BatchEnv, command: Sequence[float] | None) -> None:
    """Fix the velocity command of a task, if given: x, y in m/s, yaw in rad/s."""
    if command is None:
        return
    part = ability(env, VelocityCommand)
    if part is None:
        raise UsageError("This task follows no velocity commands: leave out --command.")
    part.hold(command)
