"""IRCR, a baseline without a reward model: the reward of a step is the return of its episode.

The return is scaled to [0, 1] by the smallest and the largest return among the stored episodes.
Half of each shard's minibatch is sampled from the best ten episodes of the run so far, the other
half from all finished episodes of the shard's store, each uniform over transitions.

The best episodes are copied, in memory and in the checkpoint, so they remain when the store evicts
them. All shards share the same ten.

Only finished episodes have a return, so only their transitions are sampled. Until a shard has one,
its minibatches are from open episodes with rewards 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from etude.core.contracts import Array, EnvSpec, Observations
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.data.store.episodes import Transitions
from etude.planning.recipe import Resolved, RewardsConfig
from etude.rl.rewards.given import RewardSource
from etude.rl.sampling import Batch, Experience, Sample, finished, mixture, uniform


class IRCRConfig(RewardsConfig):
    """The scaled return of the episode as the reward of each of its steps."""

    from_returns: ClassVar[bool] = True

    kind: Literal["ircr"] = Field("ircr", description="Normalised return of the episode.")
    best: int = Field(10, ge=1, description="Best episodes, the source of half of each minibatch.")

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> IRCR:
        source = IRCR(self, run.recipe.learner.shards, device)
        if key is None:
            source.plan(run.spec)
        return source


class Episodes(NamedTuple):
    """Whole episodes, concatenated from the oldest to the newest."""

    returns: Array
    """[episodes] float64."""
    lengths: Array
    """[episodes] int64: steps T of each."""
    obs: Observations
    """{name: [sum of T + 1, ...]}: the last of an episode is its final observation."""
    actions: Array
    """[sum of T, n]."""
    terminated: Array
    """[sum of T] bool."""

    @classmethod
    def one(cls, steps: Transitions, whole: float) -> Episodes:
        """An episode of T transitions and its return."""
        obs = {n: np.concatenate((a, steps.next_obs[n][-1:])) for n, a in steps.obs.items()}
        lengths = np.array([len(steps.actions)])
        return cls(np.array([whole]), lengths, obs, steps.actions, steps.terminated)

    @classmethod
    def joined(cls, parts: Sequence[Episodes]) -> Episodes:
        """Concatenate episodes."""
        returns, lengths, obs, actions, terminated = zip(*parts, strict=True)
        return cls(
            np.concatenate(returns),
            np.concatenate(lengths),
            {name: np.concatenate([o[name] for o in obs]) for name in obs[0]},
            np.concatenate(actions),
            np.concatenate(terminated),
        )

    def at(self, index: int) -> Episodes:
        """A single one of these episodes."""
        start, length = int(self.lengths[:index].sum()), int(self.lengths[index])
        first, steps = start + index, slice(start, start + length)
        obs = {name: array[first : first + length + 1] for name, array in self.obs.items()}
        one = slice(index, index + 1)
        return Episodes(
            self.returns[one], self.lengths[one], obs, self.actions[steps], self.terminated[steps]
        )

    def sample(self, store: Experience, generator: np.random.Generator, num: int) -> Sample:
        """Sample `num` of these transitions uniformly with replacement; `store` is not used.

        Rewards are 0, since the environment's are not needed.
        """
        ends = np.cumsum(self.lengths)
        steps = generator.integers(0, ends[-1], num)
        episodes = ends.searchsorted(steps, "right")
        here = steps + episodes  # Each earlier episode has one observation more than steps.
        terminated = self.terminated[steps]
        drawn = Transitions(
            {name: array[here] for name, array in self.obs.items()},
            self.actions[steps],
            np.zeros(num, np.float32),
            terminated,
            (steps + 1 == ends[episodes]) & ~terminated,
            {name: array[here + 1] for name, array in self.obs.items()},
        )
        return Sample(drawn, self.returns[episodes])


class IRCR(RewardSource):
    """IRCR, as described in the module's docstring."""

    def __init__(self, config: IRCRConfig, shards: int, device: torch.device) -> None:
        self.config = config
        self._best: Episodes | None = None
        self._low, self._high = 0.0, 0.0
        self._seen: Array = np.zeros(shards, np.int64)
        """Finished episodes of each shard that have been considered."""

    def sample(self, store: Experience, generator: np.random.Generator, size: int) -> Sample:
        """Sample size // 2 from the best episodes, the rest from all episodes of the store."""
        if not store.num_episodes or self._best is None:
            return uniform(store, generator, size)
        return mixture(self._best.sample, finished, 0.5)(store, generator, size)

    def relabel(self, batch: Batch) -> Batch:
        """Rewards in [0, 1]; 0 if returns are unknown or all equal."""
        rewards, span = torch.zeros_like(batch.rewards), self._high - self._low
        if batch.returns is not None and span > 0.0:
            rewards = ((batch.returns - self._low) / span).clamp(0.0, 1.0).float()
        return batch._replace(rewards=rewards)

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        """Update the best episodes and the range of returns with new episodes."""
        finished = [store.num_evicted + store.num_episodes for store in stores]
        if finished != self._seen.tolist():
            for s, store in enumerate(stores):
                first = max(int(self._seen[s]) - store.num_evicted, 0)
                self._admit(store, np.arange(first, store.num_episodes))
            self._seen[:] = finished
            known = [store.returns for store in stores]
            held = np.concatenate([*known, *([self._best.returns] if self._best else [])])
            self._low, self._high = float(held.min()), float(held.max())
        if self._best is None:
            return {}
        return {"train/return_low": self._low, "train/return_high": self._high}

    def _admit(self, store: Experience, new: Array) -> None:
        """Keep the best episodes among the known best and a store's episodes `new` [k]."""
        held = 0 if self._best is None else len(self._best.returns)
        returns = store.returns[new]
        if self._best is not None:
            returns = np.concatenate((self._best.returns, returns))
        chosen = np.sort(best_episodes(returns, self.config.best))
        if not len(chosen) or chosen[-1] < held:
            return
        kept = [] if self._best is None else [self._best.at(i) for i in chosen[chosen < held]]
        taken = [Episodes.one(*store.episode(int(new[i - held]))) for i in chosen[chosen >= held]]
        self._best = Episodes.joined([*kept, *taken])

    def plan(self, env: EnvSpec) -> None:
        """Allocate the maximum for a plan: the best episodes at the maximum length."""
        longest, action = env.max_episode_steps or 0, env.action.array
        obs = {
            name: np.zeros((longest + 1, *spec.shape), spec.dtype)
            for name, spec in env.observations.items()
        }
        actions = np.zeros((longest, *action.shape), action.dtype)
        one = Episodes(np.zeros(1), np.array([longest]), obs, actions, np.zeros(longest, bool))
        self._best = Episodes.joined([one] * self.config.best)

    def state_dict(self) -> Tree:
        best = {} if self._best is None else self._best._asdict()
        return {"low": self._low, "high": self._high, "seen": self._seen.copy(), "best": best}

    def load_state_dict(self, state: Tree) -> None:
        self._low, self._high = float(state["low"]), float(state["high"])
        self._seen[:] = np.asarray(state["seen"])
        best = state["best"]
        self._best = Episodes(**best) if best else None


def best_episodes(returns: Array, num: int) -> Array:
    """Indices of the `num` largest of `returns` [episodes]; of equal ones, the newer."""
    newest_first = np.argsort(-returns[::-1], kind="stable")
    best: Array = len(returns) - 1 - newest_first[:num]
    return best
