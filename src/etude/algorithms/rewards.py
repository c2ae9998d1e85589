"""Where rewards come from: those of replayed experience, and those of fresh experience."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field

from etude.core.contracts import Array, BatchMetrics, Fragment, Observations
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.core.trees import Tree
from etude.experience.store.episodes import Subsets, Transitions
from etude.planning.kinds import RewardsConfig
from etude.planning.resolve import Resolved


class Experience(Protocol):
    """What is drawn from: a shard's `EpisodeStore`, or some episodes of a dataset."""

    @property
    def time(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def num_transitions(self) -> int: ...
    @property
    def num_episodes(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def returns(self) -> Array: ...
    @property
    def lengths(self) -> Array: ...

    def sample_transitions(self, generator: np.random.Generator, num: int) -> Transitions: ...

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets: ...

    def episode(self, number: int) -> tuple[Transitions, float]: ...


class Batch(NamedTuple):
    """Replayed transitions as tensors on the learner's device, observations raw."""

    obs: dict[str, torch.Tensor]
    """{name: [n, ...]}."""
    actions: torch.Tensor
    """[n, dims]."""
    rewards: torch.Tensor
    """[n] float32: what the reward source says each step was worth."""
    terminated: torch.Tensor
    """[n] bool: the future is worth nothing. A truncated step's future is worth its value."""
    next_obs: dict[str, torch.Tensor]
    """{name: [n, ...]}: what the step led to, before any reset."""

    @classmethod
    def of(cls, steps: Transitions, rewards: torch.Tensor, device: torch.device) -> Batch:
        """The transitions with these rewards in place of those they were stored with."""

        def put(arrays: Observations) -> dict[str, torch.Tensor]:
            return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

        return cls(
            put(steps.obs),
            torch.from_numpy(steps.actions).to(device),
            rewards.to(device),
            torch.from_numpy(steps.terminated).to(device),
            put(steps.next_obs),
        )

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Batch:
        """All transitions of some batches, in their order."""

        def named(each: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            return {name: torch.cat([obs[name] for obs in each]) for name in each[0]}

        obs, actions, rewards, terminated, next_obs = zip(*parts, strict=True)
        rest = (torch.cat(actions), torch.cat(rewards), torch.cat(terminated))
        return cls(named(obs), *rest, named(next_obs))


class RewardSource(Protocol):
    """Draws what an off-policy learner learns from, and says what each step was worth.

    Learned rewards replace stored ones when a batch is drawn; they are never written back.
    """

    def batch(self, store: Experience, generator: np.random.Generator, size: int) -> Batch:
        """`size` transitions of one shard's store."""
        ...

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        """One gradient step of whatever is learned here, over all shards in their order."""
        ...

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


class GivenConfig(RewardsConfig):
    """The environment's own rewards."""

    kind: Literal["given"] = Field("given", description="As the environment gives them.")

    @property
    def uses_stored(self) -> bool:
        return True

    def for_rollouts(
        self, run: Resolved, key: Key | None, device: torch.device, ranks: Ranks = ALONE
    ) -> OnPolicyGiven:
        return GIVEN

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> GivenRewards:
        return GivenRewards(device)


class GivenRewards:
    """The rewards the environment gave."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def batch(self, store: Experience, generator: np.random.Generator, size: int) -> Batch:
        steps = store.sample_transitions(generator, size)
        return Batch.of(steps, torch.from_numpy(steps.rewards), self._device)

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        return {}

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        pass


class OnPolicyRewards(Protocol):
    """Says what each step of fresh experience was worth, and may learn from it.

    Rewards come before anything that is made of them: scaling, returns, advantages.
    """

    def rewards(self, parts: Sequence[Fragment]) -> tuple[list[Array], dict[str, float]]:
        """Rewards [rows, steps] float32 of every shard's fragment; and metrics about them."""
        ...

    def update(self, key: Key) -> Iterator[BatchMetrics]:
        """Learn from the fragments `rewards` was last given, one gradient step at a time."""
        ...

    def gather(self) -> None:
        """Brings the other ranks' parts of the state here; all ranks call it together."""
        ...

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


class OnPolicyGiven:
    """The rewards the environment gave."""

    def rewards(self, parts: Sequence[Fragment]) -> tuple[list[Array], dict[str, float]]:
        return [part.rewards for part in parts], {}

    def update(self, key: Key) -> Iterator[BatchMetrics]:
        return iter(())

    def gather(self) -> None:
        pass

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        pass


GIVEN = OnPolicyGiven()
