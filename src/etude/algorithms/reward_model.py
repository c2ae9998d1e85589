"""Reward-only: a reward network learned from a dataset of episodes, without an environment.

The loop, clock, checkpoints and logs are those of any other algorithm; nothing is collected, and
the reward network stands in a checkpoint's `policy/`. `held_out.py` says what it is tested on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from etude.algorithms.held_out import EpisodesOf, split_store
from etude.algorithms.rrd import RRD
from etude.core.clock import Clock
from etude.core.contracts import ActionSpec, Array, BatchMetrics, Broadcast, Fragment
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.experience.store.episodes import EpisodeStore, Transitions
from etude.models.reward_networks import RewardNetwork, make_reward_network, rewards_of

if TYPE_CHECKING:
    from etude.algorithms.reward_only import RewardOnlyConfig


class RewardOnly:
    """An `Algorithm` on a sealed dataset; see the module's text."""

    def __init__(
        self,
        config: RewardOnlyConfig,
        store: EpisodeStore,
        network: RewardNetwork,
        device: torch.device,
    ) -> None:
        _check_progress(config.progress, store)
        self.config, self.store = config, store
        self.rrd = RRD(config.rrd, network, 1, device)
        self.training, self.held_out = split_store(store, config)

    def broadcast(self, clock: Clock) -> Broadcast:
        """There is nobody to act."""
        return Broadcast(clock.now.iterations, {})

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """ "dataset/passes": how often a step has been drawn, on average, after this iteration."""
        updates = clock.now.updates + self.config.train_batches
        drawn = updates * self.config.rrd.rrd_batch_size
        return {"dataset/passes": drawn / self.training.num_transitions}

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        for b in range(self.config.train_batches):
            yield BatchMetrics(self.rrd.update([self.training], key.child("reward", b)))

    def end_iteration(self) -> dict[str, float]:
        return {}

    def evaluate(self) -> dict[str, float]:
        """How good the reward is on the episodes held out; {} if there are none."""
        return evaluate(self.rrd, self.held_out, self.config.progress)

    def policy_parts(self) -> tuple[Tree, Tree]:
        return dict(self.rrd.network.state_dict()), self.rrd.network.contract()

    def load_policy(self, arrays: Tree) -> None:
        self.rrd.network.load_state_dict({k: torch.as_tensor(v) for k, v in arrays.items()})

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        self.load_policy(arrays)

    def retire(self, states: list[Tree]) -> None:
        """A finished dataset is nobody's to delete."""

    def close(self) -> None:
        self.store.close()

    def state_dict(self) -> Tree:
        """The network's own arrays are kept beside this, in `policy/`."""
        return {"dataset": self.training.state_dict(), **self.rrd.learner_state()}

    def load_state_dict(self, state: Tree) -> None:
        self.training.load_state_dict(state["dataset"])
        self.rrd.load_learner_state(state)


def make_reward_only(
    config: RewardOnlyConfig, store: EpisodeStore, device: torch.device, key: Key | None
) -> RewardOnly:
    """With a new network, its weights drawn from `key`; None when they are loaded."""
    config, action = config.found_in(store.geometry), action_of(config, store)
    network = make_reward_network(config.rrd.network, store.geometry.observations, action, key)
    return RewardOnly(config, store, network, device)


def action_of(config: RewardOnlyConfig, store: EpisodeStore) -> ActionSpec:
    """What the actions of a dataset are; its own normaliser makes up for unknown bounds."""
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


def episode_rewards(rrd: RRD, steps: Transitions) -> Array:
    """The learned reward of every step of an episode, [T] float64."""
    return rewards_of(rrd.network, steps.obs, steps.actions, steps.next_obs)


def evaluate(rrd: RRD, episodes: EpisodesOf, progress: str | None) -> dict[str, float]:
    """Judge the learned reward on episodes with all their steps.

    "eval/R_loss": mean of (mean r - R / T)^2; all steps leave no sampling variance to correct.
    "eval/return_correlation": Spearman's, between the sums of the learned reward and the returns;
    of clips too, where there are any.
    With the name of a progress signal, read after each step:
    "eval/rank_correlation": Spearman's, of the running sum of the learned reward with progress in
    an episode, averaged over those in which there was any; "eval/time_correlation" is the same of
    the time gone by. The latter is what any constant reward above 0 gets: compare.
    "eval/pooled_correlation": over the steps of all episodes together, where it has to be known
    which episode got further; "eval/pooled_time_correlation" is that of the time gone by.
    """
    losses, sums = [], []
    followed: list[tuple[Array, Array, Array]] = []  # Running sum, time and progress, [T] each.
    for number in range(episodes.num_episodes):
        steps, whole = episodes.episode(number)
        rewards = episode_rewards(rrd, steps)
        sums.append(float(rewards.sum()))
        if number >= episodes.num_whole:  # A clip's steps are those of an episode before it.
            continue
        losses.append(float(rewards.mean() - whole / len(rewards)) ** 2)
        if progress is not None:
            done = steps.next_obs[progress].reshape(len(rewards)).astype(np.float64)
            followed.append((rewards.cumsum(), np.arange(len(done)), done))
    if not losses:
        return {}
    metrics = {
        "eval/R_loss": float(np.mean(losses)),
        "eval/return_correlation": spearman(np.array(sums), episodes.returns),
        "eval/rank_correlation": _mean([spearman(running, done) for running, _, done in followed]),
        "eval/time_correlation": _mean([spearman(time, done) for _, time, done in followed]),
    }
    if followed:
        running, time, done = (np.concatenate(parts) for parts in zip(*followed, strict=True))
        metrics["eval/pooled_correlation"] = spearman(running, done)
        metrics["eval/pooled_time_correlation"] = spearman(time, done)
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _mean(values: list[float]) -> float:
    """Of those that exist; NaN if none does."""
    there = [value for value in values if np.isfinite(value)]
    return float(np.mean(there)) if there else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Rank correlation of x [n] and y [n], equal values sharing their mean rank.

    NaN where one of them is constant: it has no order to agree with.
    """
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0.0 else float("nan")


def _ranks(values: Array) -> Array:
    """[n] float64 from 0; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = (ends - (counts + 1) / 2)[place]
    return ranks


def _check_progress(progress: str | None, store: EpisodeStore) -> None:
    if progress is None:
        return
    spec = store.geometry.observations.get(progress)
    if spec is None or int(np.prod(spec.shape)) != 1:
        raise UsageError(
            f"progress '{progress}' is not one number a step of {store.path}; its observations "
            f"are {', '.join(sorted(store.geometry.observations))}."
        )
