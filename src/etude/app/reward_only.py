"""Reward-only learning as the app sees it: a dataset in place of environments."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.algorithms.reward_model import (
    RewardOnlyConfig,
    action_of,
    make_reward_only,
    refuse_equal_returns,
    split,
)
from etude.algorithms.rrd import num_bytes
from etude.app.methods import Assembly, Sketch, World, device
from etude.app.recipe import Recipe
from etude.core.clock import Clock, Nest
from etude.core.contracts import EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.experience.episodes import EpisodeStore
from etude.models.reward_networks import make_reward_network
from etude.rollout.local import NoCollector
from etude.runs.folder import RunFolder
from etude.training.evaluation import HeldOut


def _config(recipe: Recipe) -> RewardOnlyConfig:
    assert isinstance(recipe.algorithm, RewardOnlyConfig)
    return recipe.algorithm


def _open(recipe: Recipe) -> EpisodeStore:
    name = _config(recipe).dataset
    path = Path(name)
    if not name or not (path / "store.json").is_file():
        raise UsageError(
            f"There is no dataset at '{name}': name one with --algorithm.dataset FOLDER; `etude "
            "data record` makes one, `etude data import` reads those of others."
        )
    return EpisodeStore.open(path)


def _spec(config: RewardOnlyConfig, store: EpisodeStore) -> EnvSpec:
    """The dataset as an environment would describe itself."""
    longest = store.geometry.max_episode_steps
    return EnvSpec(store.geometry.observations, action_of(config, store), longest)


class RewardOnlyMethod:
    """A `Method`: nothing is collected, and what is learned is a reward."""

    def nest(self, recipe: Recipe) -> Nest:
        if recipe.learner.shards > 1 or recipe.collector.lag:
            raise UsageError(
                "Learning from a dataset has one shard and nothing to collect ahead: leave "
                "learner.shards at 1 and collector.lag at 0."
            )
        _config(recipe).rrd.subsets_per_shard(1)
        return Nest.of(recipe.clock, 0, _config(recipe).train_batches)

    def look(self, recipe: Recipe) -> World:
        config, store = _config(recipe), _open(recipe)
        if not config.allow_equal_returns:
            refuse_equal_returns(store, config.held_out)
        spec = _spec(config, store)
        with torch.device("meta"):
            network = make_reward_network(config.rrd.network, spec.observations, spec.action, None)
        _, held_out = split(store.returns, config.held_out)
        store.close()
        exact = Exactness(True, "the dataset is sealed and named by its hash")
        if device(recipe).type != "cpu":
            exact = Exactness(False, "learning happens on a GPU, where bits may differ")
        return World(spec, exact, network, {}, 0, len(held_out))

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        config, store, loops = _config(recipe), _open(recipe), self.nest(recipe)
        steps, episodes = store.num_transitions, store.num_episodes
        with torch.device("meta"):
            algorithm = make_reward_only(config, store, torch.device("meta"), None)
        kept, _ = split(store.returns, config.held_out)
        learned = int(store.lengths[kept].sum())
        rrd, passes = config.rrd, config.num_passes(loops.total.updates, learned)
        subsets = rrd.rrd_batch_size // rrd.rrd_sample_size
        model = sum(p.nbytes for p in world.deployed.parameters())
        images = sum(s.num_bytes for s in world.spec.observations.values() if len(s.shape) == 3)
        sketch = Sketch(
            geometry={
                "train_batches": config.train_batches,
                "rrd_batch_size": rrd.rrd_batch_size,
                "rrd_sample_size": rrd.rrd_sample_size,
                "episodes": episodes,
                "steps": steps,
            },
            lines=[
                f"update: {config.train_batches:,} batches of {subsets:,} episodes x "
                f"{rrd.rrd_sample_size:,} of their steps = {rrd.rrd_batch_size:,}"
            ],
            shapes={
                name: {
                    "dtype": spec.dtype,
                    "buffer": [steps, *spec.shape],
                    "minibatch": [rrd.rrd_batch_size, *spec.shape],
                }
                for name, spec in store.geometry.specs.items()
            },
            title="Dataset: [steps, ...]",
            usage=f"every step that is not held out is used {passes:,.1f} times in all, on average",
            data={
                "passes": passes,
                "gradient_samples": float(loops.total.updates * rrd.rrd_batch_size),
            },
            memory={"model": model, "gradient": model, "optimizer": 2 * model},
            # What the layers of an encoder keep, in float32, over the pictures themselves.
            estimates={"workspace": num_bytes(rrd, algorithm.rrd.network) + 16 * images},
            training=algorithm.state_dict(),
            disk={"dataset": store.geometry.dataset_bytes(steps, episodes)},
            notes=[
                f"{world.test_episodes:,} of {episodes:,} episodes are held out for tests.",
                "Curves are over gradient updates: nothing is collected.",
            ],
        )
        store.close()
        return sketch

    def assemble(self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock) -> Assembly:
        config, store = _config(recipe), _open(recipe)
        algorithm = make_reward_only(config, store, device(recipe), key.child("reward"))
        score = "eval/rank_correlation" if config.progress else "eval/return_correlation"
        tests = HeldOut(algorithm.evaluate, score, len(algorithm.held_out))
        return Assembly(algorithm, NoCollector(), tests, _spec(config, store))
