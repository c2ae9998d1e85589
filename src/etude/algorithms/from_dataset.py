"""SAC and TD3 on a dataset as the app sees them: nothing is collected, tests may be played."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from etude.algorithms import from_data, replay
from etude.algorithms.held_out import EpisodesOf, split_store
from etude.algorithms.ircr import IRCRConfig
from etude.algorithms.learned import LearnedConfig
from etude.algorithms.off_policy import OffPolicy
from etude.algorithms.offline import judge
from etude.algorithms.replay import config_of
from etude.algorithms.rewards import GivenConfig
from etude.algorithms.rrd import RRDConfig
from etude.algorithms.td3 import TD3Config
from etude.building import collecting
from etude.core.clock import Clock, Nest
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.experience.store.episodes import EpisodeStore
from etude.models.policies import BasePolicy, make_policy
from etude.planning.kinds import Assembly, Sketch, World, device
from etude.planning.loading import load_taught
from etude.planning.recipe import Recipe
from etude.rollout.local import NoCollector, Workers
from etude.runs.folder import RunFolder
from etude.training.evaluation import HeldOut, Tester

_PROBE = 16_384
"""Steps whose actions are looked at where no environment says what they may be."""


class Data(NamedTuple):
    """The dataset of a recipe."""

    store: EpisodeStore
    spec: EnvSpec
    """The dataset as an environment would describe itself."""
    reads: set[str]
    """Observations that something looks at."""
    training: EpisodesOf
    held_out: EpisodesOf

    def shards(self, num: int) -> list[EpisodesOf]:
        """The episodes to learn from, dealt to so many shards; whole ones come before clips."""
        if self.training.num_whole < num:
            raise UsageError(
                f"{self.store.path} has {self.training.num_whole:,} episodes to learn from, and "
                f"each of {num:,} shards needs one: use fewer learner.shards."
            )
        return [self.training.part(slice(s, None, num)) for s in range(num)]


def open_data(recipe: Recipe) -> Data:
    """The dataset, held against the environment where the recipe names one."""
    config = config_of(recipe)
    there = from_data.look_into(config).observations
    reads = {*recipe.policy.actor_reads, *recipe.policy.critic_reads, *_reward_reads(recipe, there)}
    store = from_data.open_dataset(config, reads)
    if not store.num_episodes:
        raise UsageError(f"{store.path} holds no episode to learn from.")
    action = _bounds(store) if recipe.env is None else _fits(recipe, store)
    spec = EnvSpec(there, action, store.geometry.max_episode_steps)
    for_reward = isinstance(recipe.rewards, RRDConfig | IRCRConfig)
    # IRCR gives every step its episode's return, and a clip would give the same steps another.
    clips = isinstance(recipe.rewards, RRDConfig)
    return Data(store, spec, reads, *split_store(store, config, action, for_reward, clips))


def _reward_reads(recipe: Recipe, there: dict[str, ArraySpec]) -> tuple[str, ...]:
    if isinstance(recipe.rewards, RRDConfig):
        return recipe.rewards.network.found_in(there).reads
    if isinstance(recipe.rewards, LearnedConfig) and recipe.rewards.run:
        return load_taught(Path(recipe.rewards.run)).network.config.reads
    return ()


def _bounds(store: EpisodeStore) -> ActionSpec:
    """[-1, 1], which is what most datasets of robots have, or a dimension's range in a sample.

    The dataset keeps raw actions. What is drawn of it is scaled to this box and clipped there.
    """
    spec = store.geometry.specs["actions"]
    if np.dtype(spec.dtype).kind != "f":
        raise UsageError(
            f"The actions of {store.path} are {spec.dtype}: sac and td3 learn actions in a box."
        )
    every = EpisodesOf(store, np.arange(store.num_episodes))
    sample = every.sample_actions(Key(0).child("probe").generator(), _PROBE)
    low, high = np.minimum(sample.min(0), -1.0), np.maximum(sample.max(0), 1.0)
    return ActionSpec("box", tuple(low.tolist()), tuple(high.tolist()))


def _fits(recipe: Recipe, store: EpisodeStore) -> ActionSpec:
    """The actions of the environment; refuses one in which what is learned could not act."""
    env = recipe.task.make(recipe.evaluation.group_rows)
    spec = env.spec
    env.close()
    there = store.geometry.observations
    for name in recipe.policy.actor_reads:
        if name in there and spec.observations.get(name) != there[name]:
            raise UsageError(
                f"The policy reads '{name}', which is {_said(there[name])} in {store.path} and "
                f"{_said(spec.observations.get(name))} in this environment: choose observations "
                "both have with --policy.actor-reads, or the environment the data is of."
            )
    actions = store.geometry.specs["actions"]
    if spec.action.array != actions:
        raise UsageError(
            f"The actions of {store.path} are {_said(actions)}, and those of this environment "
            f"{_said(spec.action.array)}: name the environment the data is of, or none."
        )
    return spec.action


def _said(spec: ArraySpec | None) -> str:
    return "missing" if spec is None else f"{spec.dtype} of shape {spec.shape}"


class Offline:
    """A `Method`: what `Replay` learns from its replay, learned from a dataset."""

    takes_ranks = False

    def nest(self, recipe: Recipe) -> Nest:
        replay.check_learner(recipe)
        from_data.refuse_collection(recipe)
        config, shards = config_of(recipe), recipe.learner.shards
        if config.batch_size % shards:
            raise UsageError(
                f"algorithm.batch_size {config.batch_size:,} does not divide by learner.shards "
                f"{shards:,}: use {config.batch_size // shards * shards or shards:,}."
            )
        if isinstance(recipe.rewards, RRDConfig):
            recipe.rewards.subsets_per_shard(shards)
        return Nest.of(recipe.clock, 0, config.train_batches)

    def look(self, recipe: Recipe) -> World:
        data = open_data(recipe)
        with torch.device("meta"):
            policy = make_policy(recipe.policy, data.spec, None)
        tests = recipe.evaluation.episodes if recipe.env else data.held_out.num_episodes
        data.store.close()
        return World(data.spec, _exactness(recipe), policy, {}, 0, tests)

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        config, data, loops = config_of(recipe), open_data(recipe), self.nest(recipe)
        policy, store = world.deployed, data.store
        assert isinstance(policy, BasePolicy)
        stores = data.shards(recipe.learner.shards)
        training = replay.planned_state(recipe, policy, stores, data.spec)
        num_passes = from_data.passes(data.training, loops, config.batch_size)
        sizes = {"batch_size": config.batch_size, "train_batches": config.train_batches}
        notes = from_data.notes(store, data.reads, data.training, data.held_out)
        sketch = Sketch(
            geometry={
                **sizes,
                **replay.reward_sizes(recipe),
                "episodes": store.num_episodes,
                "steps": store.num_transitions,
            },
            lines=replay.update_lines(recipe),
            shapes=from_data.shapes(store, data.reads, config.batch_size),
            title=from_data.TITLE,
            usage=from_data.usage(num_passes),
            data={
                "passes": num_passes,
                "gradient_samples": float(loops.total.updates * config.batch_size),
            },
            memory=replay.learner_bytes(policy, training),
            estimates=replay.learner_estimates(recipe, training),
            training=training,
            disk=from_data.disk(store),
            notes=[*notes, *_notes(recipe, data)],
        )
        store.close()
        return sketch

    def assemble(
        self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock, ranks: Ranks
    ) -> Assembly:
        data = open_data(recipe)
        algorithm = make_learner(recipe, data, key)
        counts = data.training.num_whole, data.training.num_transitions
        if recipe.env is None:
            tests: Tester = HeldOut(
                lambda: judge(algorithm, data.held_out), None, data.held_out.num_episodes
            )
            return Assembly(algorithm, NoCollector(*counts), tests, data.spec)
        workers = Workers(recipe.collector.threads)
        own = make_policy(recipe.policy, data.spec, None)
        tests = collecting.make_evaluator(recipe, key, workers, own)
        return Assembly(algorithm, NoCollector(*counts, workers), tests, data.spec)


def make_learner(recipe: Recipe, data: Data, key: Key) -> OffPolicy:
    """A new one, on the recipe's device."""
    policy = make_policy(recipe.policy, data.spec, key.child("policy"))
    stores, where = data.shards(recipe.learner.shards), device(recipe)
    return replay.make_algorithm(recipe, policy, stores, data.spec, key, where)


def _exactness(recipe: Recipe) -> Exactness:
    """Episodes of a test say which policy is the best: the environment counts as well."""
    played = from_data.exactness(recipe) if recipe.env is None else recipe.env.exactness()
    return from_data.exactness(recipe) if played.exact else played


def _notes(recipe: Recipe, data: Data) -> list[str]:
    config, action = config_of(recipe), data.spec.action
    notes = []
    unknown = data.store.labels.num_unrewarded
    if unknown and isinstance(recipe.rewards, GivenConfig):
        notes.append(
            f"{unknown:,} of {data.store.num_episodes:,} episodes have no rewards, which count as "
            "0 here: the policy can only imitate them."
        )
    beyond = sum(
        low < -1.0 or high > 1.0 for low, high in zip(action.low, action.high, strict=True)
    )
    if recipe.env is None and beyond:
        notes.append(
            f"Actions go beyond [-1, 1] in {beyond:,} of {len(action.low):,} dimensions: what the "
            "policy learns there is scaled to the range they have in the dataset. An environment "
            "(--env.kind, --env.id or --env.task) gives its own range."
        )
    if not isinstance(config, TD3Config) or config.behaviour_coef is None:
        notes.append(
            "Nothing holds the policy to what is in the dataset: critics tend to believe in "
            "actions nobody took. algorithm td3 with --algorithm.behaviour-coef 0.4 does."
        )
    if recipe.env is None:
        notes.append(
            "No environment is named: the policy is judged on the episodes held out, and the "
            "newest is taken for the best."
        )
    return notes
