"""Small things to test with: an environment whose every number is known, and a PPO around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.core.clock import Clock, Loops
from etude.core.contracts import ActionSpec, ArraySpec, BatchMetrics, EnvSpec, Fragment
from etude.core.keys import Key
from etude.core.ranks import Alone
from etude.core.trees import digest
from etude.data.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.envs.mujoco.env import MujocoEnv
from etude.models.actor_critic import ActorCritic
from etude.models.policies import PolicyConfig, make_policy
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.rl.on_policy import Minibatch
from etude.rl.ppo import PPO, PPOConfig
from etude.rl.rewards.given import GIVEN, RewardSource
from etude.rl.sampling import Batch
from etude.rollout.local import LocalCollector, Workers
from etude.runs.files import Disk
from etude.tasks.reach import ReachConfig
from etude.training.loop import gradient_steps
from toy_envs import BOX, ToyEnv


class ConfiguredReach(MujocoEnv):
    """A task whose constructor takes a config first."""

    def __init__(self, config: ReachConfig, num_envs: int, threads: int = 1) -> None:
        super().__init__(config.define(), num_envs, threads)


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
            "task": "toy_envs:MotionEnv",
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
