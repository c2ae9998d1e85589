"""Reward-only learning as the app sees it: a dataset in place of environments."""

from __future__ import annotations

import torch

from etude.algorithms import from_data
from etude.algorithms.held_out import split_store
from etude.algorithms.reward_model import RewardOnlyConfig, action_of, make_reward_only
from etude.algorithms.rrd import num_bytes
from etude.core.clock import Clock, Nest
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.experience.store.episodes import EpisodeStore
from etude.models.reward_networks import make_reward_network
from etude.planning.kinds import Assembly, Sketch, World, device
from etude.planning.recipe import Recipe
from etude.rollout.local import NoCollector
from etude.runs.folder import RunFolder
from etude.training.evaluation import HeldOut


def _config(recipe: Recipe) -> RewardOnlyConfig:
    assert isinstance(recipe.algorithm, RewardOnlyConfig)
    return recipe.algorithm


def open_data(recipe: Recipe) -> tuple[RewardOnlyConfig, EpisodeStore]:
    """The dataset of a recipe, and its config with the observations that are read of it."""
    config = _config(recipe)
    config = config.found_in(from_data.look_into(config))
    return config, from_data.open_dataset(config, config.reads)


def _spec(config: RewardOnlyConfig, store: EpisodeStore) -> EnvSpec:
    """The dataset as an environment would describe itself."""
    longest = store.geometry.max_episode_steps
    return EnvSpec(store.geometry.observations, action_of(config, store), longest)


class RewardOnlyMethod:
    """A `Method`: nothing is collected, and what is learned is a reward."""

    takes_ranks = False

    def nest(self, recipe: Recipe) -> Nest:
        if recipe.learner.shards > 1:
            raise UsageError("A reward is learned in one shard: leave learner.shards at 1.")
        from_data.refuse_collection(recipe)
        _config(recipe).rrd.subsets_per_shard(1)
        return Nest.of(recipe.clock, 0, _config(recipe).train_batches)

    def look(self, recipe: Recipe) -> World:
        config, store = open_data(recipe)
        spec = _spec(config, store)
        with torch.device("meta"):
            network = make_reward_network(config.rrd.network, spec.observations, spec.action, None)
        _, held_out = split_store(store, config)
        store.close()
        return World(spec, from_data.exactness(recipe), network, {}, 0, held_out.num_episodes)

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        (config, store), loops = open_data(recipe), self.nest(recipe)
        with torch.device("meta"):
            algorithm = make_reward_only(config, store, torch.device("meta"), None)
        rrd = config.rrd
        num_passes = from_data.passes(algorithm.training, loops, rrd.rrd_batch_size)
        subsets = rrd.rrd_batch_size // rrd.rrd_sample_size
        model = sum(p.nbytes for p in world.deployed.parameters())
        seen = algorithm.rrd.network.observations.values()
        images = sum(spec.num_bytes for spec in seen if len(spec.shape) == 3)
        sketch = Sketch(
            geometry={
                "train_batches": config.train_batches,
                "rrd_batch_size": rrd.rrd_batch_size,
                "rrd_sample_size": rrd.rrd_sample_size,
                "episodes": store.num_episodes,
                "steps": store.num_transitions,
            },
            lines=[
                f"update: {config.train_batches:,} batches of {subsets:,} episodes x "
                f"{rrd.rrd_sample_size:,} of their steps = {rrd.rrd_batch_size:,}"
            ],
            shapes=from_data.shapes(store, config.reads, rrd.rrd_batch_size),
            title=from_data.TITLE,
            usage=from_data.usage(num_passes),
            data={
                "passes": num_passes,
                "gradient_samples": float(loops.total.updates * rrd.rrd_batch_size),
            },
            memory={"model": model, "gradient": model, "optimizer": 2 * model},
            # What the layers of an encoder keep, in float32, over the pictures themselves.
            estimates={"workspace": num_bytes(rrd, algorithm.rrd.network) + 16 * images},
            training=algorithm.state_dict(),
            disk=from_data.disk(store),
            notes=from_data.notes(store, config.reads, algorithm.training, algorithm.held_out),
        )
        store.close()
        return sketch

    def assemble(
        self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock, ranks: Ranks
    ) -> Assembly:
        config, store = open_data(recipe)
        algorithm = make_reward_only(config, store, device(recipe), key.child("reward"))
        score = "eval/rank_correlation" if config.progress else "eval/return_correlation"
        tests = HeldOut(algorithm.evaluate, score, algorithm.held_out.num_episodes)
        learned = algorithm.training
        collector = NoCollector(learned.num_whole, learned.num_transitions)
        return Assembly(algorithm, collector, tests, _spec(config, store))
