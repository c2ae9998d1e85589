"""Recording of demonstrations by a scripted expert or a policy, with a share of failures.

The episodes are a function of recipe, options and seed, and independent of the number of workers.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from etude.core.contracts import Array, ArraySpec, Observations, StepResult
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.data.importing import Pictures, Tick, finish, new_store
from etude.data.store.episodes import EpisodeStore
from etude.data.store.geometry import OBS
from etude.data.store.labels import Labels
from etude.envs.mujoco import rendering
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.rendering import IMAGE, QuickCamera
from etude.envs.mujoco.task import PROGRESS, SIMULATION, TARGET, Actor, Demonstration
from etude.evaluate.playing import load_actor
from etude.planning.recipe import Recipe

NUM_ENVS = 32
"""Number of environments."""
_FAILURES = ("clumsy", "stops", "lets go")
"""Ways to make an episode fail: action noise; a stop at a random progress; a stop that opens the
gripper."""
_LINGER = (3, 20)
"""Fewest and most steps after a stop."""
_PATIENCE = 40
"""Most episodes that are played per recorded episode."""
_camera: QuickCamera | None = None

T = TypeVar("T")


@dataclass(frozen=True)
class RecordOptions:
    """Options of a recording."""

    episodes: int
    fail_share: float = 0.5
    noise: tuple[float, ...] = (0.0, 0.1, 0.2)
    """Standard deviations of the action noise in successes; each episode draws one."""
    fail_noise: float = 2.0
    image_size: int = 128
    labels: Literal["taken", "intended"] = "taken"
    reward: Literal["success", "task"] = "success"
    policy: Path | None = None
    seed: int = 0
    workers: int = 2
    pictures: Pictures = "raw"
    """Format of the pictures."""


def make_demonstrated(recipe: Recipe, num_envs: int) -> tuple[MujocoEnv, Demonstration]:
    """The environments of a recipe for recording, and their `Demonstration`."""
    config = recipe.task
    # Rewards are learned from undiscounted returns, in which shaping does not cancel.
    return config.replace(episodic=True).demonstrated(num_envs)


class Perturbations:
    """Perturbations of the actions, drawn per environment and episode."""

    def __init__(
        self, options: RecordOptions, key: Key, num_envs: int, max_steps: int, has_gripper: bool
    ) -> None:
        """has_gripper: whether the last action is that of a gripper, which a positive one opens."""
        self._options, self._key = options, key
        self._max_steps, self._has_gripper = max_steps, has_gripper
        self.kind = np.full(num_envs, -1)
        """[num_envs]: -1 for a success, else an index of `_FAILURES`."""
        self._sigma, self._level = np.zeros(num_envs), np.ones(num_envs)
        self._linger = np.zeros(num_envs, np.int64)
        self._last, self._stopped = np.zeros(num_envs, np.int64), np.full(num_envs, -1)
        self._draws = [np.random.default_rng(0)] * num_envs

    def begin(self, env: int, episode: int, fail: bool) -> None:
        """Draw the perturbation of a new episode; fail: make it fail."""
        options, draw = self._options, self._key.episode(env, episode)
        kinds = len(_FAILURES) if self._has_gripper else len(_FAILURES) - 1
        self.kind[env] = int(draw.integers(kinds)) if fail else -1
        clumsy = fail and _FAILURES[self.kind[env]] == "clumsy"
        fail_noise = options.fail_noise * (0.5 + 0.5 * draw.random())
        self._sigma[env] = fail_noise if clumsy else draw.choice(options.noise)
        self._level[env] = draw.random() * 0.95 if fail and not clumsy else np.inf
        self._linger[env] = draw.integers(*_LINGER, endpoint=True)
        share = 0.25 + 0.75 * draw.random() if clumsy else 1.0
        self._last[env] = max(2, int(share * self._max_steps))
        self._stopped[env] = -1
        self._draws[env] = draw

    def apply(self, wanted: Array, before: Array, progress: Array, elapsed: Array) -> Array:
        """The perturbed actions [num_envs, n]; before: those of the last step."""
        stops = (self._stopped < 0) & (progress >= self._level)
        self._stopped[stops] = elapsed[stops]
        noise = np.array([draw.standard_normal(wanted.shape[1]) for draw in self._draws])
        actions = np.clip(wanted + self._sigma[:, None] * noise, -1.0, 1.0).astype(np.float32)
        idle = np.zeros_like(actions)
        if self._has_gripper:
            opens = self.kind == _FAILURES.index("lets go")
            idle[:, -1] = np.where(opens, 1.0, np.where(before[:, -1] > 0.0, 1.0, -1.0))
            # Noise would open and close the gripper at random: only clumsy episodes have it there.
            clumsy = self.kind == _FAILURES.index("clumsy")
            actions[:, -1] = np.where(clumsy, actions[:, -1], wanted[:, -1])
        taken: Array = np.where((self._stopped >= 0)[:, None], idle, actions)
        return taken

    def ending(self, elapsed: Array) -> Array:
        """[k]: environments in which an episode that shall fail ends with the next step."""
        over = (self._stopped >= 0) & (elapsed + 1 >= self._stopped + self._linger)
        over |= (self.kind >= 0) & (elapsed + 1 >= self._last)
        return np.flatnonzero(over)


@dataclass
class Recorded:
    """One recorded episode without pictures; obs: {name: [T + 1, ...]}."""

    obs: Observations
    actions: Array
    rewards: Array
    terminated: bool
    success: bool
    kind: str


class Recording:
    """Plays a task in `NUM_ENVS` environments; yields episodes in the order in which they end."""

    def __init__(self, recipe: Recipe, options: RecordOptions) -> None:
        self.env, shown = make_demonstrated(recipe, NUM_ENVS)
        self.spec, self._options = self.env.spec, options
        policy = options.policy
        self._actor: Actor = load_actor(policy, self.env) if policy else shown.expert()
        assert self.spec.max_episode_steps is not None
        self.max_steps = self.spec.max_episode_steps
        key = Key(options.seed).child("record")
        self._env_key, script = key.child("env"), key.child("script")
        gripper = shown.has_gripper
        self._perturbed = Perturbations(options, script, NUM_ENVS, self.max_steps, gripper)
        self._fails = key.child("fails").generator()

    def episodes(self) -> Iterator[Recorded]:
        """Yield episodes forever."""
        options, batch, env_ids = self._options, self.env, np.arange(NUM_ENVS)
        elapsed, episodes = np.zeros(NUM_ENVS, np.int64), np.zeros(NUM_ENVS, np.int64)
        obs = batch.reset(self._env_key)
        observed = self._buffers(obs)
        actions: Array = np.ones((NUM_ENVS, *self.spec.action.array.shape), np.float32)
        done = self._buffers({"actions": actions, "rewards": np.zeros(NUM_ENVS, np.float32)})
        self._begin(env_ids, episodes)
        while True:
            for name, buffer in observed.items():
                buffer[env_ids, elapsed] = obs[name]
            wanted = self._actor.act(obs)
            actions = self._perturbed.apply(wanted, actions, obs[PROGRESS][:, 0], elapsed)
            batch.elapsed[self._perturbed.ending(elapsed)] = self.max_steps - 1
            result = batch.step(self.spec.action.to_env(actions))
            reward = result.reward if options.reward == "task" else _success_reward(result)
            kept = wanted if options.labels == "intended" else actions
            done["actions"][env_ids, elapsed], done["rewards"][env_ids, elapsed] = kept, reward
            elapsed += 1
            for i, env in enumerate(result.final_envs.tolist()):
                steps, kind = int(elapsed[env]), self._perturbed.kind[env]
                yield Recorded(
                    {
                        name: np.concatenate([buffer[env, :steps], result.final_obs[name][i][None]])
                        for name, buffer in observed.items()
                    },
                    done["actions"][env, :steps].copy(),
                    done["rewards"][env, :steps].copy(),
                    bool(result.terminated[env]),
                    bool(result.episodes["is_success"][i]),
                    "demonstration" if kind < 0 else _FAILURES[kind],
                )
            if len(result.final_envs):
                elapsed[result.final_envs] = 0
                episodes[result.final_envs] += 1
                self._begin(result.final_envs, episodes)
            obs = result.obs

    def _begin(self, env_ids: Array, episodes: Array) -> None:
        self._actor.reset(env_ids)
        for env in env_ids.tolist():
            fail = bool(self._fails.random() < self._options.fail_share)
            self._perturbed.begin(env, int(episodes[env]), fail)

    def _buffers(self, arrays: Observations) -> Observations:
        """Empty buffers for an episode, {name: [num_envs, steps, ...]}."""
        return {
            name: np.empty((len(array), self.max_steps, *array.shape[1:]), array.dtype)
            for name, array in arrays.items()
        }

    def chosen(self) -> Iterator[Recorded]:
        """Yield the requested numbers of successes and failures; drop others."""
        wanted = {False: round(self._options.episodes * self._options.fail_share)}
        wanted[True] = self._options.episodes - wanted[False]
        most = _PATIENCE * (self._options.episodes + NUM_ENVS)
        for num_played, episode in enumerate(self.episodes(), 1):
            if wanted[episode.success]:
                wanted[episode.success] -= 1
                yield episode
            if not any(wanted.values()):
                return
            if num_played >= most:
                word = "success" if wanted[True] else "failure"
                fix = "less --noise, or another --policy" if wanted[True] else "more --fail-noise"
                raise EtudeError(
                    f"After {num_played:,} episodes {max(wanted.values()):,} more were to end in "
                    f"{word}; use {fix}, or another --fail-share."
                )


def _success_reward(result: StepResult) -> Array:
    """Rewards [num_envs]: 1 for a step that ends in success."""
    reward: Array = np.zeros(len(result.reward), np.float32)
    if len(result.final_envs):
        reward[result.final_envs] = result.episodes["is_success"]
    return reward


def record(
    recipe: Recipe, out: Path, options: RecordOptions, tick: Tick = lambda done, total: None
) -> EpisodeStore:
    """Record a dataset; tick: called with the numbers of recorded and of all episodes."""
    recording = Recording(recipe, options)
    fields = {
        OBS + name: ArraySpec(spec.shape, "float32")
        for name, spec in recording.spec.observations.items()
        if name not in (SIMULATION, TARGET)
    }
    size = options.image_size
    if size:
        fields[OBS + IMAGE] = ArraySpec((size, size, 3), "uint8")
    fields["actions"] = recording.spec.action.array
    renderers = Renderers(recipe, size, options.workers) if size else None
    labels = Labels()
    try:
        with new_store(out, fields, recording.max_steps, options.pictures) as store:
            for episode in _with_pictures(recording, renderers):
                store.append_episode(
                    episode.obs, episode.actions, episode.rewards, episode.terminated
                )
                name = f"take {len(labels)}"
                labels.add(name, episode.kind, success=episode.success, task=recipe.name)
                tick(len(labels), options.episodes)
            chosen = asdict(options) | {"policy": str(options.policy or "scripted expert")}
            about = {"source": f"recorded from {recipe.name}", "format": "recorded"}
            notes = {"env": recipe.task.model_dump(mode="json"), "options": chosen}
            return finish(store, {**about, **notes}, labels)
    finally:
        if renderers is not None:
            renderers.close()


def _with_pictures(recording: Recording, renderers: Renderers | None) -> Iterator[Recorded]:
    def drawn() -> Iterator[tuple[Recorded, Array, Array]]:
        for episode in recording.chosen():
            yield episode, episode.obs.pop(SIMULATION), episode.obs.pop(TARGET)

    if renderers is None:
        yield from (episode for episode, _, _ in drawn())
        return
    for episode, pictures in renderers.draw(drawn()):
        episode.obs[IMAGE] = pictures
        yield episode


def kinds(labels: Labels) -> dict[str, int]:
    """{"kind: ending": number of episodes}"""
    ends = {True: "success", False: "failure", None: "cut short"}
    pairs = zip(labels.kinds, labels.successes, strict=True)
    return dict(Counter(f"{kind}: {ends[success]}" for kind, success in pairs))


def _start(recipe: Recipe, size: int) -> None:
    global _camera
    env, _ = make_demonstrated(recipe, 1)
    _camera = QuickCamera.of(env, size)


def _draw(states: Array, targets: Array) -> Array:
    """Pictures [T, size, size, 3] uint8 of states [T, n] with targets [T, 3]."""
    assert _camera is not None
    return _camera.pictures(states, targets)


class Renderers:
    """Worker processes that draw pictures, each with a camera."""

    def __init__(self, recipe: Recipe, size: int, workers: int) -> None:
        rendering.backend()  # raises before a worker would
        self._workers = workers
        # Spawned: OpenGL and MuJoCo's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, _start, (recipe, size))

    def draw(self, episodes: Iterable[tuple[T, Array, Array]]) -> Iterator[tuple[T, Array]]:
        """Turn (label, states [T, n], targets [T, 3]) into (label, pictures), in the same order."""
        waiting: deque[tuple[T, Future[Array]]] = deque()
        try:
            for label, states, targets in episodes:
                waiting.append((label, self._pool.submit(_draw, states, targets)))
                while len(waiting) > 2 * self._workers:
                    first, drawn = waiting.popleft()
                    yield first, drawn.result()
            for first, drawn in waiting:
                yield first, drawn.result()
        except BrokenProcessPool as error:
            raise EtudeError(
                "A process that draws pictures died: try MUJOCO_GL=osmesa, or record without "
                "pictures (--image-size 0)."
            ) from error

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)
