"""Small things to test with: an environment whose every number is known, and a PPO around it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.algorithms.ppo import PPO, PPOConfig
from etude.algorithms.rewards import GIVEN, RewardSource
from etude.core.clock import Clock, Loops
from etude.core.contracts import (
    ActionSpec,
    Array,
    ArraySpec,
    BatchMetrics,
    EnvSpec,
    Fragment,
    Observations,
    StepResult,
)
from etude.core.keys import Key
from etude.core.ranks import Alone
from etude.core.trees import Tree, digest
from etude.envs.mujoco.env import MujocoEnv
from etude.experience.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.experience.store.episodes import EpisodeStore, StoreGeometry
from etude.experience.store.geometry import store_specs
from etude.learning.sampling import Batch
from etude.learning.shard import Minibatch
from etude.models.actor_critic import ActorCritic
from etude.models.policies import PolicyConfig, make_policy
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.rollout.local import LocalCollector, Workers
from etude.runs.files import Disk
from etude.tasks.reach.task import ReachConfig
from etude.training.loop import gradient_steps

BOX = ActionSpec("box", low=(-2.0, 0.0), high=(2.0, 1.0))
DISCRETE = ActionSpec("discrete", sizes=(3,))
MULTI = ActionSpec("multi_discrete", sizes=(2, 4))
ACTIONS = {spec.kind: spec for spec in (BOX, DISCRETE, MULTI)}
LONGEST = 6


class ConfiguredReach(MujocoEnv):
    """A task whose constructor takes a config first."""

    def __init__(self, config: ReachConfig, num_envs: int, threads: int = 1) -> None:
        super().__init__(config.define(), num_envs, threads)


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


@dataclass
class Trainer:
    """A PPO with its own collector, stepped by hand."""

    ppo: PPO
    collector: LocalCollector
    clock: Clock
    key: Key = field(default_factory=lambda: Key(5))

    def collect(self) -> list[Fragment]:
        return self.collector.collect(self.ppo.broadcast(self.clock), self.clock.now.iterations)

    def ingest(self) -> dict[str, float]:
        return self.ppo.ingest(self.collect(), self.clock)

    def update(self) -> list[BatchMetrics]:
        key = self.key.child("update", self.clock.now.iterations)
        return list(gradient_steps(self.ppo, self.clock, key))

    def iterate(self) -> list[BatchMetrics]:
        self.ingest()
        batches = self.update()
        self.ppo.end_iteration()
        self.clock.advance(len(batches), 0)
        return batches

    def first_order(self) -> list[Minibatch]:
        """The first minibatch of the first update epoch."""
        cut, config = self.ppo.geometry, self.ppo.config
        priority = (config.priority_alpha, config.priority_beta)
        size = cut.segments_per_minibatch // cut.shards
        key = self.key.child("update", self.clock.now.iterations)
        chosen = []
        for s, shard in enumerate(self.ppo.shards):
            own = key.child("permutation", 0, s)
            draw = shard.draw(own, cut.num_minibatches, size, *priority)
            chosen.append(shard.minibatch(draw, 0))
        return chosen


def make_trainer(
    *,
    action: ActionSpec = BOX,
    shards: int = 1,
    horizon: int = 1,
    minibatch: int = 32,
    threads: int = 1,
    envs: list[Any] | None = None,
    iterations: int = 10,
    policy: PolicyConfig | None = None,
    num_envs: int = 8,
    steps: int = 16,
    envs_per_group: int = 2,
    rewards: RewardSource = GIVEN,
    **ppo: Any,
) -> Trainer:
    """8 rows in 4 groups of 2, 16 steps each, unless told otherwise."""
    ppo = {"update_epochs": 2, **ppo}
    config = PPOConfig(rollout_steps=steps, horizon=horizon, minibatch_size=minibatch, **ppo)
    cut = SegmentGeometry(num_envs, steps, horizon, minibatch, shards, envs_per_group)
    envs = envs or [ToyEnv(envs_per_group, action) for _ in range(cut.num_groups)]
    spec, small, key = envs[0].spec, policy or PolicyConfig(hidden=(16,)), Key(5)
    own = make_policy(small, spec, None)
    buffer = SegmentBuffer(BufferSpec(spec, own.state_specs, num_envs, steps, horizon))
    actor_critic = make_policy(small, spec, key.child("policy"))
    algorithm = PPO(config, actor_critic, cut, [buffer], torch.device("cpu"), rewards)
    views = [
        buffer.part(slice(g * envs_per_group, (g + 1) * envs_per_group)) for g in range(len(envs))
    ]
    collector = LocalCollector(envs, own, key.child("collect"), Workers(threads), [views])
    batches = cut.num_minibatches * config.update_epochs
    nest = Loops(iterations, 1, 1, cut.buffer_steps, batches)
    return Trainer(algorithm, collector, Clock(nest), key)


class TwoRanks(Alone):
    """The first of two ranks; the other one says what this one does."""

    size = 2
    exchanges = 0

    def part(self, count: int) -> range:
        return range(count // 2)

    def gather(self, parts: list[Any]) -> list[Any]:
        self.exchanges += 1
        return parts * 2


def replayed(source: RewardSource, store: Any, generator: Any, size: int) -> Batch:
    """Transitions of a store, as a reward source samples and relabels them."""
    return source.relabel(Batch.of(source.sample(store, generator, size), torch.device("cpu")))


def toy_buffer(spec: EnvSpec, rows: int, steps: int) -> SegmentBuffer:
    """For a memoryless policy."""
    return SegmentBuffer(BufferSpec(spec, {}, rows, steps, 1))


def toy_policy(env: ToyEnv, seed: int = 0) -> ActorCritic:
    return make_policy(PolicyConfig(hidden=(16,)), env.spec, Key(seed))


def fragment_bits(fragment: Fragment) -> str:
    """A hash of all that a rollout brought back, but for the time it took."""
    episodes = {name.replace("/", "."): array for name, array in fragment.episodes.items()}
    named = {**vars(fragment), "finals": fragment.finals._asdict(), "episodes": episodes}
    del named["seconds"]
    return digest(named)


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """A recipe with some fields of its sections changed: changed(r, clock={"cycles": 2})."""
    content = recipe.model_dump(mode="json")
    for name, fields in sections.items():
        content[name] |= fields
    return recipes.validated(content, "a test")


def tiny_reach(iterations: int = 6, **sections: dict[str, Any]) -> Recipe:
    """Reach in a second or two: 256 steps an iteration; cycles of 2 iterations."""
    small: dict[str, dict[str, Any]] = {
        "collector": {"num_envs": 32, "envs_per_group": 8},
        "algorithm": {"rollout_steps": 8, "minibatch_size": 64, "update_epochs": 2},
        "clock": {"total_timesteps": 256 * iterations, "iterations": 2, "cycles": 1},
        "evaluation": {"every": "2 cycles", "episodes": 8, "num_envs": 8, "envs_per_group": 8},
        "checkpoint": {"every": "1 cycle"},
    }
    for name, fields in sections.items():
        small[name] = small.get(name, {}) | fields
    return changed(recipes.reach_short(), **small)


def tiny_motions(lag: int = 0, **sections: dict[str, Any]) -> Recipe:
    """An LSTM on three motions, the first of which always fails: 8 iterations, 4 epochs."""
    small: dict[str, dict[str, Any]] = {
        "env": {
            "kind": "task",
            "task": "toys:MotionEnv",
            "evaluation_options": {"in_turn": True},
        },
        "collector": {"num_envs": 16, "envs_per_group": 4, "threads": 1, "lag": lag},
        "policy": {"kind": "lstm", "hidden": [8], "units": 6},
        "algorithm": {
            "rollout_steps": 16,
            "horizon": 8,
            "minibatch_size": 128,
            "update_epochs": 1,
            "advantages": "vtrace" if lag else "gae",
        },
        "clock": {"total_timesteps": 8 * 256, "iterations": 1, "cycles": 2},
        "motions": {"enabled": True, "mix": 0.8},
        "evaluation": {
            "every": "1 cycle",
            "episodes": 6,
            "num_envs": 6,
            "envs_per_group": 3,
            "final_episodes": 3,
        },
        "checkpoint": {"every": "1 cycle"},
    }
    content = recipes.find("ppo").model_dump(mode="json")
    content["env"] = small.pop("env")
    for name, fields in {**small, **sections}.items():
        content[name] = content[name] | small.get(name, {}) | fields
    return recipes.validated(content, "a test")


def toy_dataset(path: Path, episodes: int = 40, seed: int = 0) -> Path:
    """Points that walk to a goal or away from it; "progress" is how close they are."""
    action = ActionSpec("box", (-1.0, -1.0), (1.0, 1.0))
    seen = {"state": ArraySpec((2,)), "progress": ArraySpec((1,))}
    geometry = StoreGeometry(store_specs(EnvSpec(seen, action, 12)), 1, 12)
    store, stream = EpisodeStore.create(path, geometry, Disk()), np.random.default_rng(seed)
    for _ in range(episodes):
        steps, towards = int(stream.integers(6, 13)), stream.choice([-1.0, 1.0])
        actions = np.full((steps, 2), 0.1 * towards) + 0.05 * stream.normal(size=(steps, 2))
        places = np.cumsum([stream.uniform(-1, 0, 2), *actions], axis=0)
        closeness = -np.abs(places).sum(1, keepdims=True)
        rewards = np.diff(closeness[:, 0])
        obs = {"state": places.astype(np.float32), "progress": closeness.astype(np.float32)}
        store.append_episode(obs, actions.astype(np.float32), rewards.astype(np.float32), True)
    store.seal().close()
    return path


def tiny_offline(folder: Path, epochs: int, iterations: int, every: str) -> Recipe:
    """A policy and its reward from a toy dataset, in two shards."""
    return changed(
        recipes.find("offline"),
        policy={"hidden": (32, 32)},
        algorithm={"dataset": str(toy_dataset(folder / "data")), "train_batches": 8},
        rewards={"rrd_batch_size": 32, "rrd_sample_size": 4},
        learner={"shards": 2},
        clock={"epochs": epochs, "cycles": 1, "iterations": iterations},
        evaluation={"every": every},
    )


def tiny_bc(folder: Path, kind: str, epochs: int, iterations: int, every: str) -> Recipe:
    """A policy cloned from a toy dataset; `flow` with history and averaged weights."""
    policy: dict[str, Any] = {"kind": kind, "actor_reads": ["state"]}
    data = {"dataset": str(toy_dataset(folder / "data")), "train_batches": 8, "horizon": 4}
    if kind == "flow":
        policy |= {"chunk": 4, "history": 2, "width": 16, "heads": 2, "layers": 1}
        data["average"] = 0.9
    return recipes.find("bc").replace(
        policy=policy,
        algorithm={"kind": "bc", "batch_size": 32, **data},
        clock={"epochs": epochs, "cycles": 1, "iterations": iterations},
        evaluation__every=every,
    )


def tiny_reward_only(folder: Path, epochs: int, iterations: int, every: str) -> Recipe:
    """A reward alone from a toy dataset."""
    recipe = recipes.find("reward-only")
    rrd = {"rrd_batch_size": 16, "rrd_sample_size": 4, "network": {"reads": ("state",)}}
    data = {"dataset": str(toy_dataset(folder / "data")), "progress": "progress"}
    return changed(
        recipe,
        algorithm={**data, "rrd": recipe.algorithm.rrd.model_dump(mode="json") | rrd},
        clock={"epochs": epochs, "cycles": 1, "iterations": iterations},
        evaluation={"every": every},
    )
