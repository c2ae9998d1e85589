"""SAC and TD3 on a dataset as the app sees them: nothing is collected, tests may be played."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from etude.algorithms.held_out import EpisodesOf, refuse_equal_returns, split_store
from etude.algorithms.learned import LearnedConfig
from etude.algorithms.off_policy import OffPolicy
from etude.algorithms.offline import judge
from etude.algorithms.rrd import RRDConfig
from etude.algorithms.td3 import TD3Config
from etude.app import collecting, from_data, replay
from etude.app.loading import load_taught
from etude.app.methods import Assembly, Sketch, World, device
from etude.app.recipe import Recipe
from etude.app.replay import config_of
from etude.core.clock import Clock, Nest
from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.envs.catalog import env_exactness, make_env
from etude.experience.episodes import EpisodeStore
from etude.models.policies import BasePolicy, make_policy
from etude.rollout.local import NoCollector, Workers
from etude.runs.folder import RunFolder
from etude.training.evaluation import HeldOut, Tester

_PROBE = 4_096
"""Steps whose actions are looked at where no environment says what they may be."""


class Data(NamedTuple):
    """The dataset of a recipe."""

    store: EpisodeStore
    spec: EnvSpec
    """The dataset as an environment would describe itself."""
    reads: set[str]
    """Observations that something looks at."""
    learned: Array
    """Numbers of the episodes to learn from, [n] int64."""
    held_out: EpisodesOf

    def shards(self, num: int) -> list[EpisodesOf]:
        """The episodes to learn from, dealt to so many shards."""
        if len(self.learned) < num:
            raise UsageError(
                f"{self.store.path} has {len(self.learned):,} episodes to learn from, and each of "
                f"{num:,} shards needs one: use fewer learner.shards."
            )
        action = self.spec.action
        return [EpisodesOf(self.store, self.learned[s::num], action) for s in range(num)]


def open_data(recipe: Recipe) -> Data:
    """The dataset, held against the environment where the recipe names one."""
    config = config_of(recipe)
    reads = {*recipe.policy.actor_reads, *recipe.policy.critic_reads, *_reward_reads(recipe)}
    store = from_data.open_dataset(config, reads)
    learned, held_out = split_store(store, config.held_out)
    if not len(learned):
        raise UsageError(f"{store.path} holds no episode to learn from: lower algorithm.held_out.")
    there, longest = store.geometry.observations, store.geometry.max_episode_steps
    action = _bounds(store) if recipe.env is None else _fits(recipe, store)
    spec = EnvSpec(there, action, longest)
    return Data(store, spec, reads, learned, EpisodesOf(store, held_out, action))


def _reward_reads(recipe: Recipe) -> tuple[str, ...]:
    if isinstance(recipe.rewards, RRDConfig):
        return recipe.rewards.network.reads
    if isinstance(recipe.rewards, LearnedConfig) and recipe.rewards.run:
        return load_taught(Path(recipe.rewards.run)).network.config.reads
    return ()


def _bounds(store: EpisodeStore) -> ActionSpec:
    """[-1, 1], which is what datasets of robots have; a sample is held against it."""
    spec = store.geometry.specs["actions"]
    if np.dtype(spec.dtype).kind != "f":
        raise UsageError(
            f"The actions of {store.path} are {spec.dtype}: sac and td3 learn actions in a box."
        )
    if store.num_transitions:
        sample = store.sample_transitions(Key(0).child("probe").generator(), _PROBE).actions
        largest = float(np.abs(sample).max())
        if largest > 1.0 + 1e-6:
            raise UsageError(
                f"The actions of {store.path} go up to {largest:.4g}, and without an environment "
                "they are taken to be in [-1, 1]: name the one they are for (--env.kind, --env.id "
                "or --env.task), or import with --clip-actions 1."
            )
    return ActionSpec("box", (-1.0,) * spec.shape[0], (1.0,) * spec.shape[0])


def _fits(recipe: Recipe, store: EpisodeStore) -> ActionSpec:
    """The actions of the environment; refuses one in which what is learned could not act."""
    env = make_env(recipe.task, recipe.evaluation.group_rows, 1)
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
        config, data = config_of(recipe), open_data(recipe)
        if isinstance(recipe.rewards, RRDConfig) and not config.allow_equal_returns:
            refuse_equal_returns(data.store, config.held_out)
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
        num_passes = from_data.passes(store, config, loops, config.batch_size)
        sizes = {"batch_size": config.batch_size, "train_batches": config.train_batches}
        held_out = data.held_out.num_episodes
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
            notes=[*from_data.notes(store, data.reads, held_out), *_notes(recipe)],
        )
        store.close()
        return sketch

    def assemble(
        self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock, ranks: Ranks
    ) -> Assembly:
        data = open_data(recipe)
        algorithm = make_learner(recipe, data, key)
        counts = len(data.learned), int(data.store.lengths[data.learned].sum())
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
    played = from_data.exactness(recipe) if recipe.env is None else env_exactness(recipe.env)
    return from_data.exactness(recipe) if played.exact else played


def _notes(recipe: Recipe) -> list[str]:
    config = config_of(recipe)
    notes = []
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
