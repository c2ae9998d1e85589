"""SAC and TD3 as the app sees them: stores, reward sources, and their part of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from etude.algorithms.amp import AMPConfig
from etude.algorithms.ircr import IRCR, IRCRConfig
from etude.algorithms.off_policy import OffPolicy, OffPolicyConfig, ReplayGeometry
from etude.algorithms.rewards import GivenRewards, RewardSource
from etude.algorithms.rrd import RRD, RRDConfig
from etude.algorithms.sac import SAC
from etude.algorithms.td3 import TD3
from etude.app import collecting, memory
from etude.app.collecting import Learning
from etude.app.methods import Assembly, Sketch, World, device
from etude.app.recipe import Recipe
from etude.core.clock import Clock, Nest
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree, num_bytes
from etude.experience.episodes import EpisodeStore, StoreGeometry
from etude.experience.segments import BufferSpec, SegmentBuffer
from etude.models.policies import BasePolicy, make_policy
from etude.models.reward_networks import make_reward_network
from etude.runs import files
from etude.runs.folder import RunFolder


def _config(recipe: Recipe) -> OffPolicyConfig:
    assert isinstance(recipe.algorithm, OffPolicyConfig)
    return recipe.algorithm


def geometry(recipe: Recipe) -> ReplayGeometry:
    """How groups and batches divide over shards; refuses what does not."""
    config = _config(recipe)
    if isinstance(recipe.rewards, AMPConfig):
        raise UsageError(
            "rewards.kind amp judges the motion of the policy that acts, and "
            f"{recipe.algorithm.kind} replays that of older ones: use algorithm ppo."
        )
    if isinstance(recipe.rewards, RRDConfig):
        recipe.rewards.subsets_per_shard(recipe.learner.shards)
    return ReplayGeometry(
        rows=recipe.collector.rows,
        steps=config.rollout_steps,
        batch_size=config.batch_size,
        shards=recipe.learner.shards,
        group_rows=recipe.collector.group_rows,
    )


class Replay:
    """A `Method`: what is collected is kept on disk, and learned from again and again."""

    def __init__(self, kind: type[SAC] | type[TD3], *policies: str) -> None:
        self._kind = kind
        self._policies = policies

    def nest(self, recipe: Recipe) -> Nest:
        collecting.check_policy(recipe, self._policies)
        cut, config = geometry(recipe), _config(recipe)
        steps = cut.steps_per_iteration
        return Nest.of(recipe.clock, steps, config.train_batches, config.idle_iterations(steps))

    def look(self, recipe: Recipe) -> World:
        return collecting.look(recipe)

    def assemble(self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock) -> Assembly:
        env = collecting.env_spec(recipe)
        learning = self._learner(recipe, env, key, folder)
        return collecting.assemble(recipe, learning, key, clock, env)

    def _learner(self, recipe: Recipe, env: EnvSpec, key: Key, folder: RunFolder) -> Learning:
        cut, config, where = geometry(recipe), _config(recipe), folder.path / "replay"
        files.make_folder(where)
        shape = cut.store(env, config.capacity)
        stores = [
            EpisodeStore.create(where / f"shard-{s}", shape, files.Disk())
            for s in range(recipe.learner.shards)
        ]
        policy = make_policy(recipe.policy, env, key.child("policy"))
        rewards = make_rewards(recipe, env, key.child("rewards"), device(recipe))
        algorithm = self._algorithm(recipe, policy, stores, rewards, key, device(recipe))
        staging = BufferSpec(env, {}, cut.rows, cut.steps, cut.steps)
        buffers = [SegmentBuffer(staging) for _ in range(1 + recipe.collector.lag)]
        return Learning(algorithm, buffers)

    def _algorithm(
        self,
        recipe: Recipe,
        policy: BasePolicy,
        stores: Sequence[EpisodeStore],
        rewards: RewardSource,
        key: Key,
        where: torch.device,
    ) -> OffPolicy:
        make: Any = self._kind  # `policies` says which kinds of policy come here.
        made: OffPolicy = make(
            recipe.algorithm, policy, stores, rewards, key.child("critics"), where
        )
        return made

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        env, snapshot, policy = world.spec, world.snapshot, world.deployed
        assert isinstance(policy, BasePolicy)
        cut, config, loops = geometry(recipe), _config(recipe), self.nest(recipe)
        _refuse(recipe, world)
        shape, total = cut.store(env, config.capacity), loops.total
        planned = [PlannedStore(shape, total.timesteps // cut.shards) for _ in range(cut.shards)]
        meta = torch.device("meta")
        algorithm = self._algorithm(
            recipe,
            policy,
            cast(list[EpisodeStore], planned),
            make_rewards(recipe, env, None, meta),
            Key(0),
            meta,
        )
        training = algorithm.state_dict()
        learned = {k: v for k, v in training.items() if k not in ("stores", "rewards")}
        actor = sum(p.nbytes for p in policy.parameters())
        staging = BufferSpec(env, {}, cut.rows, cut.steps, cut.steps).num_bytes
        samples = config.train_batches * config.batch_size / cut.steps_per_iteration
        return Sketch(
            geometry=_geometry(recipe, cut),
            lines=_lines(recipe),
            shapes=_shapes(env, config),
            title="Replay: [transitions, ...]",
            usage=f"every step is used {samples:g} times, on average; {cut.shards} shard(s)",
            data={
                "gradient_samples_per_step": samples,
                "gradient_samples": float(total.updates * config.batch_size),
            },
            memory={
                "buffer": staging * (1 + recipe.collector.lag),
                "model": actor,
                "learner_state": num_bytes(learned),
                "reward_model": 2 * num_bytes(training["rewards"]),
            },
            estimates={
                **memory.collection(recipe, env, policy, snapshot, cut.steps_per_iteration),
                "workspace": 32 * config.batch_size * sum(recipe.policy.hidden) * 4,
            },
            training=training,
            disk={"replay": shape.num_bytes * cut.shards},
            notes=_notes(recipe, loops),
        )


def _refuse(recipe: Recipe, world: World) -> None:
    """What cannot be kept as whole episodes."""
    kind = recipe.algorithm.kind
    if recipe.motions.enabled:
        raise UsageError(
            f"{kind} keeps whole episodes, and motions.enabled cuts them at every epoch's end: use "
            "algorithm ppo, or practise all motions evenly with --motions.no-enabled."
        )
    if world.spec.agents > 1:
        raise UsageError(
            f"{kind} keeps whole episodes of rows that are always there, and agents come and go: "
            "use algorithm ppo."
        )
    if not world.exactness.exact and device(recipe).type == "cpu":
        raise UsageError(
            f"{kind} keeps whole episodes, which this environment cannot continue after a resume: "
            f"{world.exactness.reason}. Use algorithm ppo, which begins new ones."
        )


@dataclass(frozen=True)
class PlannedStore:
    """A store that is only planned: the shape of its state at the end of a run."""

    shape: StoreGeometry
    steps: int

    def state_dict(self) -> Tree:
        held = min(self.steps, self.shape.capacity or self.steps)
        episodes = held // self.shape.max_episode_steps
        return {
            "steps": _log_state(self.steps, held, self.shape.block_slots),
            "finals": _log_state(episodes, episodes, self.shape.block_episodes),
            "episodes": _log_state(episodes, episodes, self.shape.block_episodes),
            "open_starts": torch.zeros(self.shape.lanes, dtype=torch.int64),
            "open_returns": torch.zeros(self.shape.lanes, dtype=torch.float64),
            "ahead_sha256": "0" * 64,
        }


def _log_state(count: int, held: int, block: int) -> Tree:
    return {"first": count - held, "count": count, "sha256": ["0" * 64] * (held // block + 1)}


def make_rewards(
    recipe: Recipe, env: EnvSpec, key: Key | None, where: torch.device
) -> RewardSource:
    """The reward source a recipe asks for; without a key its weights are not drawn."""
    config = recipe.rewards
    if isinstance(config, RRDConfig):
        with torch.device("meta" if key is None else "cpu"):
            network = make_reward_network(config.network, env.observations, env.action, key)
        return RRD(config, network, recipe.learner.shards, where)
    if isinstance(config, IRCRConfig):
        return IRCR(config, where)
    return GivenRewards(where)


def _geometry(recipe: Recipe, cut: ReplayGeometry) -> dict[str, int]:
    config = _config(recipe)
    sizes = {
        "rollout_steps": cut.steps,
        "batch_size": cut.batch_size,
        "train_batches": config.train_batches,
        "warmup_steps": config.warmup_steps,
        "capacity": config.capacity,
    }
    if isinstance(recipe.rewards, RRDConfig):
        sizes["rrd_batch_size"] = recipe.rewards.rrd_batch_size
        sizes["rrd_sample_size"] = recipe.rewards.rrd_sample_size
    return sizes


def _lines(recipe: Recipe) -> list[str]:
    config, rewards = _config(recipe), recipe.rewards
    lines = [f"update: {config.train_batches:,} batches of {config.batch_size:,} transitions"]
    if isinstance(rewards, RRDConfig):
        subsets = rewards.rrd_batch_size // rewards.rrd_sample_size
        lines.append(
            f"before each, one of the reward model: {subsets:,} episodes x "
            f"{rewards.rrd_sample_size:,} of their steps = {rewards.rrd_batch_size:,}"
        )
    return lines


def _shapes(env: EnvSpec, config: OffPolicyConfig) -> dict[str, Any]:
    arrays = {f"obs/{name}": spec for name, spec in env.observations.items()}
    arrays["actions"] = env.action.array
    return {
        name: {
            "dtype": spec.dtype,
            "buffer": [config.capacity, *spec.shape],
            "minibatch": [config.batch_size, *spec.shape],
        }
        for name, spec in arrays.items()
    }


def _notes(recipe: Recipe, loops: Nest) -> list[str]:
    config = _config(recipe)
    notes = [
        "The replay is on disk and memory-mapped; kept checkpoints hold back what was evicted "
        "since the oldest of them."
    ]
    if loops.idle_iterations:
        notes.append(
            f"The first {loops.idle_iterations:,} iterations only collect, with random actions: "
            f"the warm-up is {config.warmup_steps:,} steps."
        )
    return notes
