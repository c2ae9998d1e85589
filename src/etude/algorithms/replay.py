"""SAC and TD3 as the app sees them: stores, reward sources, and their part of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from etude.algorithms.amp import AMPConfig
from etude.algorithms.held_out import EpisodesOf
from etude.algorithms.ircr import IRCR, IRCRConfig
from etude.algorithms.learned import LearnedConfig, LearnedRewards
from etude.algorithms.off_policy import OffPolicy, OffPolicyConfig, ReplayGeometry
from etude.algorithms.rewards import GivenRewards, RewardSource
from etude.algorithms.rrd import RRD, RRDConfig
from etude.algorithms.sac import SAC
from etude.algorithms.td3 import TD3, TD3Config
from etude.building import collecting
from etude.building.collecting import Learning
from etude.core.clock import Clock, Nest
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.core.trees import Tree, num_bytes
from etude.experience.segments import BufferSpec, SegmentBuffer
from etude.experience.store.episodes import EpisodeStore, StoreGeometry
from etude.models.policies import BasePolicy, make_policy
from etude.models.reward_networks import make_reward_network
from etude.planning import memory
from etude.planning.kinds import Assembly, Sketch, World, device
from etude.planning.loading import check_reads, load_taught
from etude.planning.recipe import Recipe
from etude.runs import files
from etude.runs.folder import RunFolder

_KINDS: dict[str, tuple[type[SAC] | type[TD3], str]] = {
    "sac": (SAC, "squashed"),
    "td3": (TD3, "deterministic"),
}
"""Each algorithm, and the kind of policy it trains."""


def config_of(recipe: Recipe) -> OffPolicyConfig:
    """The recipe's algorithm, which is one of `_KINDS`."""
    assert isinstance(recipe.algorithm, OffPolicyConfig)
    return recipe.algorithm


def check_learner(recipe: Recipe) -> None:
    """Refuse a policy that the algorithm cannot train, and ranks that it does not have."""
    kind = recipe.algorithm.kind
    collecting.check_policy(recipe, _KINDS[kind][1:])
    if recipe.learner.reduce != "exact":
        raise UsageError(
            f"{kind} learns in one process and has no ranks whose gradients learner.reduce "
            f"{recipe.learner.reduce} would add up: leave it at exact."
        )


def geometry(recipe: Recipe) -> ReplayGeometry:
    """How groups and batches divide over shards; refuses what does not."""
    config = config_of(recipe)
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

    takes_ranks = False

    def nest(self, recipe: Recipe) -> Nest:
        check_learner(recipe)
        cut, config = geometry(recipe), config_of(recipe)
        if isinstance(config, TD3Config) and config.behaviour_coef is not None:
            raise UsageError(
                "algorithm.behaviour_coef holds a policy to a dataset, and there is none: name one "
                "with --algorithm.dataset FOLDER, or set it to None."
            )
        steps = cut.steps_per_iteration
        return Nest.of(recipe.clock, steps, config.train_batches, config.idle_iterations(steps))

    def look(self, recipe: Recipe) -> World:
        return collecting.look(recipe)

    def assemble(
        self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock, ranks: Ranks
    ) -> Assembly:
        env = collecting.env_spec(recipe)
        learning = self._learner(recipe, env, key, folder)
        return collecting.assemble(recipe, learning, key, clock, env, ranks)

    def _learner(self, recipe: Recipe, env: EnvSpec, key: Key, folder: RunFolder) -> Learning:
        cut, config, where = geometry(recipe), config_of(recipe), folder.path / "replay"
        files.make_folder(where)
        shape = cut.store(env, config.capacity)
        stores = [
            EpisodeStore.create(where / f"shard-{s}", shape, files.current())
            for s in range(recipe.learner.shards)
        ]
        policy = make_policy(recipe.policy, env, key.child("policy"))
        algorithm = make_algorithm(recipe, policy, stores, env, key, device(recipe))
        staging = BufferSpec(env, {}, cut.rows, cut.steps, cut.steps)
        buffers = [SegmentBuffer(staging) for _ in range(1 + recipe.collector.lag)]
        return Learning(algorithm, buffers)

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        env, snapshot, policy = world.spec, world.snapshot, world.deployed
        assert isinstance(policy, BasePolicy)
        cut, config, loops = geometry(recipe), config_of(recipe), self.nest(recipe)
        _refuse(recipe, world)
        shape, total = cut.store(env, config.capacity), loops.total
        planned = [PlannedStore(shape, total.timesteps // cut.shards) for _ in range(cut.shards)]
        stores = cast(list[EpisodeStore], planned)
        training = planned_state(recipe, policy, stores, env)
        staging = BufferSpec(env, {}, cut.rows, cut.steps, cut.steps).num_bytes
        samples = config.train_batches * config.batch_size / cut.steps_per_iteration
        return Sketch(
            geometry=_geometry(recipe, cut),
            lines=update_lines(recipe),
            shapes=_shapes(env, config),
            title="Replay: [transitions, ...]",
            usage=f"every step is used {samples:g} times, on average; {cut.shards} shard(s)",
            data={
                "gradient_samples_per_step": samples,
                "gradient_samples": float(total.updates * config.batch_size),
            },
            memory={
                "buffer": staging * (1 + recipe.collector.lag),
                **learner_bytes(policy, training),
            },
            estimates={
                **memory.collection(recipe, env, policy, snapshot, cut.steps_per_iteration),
                **learner_estimates(recipe, training),
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
            "ahead": {
                name: np.empty((self.shape.lanes, *spec.shape), spec.dtype)
                for name, spec in self.shape.observations.items()
            },
        }


def _log_state(count: int, held: int, block: int) -> Tree:
    return {"first": count - held, "count": count, "sha256": ["0" * 64] * (held // block + 1)}


def make_algorithm(
    recipe: Recipe,
    policy: BasePolicy,
    stores: Sequence[EpisodeStore | EpisodesOf],
    env: EnvSpec,
    key: Key | None,
    where: torch.device,
) -> OffPolicy:
    """A new learner with its reward source; without a key on the meta device, to be counted."""
    rewards = make_rewards(recipe, env, None if key is None else key.child("rewards"), where)
    make: Any = _KINDS[recipe.algorithm.kind][0]  # `check_learner` has seen that they fit.
    critics = (key or Key(0)).child("critics")
    made: OffPolicy = make(recipe.algorithm, policy, stores, rewards, critics, where)
    return made


def planned_state(
    recipe: Recipe, policy: BasePolicy, stores: Sequence[EpisodeStore | EpisodesOf], env: EnvSpec
) -> Tree:
    """The shape of a learner's state in a checkpoint; `policy` is on the meta device."""
    meta = torch.device("meta")
    return make_algorithm(recipe, policy, stores, env, None, meta).state_dict()


def learner_bytes(policy: BasePolicy, training: Tree) -> dict[str, int]:
    """What a learner of such a state takes in memory."""
    learned = {k: v for k, v in training.items() if k not in ("stores", "rewards")}
    model = {k: v for k, v in training["rewards"].items() if k != "best"}
    return {
        "model": sum(p.nbytes for p in policy.parameters()),
        "learner_state": num_bytes(learned),
        "reward_model": 2 * num_bytes(model),
    }


def learner_estimates(recipe: Recipe, training: Tree) -> dict[str, int]:
    """About what a gradient step keeps for its way back, and the most of IRCR's best episodes."""
    layers = 32 * config_of(recipe).batch_size * sum(recipe.policy.hidden) * 4
    best = num_bytes(training["rewards"].get("best", {}))
    return {"workspace": layers, **({"best_episodes": best} if best else {})}


def make_rewards(
    recipe: Recipe, env: EnvSpec, key: Key | None, where: torch.device
) -> RewardSource:
    """The reward source a recipe asks for; without a key its weights are not drawn."""
    config = recipe.rewards
    if isinstance(config, LearnedConfig):
        if not config.run:
            raise UsageError(
                "rewards.kind learned needs a run that learned them: --rewards.run RUN."
            )
        taught = load_taught(Path(config.run))
        check_reads(taught.network, env)
        return LearnedRewards(taught.network, None if taught.action else env.action, where)
    if isinstance(config, RRDConfig):
        with torch.device("meta" if key is None else "cpu"):
            network = make_reward_network(config.network, env.observations, env.action, key)
        return RRD(config, network, recipe.learner.shards, where)
    if isinstance(config, IRCRConfig):
        source = IRCR(config, recipe.learner.shards, where)
        if key is None:
            source.plan(env)
        return source
    return GivenRewards(where)


def _geometry(recipe: Recipe, cut: ReplayGeometry) -> dict[str, int]:
    config = config_of(recipe)
    sizes = {
        "rollout_steps": cut.steps,
        "batch_size": cut.batch_size,
        "train_batches": config.train_batches,
        "warmup_steps": config.warmup_steps,
        "capacity": config.capacity,
    }
    return {**sizes, **reward_sizes(recipe)}


def reward_sizes(recipe: Recipe) -> dict[str, int]:
    """The sizes of a reward gradient, {} without one."""
    if not isinstance(recipe.rewards, RRDConfig):
        return {}
    return {name: getattr(recipe.rewards, name) for name in ("rrd_batch_size", "rrd_sample_size")}


def update_lines(recipe: Recipe) -> list[str]:
    """What the updates of an iteration are."""
    config, rewards = config_of(recipe), recipe.rewards
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
    config = config_of(recipe)
    notes = [
        "The replay is on disk and memory-mapped; kept checkpoints hold back what was evicted "
        "since the oldest of them."
    ]
    if not recipe.task.exactness().exact:
        notes.append(
            "A resume closes the episodes in progress as truncated, with the rewards they had so "
            "far as their returns, and begins new ones: the environment cannot be restored."
        )
    if loops.idle_iterations:
        by = "with random actions" if recipe.start_from is None else "by the policy it starts from"
        notes.append(
            f"The first {loops.idle_iterations:,} iterations only collect, {by}: "
            f"the warm-up is {config.warmup_steps:,} steps."
        )
    return notes
