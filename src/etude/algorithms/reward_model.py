"""Reward-only: a reward network learned from a dataset of episodes, without an environment.

The loop, clock, checkpoints and logs are those of any other algorithm; nothing is collected, and
the reward network stands in a checkpoint's `policy/`. Some episodes are held out, every n-th in
the order of their returns, so that both parts hold good and bad ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt, field_validator

from etude.algorithms.rrd import RRD, SAME, RRDConfig
from etude.core.clock import Clock
from etude.core.contracts import ActionSpec, Array, BatchMetrics, Broadcast, Fragment
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.core.recipe import Config
from etude.core.trees import Tree
from etude.experience.episodes import EpisodeStore, Subsets, Transitions
from etude.models.reward_networks import RewardNetwork, make_reward_network

_CHUNK = 64
"""Steps of an episode that are judged at a time, which bounds the floats of images."""


class RewardOnlyConfig(Config):
    """A reward network from a dataset."""

    kind: Literal["reward-only"] = Field("reward-only", description="Rewards from a dataset.")
    dataset: str = Field(description="Folder of a finished dataset; see `etude data`.")
    train_batches: int = Field(50, ge=1, description="Gradient steps of an iteration.")
    rrd: RRDConfig = Field(RRDConfig.image(), description="Return decomposition.")
    held_out: float = Field(
        0.1, ge=0, le=0.5, description="Part of the episodes kept for tests; 0 keeps none."
    )
    progress: str | None = Field(
        None, description="Observation of one number a step that says how far the task is."
    )
    allow_equal_returns: bool = Field(
        False, description="Go on with a dataset whose returns teach nothing."
    )
    action_sizes: tuple[PositiveInt, ...] = Field(
        (), description="Choices of each discrete action; box actions have none."
    )

    @field_validator("dataset")
    @classmethod
    def _whole_path(cls, dataset: str) -> str:
        """A run is found again from another folder, and so must be what it learns from."""
        return str(Path(dataset).absolute()) if dataset else dataset

    def num_passes(self, num_updates: int, num_steps: int) -> float:
        """How often the run sees every step of a dataset, on average; for the plan."""
        return num_updates * self.rrd.rrd_batch_size / num_steps


@dataclass(frozen=True)
class Contrast:
    """Whether the returns of a dataset can teach a reward."""

    verdict: Literal["none", "some"]
    return_spread: float
    """Standard deviation of the returns, in parts of the largest |return|."""
    per_step_spread: float
    """The same of R / T."""
    reason: str


def contrast(returns: Array, lengths: Array) -> Contrast:
    """The verdict on returns [episodes] and lengths [episodes].

    "none" if the returns are all the same, or R / T is. The latter is plain: the constant
    r = R / T solves the loss. So does r = R / T where every return is R and lengths differ. This
    looks like a signal, since the targets differ, but all it can teach is how long an episode
    lasts: within an episode the reward is constant, its running sum is the share of time gone
    by, and an episode that dawdled earns in the end as much as one that went straight. Which
    steps made the difference cannot be told from episodes between which there is none.
    """
    if not len(returns):
        return Contrast("none", 0.0, 0.0, "there is no episode")
    whole, per_step = _spread(returns), _spread(returns / lengths)
    reason = f"returns spread by {whole:.3g} of the largest, returns per step by {per_step:.3g}"
    if whole < SAME:
        reason = f"all {len(returns):,} returns are {float(returns.mean()):.6g}"
    elif per_step < SAME:
        each = float((returns / lengths).mean())
        reason = f"all {len(returns):,} episodes give {each:.6g} per step, whatever is done"
    verdict: Literal["none", "some"] = "none" if min(whole, per_step) < SAME else "some"
    return Contrast(verdict, whole, per_step, reason)


def _spread(values: Array) -> float:
    return float(values.std() / max(float(np.abs(values).max()), np.finfo(np.float64).tiny))


def refuse_equal_returns(store: EpisodeStore, held_out: float) -> None:
    """Raise `UsageError` if what is learned from of a dataset cannot teach a reward."""
    kept, _ = split(store.returns, held_out)
    found = contrast(store.returns[kept], store.lengths[kept])
    if found.verdict == "none":
        raise UsageError(
            f"{store.path} teaches no reward: {found.reason}, so a constant per step solves the "
            "loss. Add episodes that fail, or clips cut off before the end (etude data import "
            "can add them), or go on regardless with allow_equal_returns."
        )


class EpisodesOf:
    """Some episodes of a store, drawn from as the store draws from all."""

    def __init__(self, store: EpisodeStore, numbers: Array) -> None:
        """numbers: [n] int64, counted from the oldest held; the store no longer changes."""
        self._store, self._numbers = store, numbers
        self.time, self.lanes, self.num_episodes = store.time, store.lanes, len(numbers)
        self.returns, self.lengths = store.returns[numbers], store.lengths[numbers]
        self._ends: Array = np.cumsum(self.lengths)

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets:
        drawn = generator.integers(0, self._ends[-1], num_subsets)
        chosen = self._numbers[self._ends.searchsorted(drawn, "right")]
        return self._store.subsets_of(generator, chosen, num_steps)


class RewardOnly:
    """An `Algorithm` on a sealed dataset; see the module's text."""

    def __init__(
        self,
        config: RewardOnlyConfig,
        store: EpisodeStore,
        network: RewardNetwork,
        device: torch.device,
    ) -> None:
        if not config.allow_equal_returns:
            refuse_equal_returns(store, config.held_out)
        _check_progress(config.progress, store)
        self.config, self.store = config, store
        self.rrd = RRD(config.rrd, network, 1, device)
        kept, self.held_out = split(store.returns, config.held_out)
        self._training = EpisodesOf(store, kept)

    def broadcast(self, clock: Clock) -> Broadcast:
        """There is nobody to act."""
        return Broadcast(clock.now.iterations, {})

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        return {}

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        for b in range(self.config.train_batches):
            yield BatchMetrics(self.rrd.update([self._training], key.child("reward", b)))

    def end_iteration(self) -> dict[str, float]:
        return {}

    def evaluate(self) -> dict[str, float]:
        """How good the reward is on the episodes held out; {} if there are none."""
        return evaluate(self.rrd, self.store, self.held_out, self.config.progress)

    def policy_parts(self) -> tuple[Tree, Tree]:
        return dict(self.rrd.network.state_dict()), self.rrd.network.contract()

    def load_policy(self, arrays: Tree) -> None:
        self.rrd.network.load_state_dict({k: torch.as_tensor(v) for k, v in arrays.items()})

    def start_from(self, arrays: Tree) -> None:
        self.load_policy(arrays)

    def retire(self, states: list[Tree]) -> None:
        """A finished dataset is nobody's to delete."""

    def close(self) -> None:
        self.store.close()

    def state_dict(self) -> Tree:
        """The network's own arrays are kept beside this, in `policy/`."""
        state = {"dataset": self.store.state_dict(), "held_out": self.held_out.copy()}
        return {**state, **self.rrd.learner_state()}

    def load_state_dict(self, state: Tree) -> None:
        """Refuses a state that was learned from other data, or from other episodes of it."""
        self.store.load_state_dict(state["dataset"])
        if not np.array_equal(np.asarray(state["held_out"]), self.held_out):
            raise EtudeError("This run held out other episodes: resume it with its own held_out.")
        self.rrd.load_learner_state(state)


def make_reward_only(
    config: RewardOnlyConfig, store: EpisodeStore, device: torch.device, key: Key | None
) -> RewardOnly:
    """With a new network, its weights drawn from `key`; None when they are loaded."""
    action = action_of(config, store)
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


def split(returns: Array, held_out: float) -> tuple[Array, Array]:
    """Numbers of the episodes to learn from and of those held out, each ascending int64.

    Every n-th in the order of the returns, n = 1 / held_out, beginning in the middle of the
    first n: the same for the same returns, without a random number.
    """
    if not held_out:
        return np.arange(len(returns)), np.empty(0, np.int64)
    every = round(1.0 / held_out)
    order = np.argsort(returns, kind="stable")
    chosen = np.zeros(len(returns), bool)
    chosen[order[every // 2 :: every]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def episode_rewards(rrd: RRD, steps: Transitions) -> Array:
    """The learned reward of every step of an episode, [T] float64."""
    network, parts = rrd.network, []
    with torch.no_grad():
        for start in range(0, len(steps.rewards), _CHUNK):
            some = slice(start, start + _CHUNK)
            obs, next_obs = (
                {n: torch.from_numpy(o[n][some]).to(rrd.device) for n in network.observations}
                for o in (steps.obs, steps.next_obs)
            )
            actions = torch.from_numpy(steps.actions[some]).to(rrd.device)
            parts.append(network(obs, actions, next_obs).double().cpu().numpy())
    return np.concatenate(parts)


def evaluate(
    rrd: RRD, store: EpisodeStore, episodes: Array, progress: str | None
) -> dict[str, float]:
    """Judge the learned reward on whole episodes [n], counted from the oldest held.

    "eval/R_loss": mean of (mean r - R / T)^2; a whole episode has no sampling variance to correct.
    "eval/return_correlation": Spearman's, between the sums of the learned reward and the returns.
    With the name of a progress signal, read after each step:
    "eval/rank_correlation": Spearman's, of the running sum of the learned reward with progress in
    an episode, averaged over those in which there was any; "eval/time_correlation" is the same of
    the time gone by. The latter is what any constant reward above 0 gets: compare.
    "eval/pooled_correlation": over the steps of all episodes together, where it has to be known
    which episode got further.
    """
    losses, sums, own, time = [], [], [], []
    pooled: tuple[list[Array], list[Array]] = ([], [])
    for number in episodes.tolist():
        steps, whole = store.episode(number)
        rewards = episode_rewards(rrd, steps)
        losses.append(float(rewards.mean() - whole / len(rewards)) ** 2)
        sums.append(float(rewards.sum()))
        if progress is not None:
            done = steps.next_obs[progress].reshape(len(rewards)).astype(np.float64)
            running = rewards.cumsum()
            pooled[0].append(running)
            pooled[1].append(done)
            own.append(spearman(running, done))
            time.append(spearman(np.arange(len(done)), done))
    if not losses:
        return {}
    metrics = {
        "eval/R_loss": float(np.mean(losses)),
        "eval/return_correlation": spearman(np.array(sums), store.returns[episodes]),
        "eval/rank_correlation": _mean(own),
        "eval/time_correlation": _mean(time),
    }
    if pooled[0]:
        metrics["eval/pooled_correlation"] = spearman(*map(np.concatenate, pooled))
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
