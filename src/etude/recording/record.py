"""Demonstrations of a task: by its scripted expert or a trained policy, some of them spoiled.

The same recipe, options and seed give the same episodes, whatever the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from etude.core.contracts import Array, ArraySpec, Observations, StepResult
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.datasets.importing import Tick, finish, new_store
from etude.envs.mujoco.demonstration import (
    PROGRESS,
    SIMULATION,
    TARGET,
    Actor,
)
from etude.envs.mujoco.env import MujocoEnv
from etude.experience.store.episodes import EpisodeStore
from etude.experience.store.geometry import OBS
from etude.experience.store.labels import Labels
from etude.planning.recipe import Recipe
from etude.recording.pictures import Studio, make_demonstrated
from etude.reports import fresh
from etude.rollout.group import Inference, restart

IMAGE = "image"
NUM_ENVS = 32
"""Environments played together."""
_SPOILT = ("clumsy", "stops", "lets go")
"""How a failure comes about: too much noise, or at some stage nothing more is done, with the
gripper left as it is or opened."""
_LINGER = (3, 20)
"""Steps recorded after one has stopped."""
_PATIENCE = 40
"""Episodes played for each that is wanted, before it is given up."""


@dataclass(frozen=True)
class RecordOptions:
    """What to record."""

    episodes: int
    fail_share: float = 0.5
    noise: tuple[float, ...] = (0.0, 0.1, 0.2)
    """Standard deviations of the action noise of good episodes; each draws one."""
    fail_noise: float = 2.0
    image_size: int = 128
    reward: Literal["success", "task"] = "success"
    policy: Path | None = None
    seed: int = 0
    workers: int = 2


class PolicyActor:
    """The most likely actions of a trained policy."""

    def __init__(self, path: Path, env: MujocoEnv) -> None:
        self._policy = fresh.load(path)
        fresh.check_fits(self._policy, env.spec, path)
        self._infer = Inference(self._policy)
        self._state = self._policy.initial_state(env.num_envs)

    def reset(self, env_ids: Array) -> None:
        restart(self._state, self._policy, env_ids)

    def act(self, obs: Observations) -> Array:
        seen = {name: obs[name] for name in self._policy.actor_observations}
        actions, _, self._state = self._infer(seen, self._state, None)
        return actions


@dataclass
class Scripts:
    """What every environment does to its demonstrator in the episode it is in, [num_envs] each."""

    options: RecordOptions
    key: Key
    num_envs: int
    max_steps: int
    grips: bool
    """Whether the last action is a gripper's, open where positive."""
    kind: Array = field(init=False)
    """-1: good; else an index into the ways to fail."""

    def __post_init__(self) -> None:
        self.kind = np.full(self.num_envs, -1)
        self._sigma, self._level = np.zeros(self.num_envs), np.ones(self.num_envs)
        self._linger = np.zeros(self.num_envs, np.int64)
        self._last, self._stopped = np.zeros(self.num_envs, np.int64), np.full(self.num_envs, -1)
        self._draws = [np.random.default_rng(0)] * self.num_envs

    def begin(self, env_id: int, episode: int, fail: bool) -> None:
        """A new episode, which is meant to fail or not."""
        options, draw = self.options, self.key.episode(env_id, episode)
        kinds = len(_SPOILT) if self.grips else len(_SPOILT) - 1
        self.kind[env_id] = int(draw.integers(kinds)) if fail else -1
        clumsy = fail and _SPOILT[self.kind[env_id]] == "clumsy"
        spoiling = options.fail_noise * (0.5 + 0.5 * draw.random())
        self._sigma[env_id] = spoiling if clumsy else draw.choice(options.noise)
        self._level[env_id] = draw.random() * 0.95 if fail and not clumsy else np.inf
        self._linger[env_id] = draw.integers(*_LINGER, endpoint=True)
        share = 0.25 + 0.75 * draw.random() if clumsy else 1.0
        self._last[env_id] = max(2, int(share * self.max_steps))
        self._stopped[env_id] = -1
        self._draws[env_id] = draw

    def play(self, wanted: Array, before: Array, progress: Array, elapsed: Array) -> Array:
        """The actions [num_envs, n] that are really done; before: those of the last step."""
        stops = (self._stopped < 0) & (progress >= self._level)
        self._stopped[stops] = elapsed[stops]
        noise = np.array([draw.standard_normal(wanted.shape[1]) for draw in self._draws])
        actions = np.clip(wanted + self._sigma[:, None] * noise, -1.0, 1.0).astype(np.float32)
        idle = np.zeros_like(actions)
        if self.grips:
            opens = self.kind == _SPOILT.index("lets go")
            idle[:, -1] = np.where(opens, 1.0, np.where(before[:, -1] > 0.0, 1.0, -1.0))
            # Noise on a switch would be a switch thrown at random: only where it should spoil.
            spoils = self.kind == _SPOILT.index("clumsy")
            actions[:, -1] = np.where(spoils, actions[:, -1], wanted[:, -1])
        done: Array = np.where((self._stopped >= 0)[:, None], idle, actions)
        return done

    def ending(self, elapsed: Array) -> Array:
        """[k]: environments whose step to come is the last of a spoiled episode."""
        over = (self._stopped >= 0) & (elapsed + 1 >= self._stopped + self._linger)
        over |= (self.kind >= 0) & (elapsed + 1 >= self._last)
        return np.flatnonzero(over)

    def name(self, env_id: int) -> str:
        return "demonstration" if self.kind[env_id] < 0 else _SPOILT[self.kind[env_id]]


@dataclass
class Take:
    """One recorded episode, still without pictures: obs {name: [T + 1, ...]}."""

    obs: Observations
    actions: Array
    rewards: Array
    terminated: bool
    success: bool
    kind: str


class Stage:
    """Plays a task in many environments and gives episodes in the order they end."""

    def __init__(self, recipe: Recipe, options: RecordOptions) -> None:
        self.env, shown = make_demonstrated(recipe, NUM_ENVS)
        self.spec, self._options = self.env.spec, options
        self._actor: Actor = (
            shown.expert() if options.policy is None else PolicyActor(options.policy, self.env)
        )
        limit = self.spec.max_episode_steps
        assert limit is not None
        self.max_steps = limit
        key = Key(options.seed).child("record")
        self._env_key = key.child("env")
        self._scripts = Scripts(options, key.child("script"), NUM_ENVS, limit, shown.has_gripper)
        self._fails = key.child("fails").generator()

    def takes(self) -> Iterator[Take]:
        """Episodes without end."""
        options, env, every = self._options, self.env, np.arange(NUM_ENVS)
        elapsed, episodes = np.zeros(NUM_ENVS, np.int64), np.zeros(NUM_ENVS, np.int64)
        obs = env.reset(self._env_key)
        tapes = _tapes(obs, self.max_steps)
        actions: Array = np.ones((NUM_ENVS, *self.spec.action.array.shape), np.float32)
        done = _tapes(
            {"actions": actions, "rewards": np.zeros(NUM_ENVS, np.float32)}, self.max_steps
        )
        self._begin(every, episodes)
        while True:
            for name, tape in tapes.items():
                tape[every, elapsed] = obs[name]
            wanted = self._actor.act(obs)
            actions = self._scripts.play(wanted, actions, obs[PROGRESS][:, 0], elapsed)
            env.elapsed[self._scripts.ending(elapsed)] = self.max_steps - 1
            result = env.step(self.spec.action.to_env(actions))
            reward = result.reward if options.reward == "task" else _success_reward(result)
            done["actions"][every, elapsed], done["rewards"][every, elapsed] = actions, reward
            elapsed += 1
            for i, env_id in enumerate(result.final_envs.tolist()):
                yield self._take(result, i, env_id, int(elapsed[env_id]), tapes, done)
            if len(result.final_envs):
                elapsed[result.final_envs] = 0
                episodes[result.final_envs] += 1
                self._begin(result.final_envs, episodes)
            obs = result.obs

    def _begin(self, env_ids: Array, episodes: Array) -> None:
        self._actor.reset(env_ids)
        for env_id in env_ids.tolist():
            fail = bool(self._fails.random() < self._options.fail_share)
            self._scripts.begin(env_id, int(episodes[env_id]), fail)

    def _take(
        self,
        result: StepResult,
        i: int,
        env_id: int,
        steps: int,
        tapes: Observations,
        done: Observations,
    ) -> Take:
        obs = {
            name: np.concatenate([tape[env_id, :steps], result.final_obs[name][i : i + 1]])
            for name, tape in tapes.items()
        }
        return Take(
            obs,
            done["actions"][env_id, :steps].copy(),
            done["rewards"][env_id, :steps].copy(),
            bool(result.terminated[env_id]),
            bool(result.episodes["is_success"][i]),
            self._scripts.name(env_id),
        )

    def chosen(self) -> Iterator[Take]:
        """As many successes and failures as were asked for; what is too many is left out."""
        wanted = {False: round(self._options.episodes * self._options.fail_share)}
        wanted[True] = self._options.episodes - wanted[False]
        most = _PATIENCE * (self._options.episodes + NUM_ENVS)
        for num_played, take in enumerate(self.takes(), 1):
            if wanted[take.success]:
                wanted[take.success] -= 1
                yield take
            if not any(wanted.values()):
                return
            if num_played >= most:
                word = "success" if wanted[True] else "failure"
                fix = "less --noise, or another --policy" if wanted[True] else "more --fail-noise"
                raise EtudeError(
                    f"After {num_played:,} episodes {max(wanted.values()):,} more were to end in "
                    f"{word}; use {fix}, or another --fail-share."
                )


def record(
    recipe: Recipe, out: Path, options: RecordOptions, tick: Tick = lambda done, total: None
) -> EpisodeStore:
    """Record a dataset; `tick` counts episodes."""
    stage = Stage(recipe, options)
    fields = {
        OBS + name: ArraySpec(spec.shape, "float32")
        for name, spec in stage.spec.observations.items()
        if name not in (SIMULATION, TARGET)
    }
    size = options.image_size
    if size:
        fields[OBS + IMAGE] = ArraySpec((size, size, 3), "uint8")
    fields["actions"] = stage.spec.action.array
    studio = Studio(recipe, size, options.workers) if size else None
    labels = Labels()
    try:
        with new_store(out, fields, stage.max_steps) as store:
            for take in _filmed(stage, studio):
                store.append_episode(take.obs, take.actions, take.rewards, take.terminated)
                name = f"take {len(labels)}"
                labels.add(name, take.kind, success=take.success, task=recipe.name)
                tick(len(labels), options.episodes)
            chosen = asdict(options) | {"policy": str(options.policy or "scripted expert")}
            about = {"source": f"recorded from {recipe.name}", "format": "recorded"}
            notes = {"env": recipe.task.model_dump(mode="json"), "options": chosen}
            return finish(store, {**about, **notes}, labels)
    finally:
        if studio is not None:
            studio.close()


def _filmed(stage: Stage, studio: Studio | None) -> Iterator[Take]:
    """The chosen episodes with their pictures."""

    def shots() -> Iterator[tuple[Take, Array, Array]]:
        for take in stage.chosen():
            yield take, take.obs.pop(SIMULATION), take.obs.pop(TARGET)

    if studio is None:
        for take, _, _ in shots():
            yield take
        return
    for take, pictures in studio.film(shots()):
        take.obs[IMAGE] = pictures
        yield take


def kinds(labels: Labels) -> dict[str, int]:
    """How many episodes of each kind, and how they ended."""
    ends = {True: "success", False: "failure", None: "cut short"}
    pairs = zip(labels.kinds, labels.successes, strict=True)
    return dict(Counter(f"{kind}: {ends[success]}" for kind, success in pairs))


def _tapes(arrays: Observations, steps: int) -> Observations:
    """Room for every step of an episode in every environment, {name: [num_envs, steps, ...]}."""
    return {
        name: np.empty((len(array), steps, *array.shape[1:]), array.dtype)
        for name, array in arrays.items()
    }


def _success_reward(result: StepResult) -> Array:
    """1 in the step that succeeds."""
    reward: Array = np.zeros(len(result.reward), np.float32)
    if len(result.final_envs):
        reward[result.final_envs] = result.episodes["is_success"]
    return reward
