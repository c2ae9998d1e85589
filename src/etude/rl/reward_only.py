"""Reward-only: a reward network learned from a dataset of episodes, without an environment.

Loop, clock, checkpoints and logs are the same as for other algorithms; nothing is collected, and a
checkpoint has the reward network in `policy/`. `rewards/rrd.py` has the loss, `rewards/scores.py`
the scores on held-out episodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, PositiveInt

from etude.core.clock import Clock, Loops
from etude.core.contracts import ActionSpec, BatchMetrics, Broadcast, EnvSpec, Fragment
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.metrics import Column, Metric, Metrics
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.data.store.episodes import StoreGeometry
from etude.data.store.manifest import Episodes
from etude.data.store.views import EpisodesOf, open_with_task
from etude.models.reward_networks import RewardNetwork, make_reward_network
from etude.planning.recipe import Inputs, Learner, PlanSection, Recipe, Resolved
from etude.rl import offline
from etude.rl.base import PolicyAlgorithm
from etude.rl.offline import DatasetConfig, dataset_geometry, split_store
from etude.rl.rewards.rrd import METRICS, RRD, RRDConfig, num_bytes
from etude.rl.rewards.scores import (
    CHANCE,
    EVAL_LOSS,
    LOW,
    PAIRS,
    PROGRESS,
    constant_reward,
    evaluate,
    missing,
)
from etude.runs.folder import RunFolder
from etude.training.evaluation import HeldOutEvaluator


class RewardOnlyConfig(DatasetConfig):
    """A reward network learned from a dataset."""

    offline_evaluation: ClassVar[str] = "rewards"
    metrics: ClassVar[Metrics] = (
        *METRICS,
        Metric("train/R_mean", "R mean", ".3g", Column(31, 10)),
        Metric("train/R_std", "R std", ".3g", Column(32, 10)),
        Metric(
            "eval/rank_correlation",
            "rank",
            ".2f",
            Column(96, 7),
            about="rank correlation of running sums with progress",
        ),
        Metric(
            "eval/time_correlation",
            "of time",
            ".2f",
            Column(97, 8),
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
    )

    kind: Literal["reward-only"] = Field("reward-only", description="Rewards from a dataset.")
    train_batches: int = Field(50, ge=1, description="Gradient steps of an iteration.")
    rrd: RRDConfig = Field(RRDConfig.image(reads=()), description="Return decomposition.")
    progress: str | None = Field(
        None, description="Observation (one number per step) that measures progress in the task."
    )
    action_sizes: tuple[PositiveInt, ...] = Field(
        (), description="Number of choices of each discrete action; empty if continuous."
    )

    def with_reads(self, store: StoreGeometry) -> Self:
        """Fill in the observations that the network reads, if none are given."""
        network = self.rrd.network.with_reads(store.observations, but=self.progress)
        return self.replace(rrd__network=network)

    @property
    def read_names(self) -> set[str]:
        """The observations that reward network and evaluation read."""
        return {*self.rrd.network.reads, *([self.progress] if self.progress else [])}

    @property
    def score(self) -> str:
        """The metric that decides which reward is the best."""
        return PROGRESS if self.progress else PAIRS

    def loops(self, recipe: Recipe, geometry: None) -> Loops:
        if recipe.learner.shards > 1:
            raise UsageError("A reward is learned in one shard: leave learner.shards at 1.")
        offline.refuse_collection(recipe)
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
            exactness=offline.exactness(recipe.replace(env=None)),
            deployed=network,
            evaluation_episodes=held_out.num_episodes,
            snapshot={},
            num_groups=0,
            data=(config, store),
        )

    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        config, store = run.data
        algorithm = make_reward_only(config, store, run.device, key.child("reward"))
        episodes = algorithm.held_out.num_episodes
        held_out = HeldOutEvaluator(
            algorithm.evaluate, episodes, config.score, EVAL_LOSS, f"{config.score}{LOW}", CHANCE
        )
        counts = algorithm.training.num_whole, algorithm.training.num_transitions
        return Learner(algorithm, dataset=counts, evaluator=held_out)

    def plan(self, run: Resolved) -> PlanSection:
        config, store = run.data
        with torch.device("meta"):
            algorithm = make_reward_only(config, store, torch.device("meta"), None)
        rrd, network = config.rrd, algorithm.rrd.network
        batch, sample = rrd.rrd_batch_size, rrd.rrd_sample_size
        model = sum(p.nbytes for p in run.deployed.parameters())
        read = network.observations.values()
        images = sum(spec.num_bytes for spec in read if len(spec.shape) == 3)
        return offline.dataset_section(
            run,
            store,
            config.read_names,
            (algorithm.training, algorithm.held_out),
            batch,
            {
                "train_batches": config.train_batches,
                "rrd_batch_size": batch,
                "rrd_sample_size": sample,
            },
            _notes(config, algorithm.held_out),
            lines=[
                f"update: {config.train_batches:,} batches of {batch // sample:,} episodes x "
                f"{sample:,} of their steps = {batch:,}"
            ],
            memory={"model": model, "gradient": model, "optimizer": 2 * model},
            # Activations of the encoder's layers, in float32, relative to the images.
            estimates={"workspace": num_bytes(rrd, network) + 16 * images},
            training=algorithm.state_dict(),
        )


def open_data(config: RewardOnlyConfig) -> tuple[RewardOnlyConfig, Episodes]:
    """Open the dataset; returns the config with the observations that are read filled in."""
    config = config.with_reads(dataset_geometry(config))
    return config, open_with_task(Path(config.dataset), config.read_names)


class RewardOnly(PolicyAlgorithm):
    """Reward learning, as described in the module's docstring; `policy` is the reward network."""

    policy: RewardNetwork  # type: ignore[assignment]

    def __init__(
        self,
        config: RewardOnlyConfig,
        store: Episodes,
        network: RewardNetwork,
        device: torch.device,
    ) -> None:
        _check_progress(config.progress, store)
        self.config, self.store, self.policy = config, store, network
        self.rrd = RRD(config.rrd, network, 1, device)
        self.training, self.held_out = split_store(store, config)

    def broadcast(self, clock: Clock) -> Broadcast:
        """Nothing acts."""
        return Broadcast(clock.now.iterations, {})

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Metrics: "dataset/passes", the mean number of times a step has been sampled after this
        iteration."""
        updates = clock.now.updates + self.config.train_batches
        drawn = updates * self.config.rrd.rrd_batch_size
        return {"dataset/passes": drawn / self.training.num_transitions}

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        for b in range(self.config.train_batches):
            yield BatchMetrics(self.rrd.update([self.training], key.child("reward", b)))

    def end_iteration(self) -> dict[str, float]:
        return {}

    def evaluate(self) -> dict[str, float]:
        """Scores of the reward on held-out episodes; {} if there are none."""
        constant = constant_reward(self.training)
        return evaluate(self.policy, self.held_out, self.config.progress, constant)

    def check_unchanged(self) -> None:
        """Raise an error if a file of the dataset was changed."""
        self.store.check_unchanged()

    def close(self) -> None:
        self.store.close()

    def state_dict(self) -> Tree:
        """All but the network's arrays, which are saved in `policy/`."""
        return {"dataset": self.training.state_dict(), **self.rrd.learner_state()}

    def load_state_dict(self, state: Tree) -> None:
        self.training.load_state_dict(state["dataset"])
        self.rrd.load_learner_state(state)


def make_reward_only(
    config: RewardOnlyConfig, store: Episodes, device: torch.device, key: Key | None
) -> RewardOnly:
    """Construct the algorithm with random weights drawn from `key`; None if they are loaded."""
    config, action = config.with_reads(store.geometry), action_of(config, store)
    network = make_reward_network(config.rrd.network, store.geometry.observations, action, key)
    return RewardOnly(config, store, network, device)


def action_of(config: RewardOnlyConfig, store: Episodes) -> ActionSpec:
    """The action space of a dataset; the network's normaliser makes up for unknown bounds."""
    spec, sizes = store.geometry.specs["actions"], config.action_sizes
    num = spec.shape[0] if spec.shape else 0
    if np.dtype(spec.dtype).kind == "f" and not sizes:
        return ActionSpec("box", (-1.0,) * num, (1.0,) * num)
    if np.dtype(spec.dtype).kind in "iu" and len(sizes) == num:
        return ActionSpec("discrete" if num == 1 else "multi_discrete", sizes=sizes)
    raise UsageError(
        f"The actions of {store.path} are {spec.dtype} of shape {spec.shape}, and action_sizes "
        f"names {len(sizes)}: whole numbers need one size each, others none."
    )


def _notes(config: RewardOnlyConfig, held_out: EpisodesOf) -> list[str]:
    """Notes about the score that decides the best reward, and about missing scores."""
    absent = missing(held_out, config.progress)
    chosen = (
        f"The best reward is the one with the highest {config.score}, among those whose 95 % "
        f"interval is above {CHANCE}, the score of a constant reward; there may be none."
    )
    if not held_out.num_episodes or f"{config.score} (" in absent:
        chosen = f"No held-out episodes give {config.score}: the newest reward counts as the best."
    return [chosen, *([absent] if absent else [])]


def _check_progress(progress: str | None, store: Episodes) -> None:
    if progress is None:
        return
    spec = store.geometry.observations.get(progress)
    if spec is None or int(np.prod(spec.shape)) != 1:
        raise UsageError(
            f"progress '{progress}' is not one number per step in {store.path}; its observations "
            f"are {', '.join(sorted(store.geometry.observations))}."
        )
