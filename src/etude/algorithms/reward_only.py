"""Reward-only learning: a dataset in place of environments, and its part of a plan."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt

from etude.algorithms import from_dataset
from etude.algorithms.held_out import DatasetConfig, split_store
from etude.algorithms.reward_model import action_of, make_reward_only
from etude.algorithms.rrd import METRICS, RRDConfig, num_bytes
from etude.core.clock import Loops
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.experience.store.episodes import EpisodeStore, StoreGeometry
from etude.metrics.declared import Column, Metric, Metrics
from etude.models.reward_networks import make_reward_network
from etude.planning.kinds import Inputs, Learner, PlanSection
from etude.planning.recipe import Recipe
from etude.planning.resolve import Resolved
from etude.runs.folder import RunFolder
from etude.training.evaluation import HeldOutEvaluator


class RewardOnlyConfig(DatasetConfig):
    """A reward network from a dataset."""

    report: ClassVar[str] = "etude.reports.rewards:examine"
    metrics: ClassVar[Metrics] = (
        *METRICS,
        Metric("train/R_mean", "R mean", ".3g", Column(31, 10)),
        Metric("train/R_std", "R std", ".3g", Column(32, 10)),
        Metric("eval/R_loss", "eval R loss", ".3g", Column(90, 12)),
        Metric(
            "eval/rank_correlation",
            "rank",
            ".2f",
            Column(91, 7),
            about="rank correlation of running sums with progress",
            summary="rank correlation with progress {value:.2f} (the mere time: "
            "{row[eval/time_correlation]:.2f}); best {best[0]:.2f}",
        ),
        Metric(
            "eval/time_correlation",
            "of time",
            ".2f",
            Column(92, 8),
            about="rank correlation of time with progress",
        ),
        Metric(
            "eval/pooled_correlation",
            "pooled",
            about="running sums with progress, all steps pooled",
        ),
        Metric(
            "eval/pooled_time_correlation",
            "pooled time",
            about="time with progress, all steps pooled",
        ),
        Metric("eval/return_correlation", "of returns", ".2f", Column(93, 11)),
    )

    kind: Literal["reward-only"] = Field("reward-only", description="Rewards from a dataset.")
    train_batches: int = Field(50, ge=1, description="Gradient steps of an iteration.")
    rrd: RRDConfig = Field(RRDConfig.image(reads=()), description="Return decomposition.")
    progress: str | None = Field(
        None, description="Observation of one number a step that says how far the task is."
    )
    action_sizes: tuple[PositiveInt, ...] = Field(
        (), description="Choices of each discrete action; box actions have none."
    )

    def found_in(self, store: StoreGeometry) -> Self:
        """With the observations that are read chosen from what there is, if none are given."""
        network = self.rrd.network.found_in(store.observations, but=self.progress)
        return self.model_copy(update={"rrd": self.rrd.model_copy(update={"network": network})})

    @property
    def read_names(self) -> set[str]:
        """The observations that are looked at."""
        return {*self.rrd.network.reads, *([self.progress] if self.progress else [])}

    def loops(self, recipe: Recipe, geometry: None) -> Loops:
        if recipe.learner.shards > 1:
            raise UsageError("A reward is learned in one shard: leave learner.shards at 1.")
        from_dataset.refuse_collection(recipe)
        self.rrd.check(1)
        return Loops.of(recipe.clock, 0, self.train_batches)

    def inputs(self, recipe: Recipe) -> Inputs:
        config, store = open_data(self)
        action = action_of(config, store)
        spec = EnvSpec(store.geometry.observations, action, store.geometry.max_episode_steps)
        with torch.device("meta"):
            network = make_reward_network(config.rrd.network, spec.observations, action, None)
        _, held_out = split_store(store, config)
        return Inputs(
            spec=spec,
            exactness=from_dataset.exactness(recipe.model_copy(update={"env": None})),
            deployed=network,
            evaluation_episodes=held_out.num_episodes,
            snapshot={},
            num_groups=0,
            data=(config, store),
        )

    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        config, store = run.data
        algorithm = make_reward_only(config, store, run.device, key.child("reward"))
        score = "eval/rank_correlation" if config.progress else "eval/return_correlation"
        held_out = HeldOutEvaluator(algorithm.evaluate, score, algorithm.held_out.num_episodes)
        counts = algorithm.training.num_whole, algorithm.training.num_transitions
        return Learner(algorithm, dataset=counts, evaluator=held_out)

    def plan(self, run: Resolved) -> PlanSection:
        (config, store), loops = run.data, run.loops
        with torch.device("meta"):
            algorithm = make_reward_only(config, store, torch.device("meta"), None)
        rrd = config.rrd
        num_passes = from_dataset.passes(algorithm.training, loops, rrd.rrd_batch_size)
        subsets = rrd.rrd_batch_size // rrd.rrd_sample_size
        model = sum(p.nbytes for p in run.deployed.parameters())
        read = algorithm.rrd.network.observations.values()
        images = sum(spec.num_bytes for spec in read if len(spec.shape) == 3)
        return PlanSection(
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
            shapes=from_dataset.shapes(store, config.read_names, rrd.rrd_batch_size),
            title=from_dataset.TITLE,
            usage=from_dataset.usage(num_passes),
            data={
                "passes": num_passes,
                "gradient_samples": float(loops.total.updates * rrd.rrd_batch_size),
            },
            memory={"model": model, "gradient": model, "optimizer": 2 * model},
            # What the layers of an encoder keep, in float32, over the pictures themselves.
            estimates={"workspace": num_bytes(rrd, algorithm.rrd.network) + 16 * images},
            training=algorithm.state_dict(),
            disk=from_dataset.disk(store),
            notes=from_dataset.dataset_notes(
                store, config.read_names, algorithm.training, algorithm.held_out
            ),
        )


def open_data(config: RewardOnlyConfig) -> tuple[RewardOnlyConfig, EpisodeStore]:
    """The dataset, and the config with the observations that are read of it."""
    config = config.found_in(from_dataset.dataset_geometry(config))
    return config, from_dataset.open_dataset(config, config.read_names)
