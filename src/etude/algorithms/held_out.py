"""A dataset to learn from: its config, what is held out of it, and the part that is learned from.

An episode and the clips that were cut from it are on one side: a test on steps that were learned
from would tell nothing. Clips that the dataset holds are kept with their source by its labels;
clips that are added here are views of an episode and take no room.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, field_validator

from etude.core.contracts import ActionSpec, Array, Fragment
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.experience.contrast import contrast, draw_clips
from etude.experience.store.episodes import EpisodeStore, Subsets, Transitions
from etude.experience.store.sampling import choose
from etude.planning.kinds import AlgorithmConfig


class DatasetConfig(AlgorithmConfig):
    """What is learned from a dataset, and what is kept from it."""

    dataset: str = Field(
        "", description="Folder of a finished dataset to learn from; see `etude data`."
    )
    held_out: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="Fraction of a dataset's episodes that are held out for evaluation.",
    )
    add_truncated: int | None = Field(
        None,
        ge=0,
        description="Clips (episodes cut short) that are added to learn a reward from. None adds "
        "one per episode if all returns of the dataset are equal, otherwise no clips.",
    )
    allow_equal_returns: bool = Field(
        False, description="Allow a dataset whose returns are too alike to learn a reward from."
    )

    @field_validator("dataset")
    @classmethod
    def _whole_path(cls, dataset: str) -> str:
        """A run is found again from another folder, and so must be what it learns from."""
        return str(Path(dataset).absolute()) if dataset else dataset


def split_store(
    store: EpisodeStore,
    config: DatasetConfig,
    action: ActionSpec | None = None,
    for_reward: bool = True,
    with_clips: bool = True,
) -> tuple[EpisodesOf, EpisodesOf]:
    """The episodes to learn from and those held out; a reward may also be learned from clips.

    action: what the stored actions are for, see `EpisodesOf`. A dataset that cannot teach a
    reward is refused where one is to be learned.
    """
    kept, held_out = split(store.returns, config.held_out, store.labels.groups)
    if not for_reward:
        return EpisodesOf(store, kept, action), EpisodesOf(store, held_out, action)
    if unknown := store.labels.num_unrewarded:
        raise UsageError(
            f"{store.path} has no rewards for {unknown:,} of its {store.num_episodes:,} episodes, "
            "and a reward is learned from returns: import files with rewards, or say that the "
            "episodes succeeded (etude data import --assume-success --success-reward 1)."
        )
    clips, steps = _clips(store, config if with_clips else None)
    sides = []
    for side in (kept, held_out):
        among = np.isin(clips, side)
        numbers = np.concatenate((side, clips[among]))
        lengths = np.concatenate((store.lengths[side], steps[among]))
        sides.append(EpisodesOf(store, numbers, action, lengths))
    found = contrast(sides[0].returns, sides[0].lengths)
    if not found.enough and not config.allow_equal_returns:
        raise UsageError(
            f"{store.path} teaches no reward: {found.reason}, so a constant per step solves the "
            "loss. Add episodes that fail (etude data record makes some), or go on regardless "
            "with allow_equal_returns."
        )
    return sides[0], sides[1]


def _clips(store: EpisodeStore, config: DatasetConfig | None) -> tuple[Array, Array]:
    """Episodes [clips] int64 and first steps [clips] of the clips that are added; None adds none.

    They are the same for the same dataset. Where every return is 0, or every step is rewarded
    alike, clips would not differ either, and `split_store` refuses.
    """
    num = 0 if config is None else config.add_truncated
    if config is not None and num is None:
        returns, lengths = store.returns, store.lengths
        equal = not config.allow_equal_returns and not contrast(returns, lengths).enough
        num = store.num_episodes if equal else 0
    return draw_clips(store.lengths, num or 0, Key(0))


def split(returns: Array, held_out: float, groups: Array | None = None) -> tuple[Array, Array]:
    """Numbers of the episodes to learn from and of those held out, each ascending int64.

    Episodes [n] of one of `groups` [n] int64 share steps and stay together; without groups each
    episode is on its own. The part `held_out` of all groups is taken, but at least one, and at
    least one is left. They are evenly spaced in the order of their mean returns, so that both
    sides hold good and bad ones. The same returns give the same sides, without a random number.
    """
    groups = np.arange(len(returns)) if groups is None else groups
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    total = len(counts)
    num = min(max(round(held_out * total), 1), total - 1) if held_out else 0
    means = np.bincount(place, returns, total) / counts
    chosen = np.zeros(total, bool)
    middles = (np.arange(num) + 0.5) * total / max(num, 1)
    chosen[np.argsort(means, kind="stable")[middles.astype(np.int64)]] = True
    return np.flatnonzero(~chosen[place]), np.flatnonzero(chosen[place])


class EpisodesOf:
    """Some episodes of a sealed store and clips of them, drawn from as the store draws from all."""

    def __init__(
        self,
        store: EpisodeStore,
        numbers: Array,
        action: ActionSpec | None = None,
        lengths: Array | None = None,
    ) -> None:
        """numbers: [n] int64, counted from the oldest held; the store no longer changes.

        action: what the stored actions are for. Those drawn are then a policy's, in [-1, 1].
        lengths: [n] int64, how many of its first steps each has; None for all of them.
        """
        self._store, self.numbers, self._action = store, numbers, action
        self.path, self.time, self.lanes = store.path, store.time, store.lanes
        whole = store.lengths[numbers]
        self.lengths: Array = whole if lengths is None else lengths
        """[n]: steps of each episode or clip."""
        self._is_clip = self.lengths < whole
        clips = np.flatnonzero(self._is_clip)
        self.returns: Array = store.returns[numbers]
        self.returns[clips] = _sums(store, numbers[clips], self.lengths[clips])
        self.num_episodes, self.num_clips = len(numbers), len(clips)
        self.num_evicted = 0  # as a store that still grows counts them
        self._ends: Array = np.cumsum(self.lengths)
        self._whole = np.flatnonzero(~self._is_clip)
        self._whole_ends: Array = np.cumsum(self.lengths[self._whole])
        self.num_transitions = int(self.lengths[self._whole].sum())

    @property
    def num_whole(self) -> int:
        """Episodes that are not clips."""
        return self.num_episodes - self.num_clips

    def part(self, chosen: slice) -> EpisodesOf:
        """Some of these."""
        return EpisodesOf(self._store, self.numbers[chosen], self._action, self.lengths[chosen])

    def sample_transitions(self, generator: np.random.Generator, num: int) -> Transitions:
        """`num` transitions, uniform and with replacement; a clip adds none to its episode's."""
        return self._steps(*self._draw(generator, num))

    def _draw(self, generator: np.random.Generator, num: int) -> tuple[Array, Array]:
        """Places [num] and offsets [num] of steps of whole episodes."""
        drawn = generator.integers(0, self.num_transitions, num)
        among = self._whole_ends.searchsorted(drawn, "right")
        places: Array = self._whole[among]
        return places, drawn - (self._whole_ends[among] - self.lengths[places])

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets:
        drawn = generator.integers(0, self._ends[-1], num_subsets)
        return self.subsets_of(generator, self._ends.searchsorted(drawn, "right"), num_steps)

    def subsets_of(
        self, generator: np.random.Generator, episodes: Array, num_steps: int
    ) -> Subsets:
        """The same from given ones of these episodes [subsets], counted among them."""
        lengths = self.lengths[episodes]
        offsets = choose(generator, lengths, num_steps)
        steps = self._steps(episodes.repeat(num_steps), offsets.reshape(-1))
        return Subsets(steps.folded(offsets.shape), self.returns[episodes], lengths)

    def episode(self, number: int) -> tuple[Transitions, float]:
        """One of these episodes, counted among them: its T transitions, its return."""
        length = int(self.lengths[number])
        steps = self._steps(np.full(length, number), np.arange(length))
        return steps, float(self.returns[number])

    def _steps(self, places: Array, offsets: Array) -> Transitions:
        """Steps `offsets` [n] of the episodes `places` [n], counted among these."""
        steps = self._store.transitions(self.numbers[places], offsets)
        steps.truncated[self._is_clip[places] & (offsets == self.lengths[places] - 1)] = True
        if self._action is not None:
            self._action.from_env(steps.actions)
        return steps

    def sample_actions(self, generator: np.random.Generator, num: int) -> Array:
        """Stored actions of `num` transitions, [num, n]; nothing else is read of them."""
        places, offsets = self._draw(generator, num)
        return self._store.column("actions", self.numbers[places], offsets)

    def append(self, fragments: Sequence[Fragment]) -> None:
        """Refused: a dataset is finished."""
        raise EtudeError(f"{self.path} cannot be appended to: it is sealed.")

    def delete_garbage(self, needed_by: Sequence[Tree]) -> list[Path]:
        """A finished dataset is nobody's to delete."""
        return []

    def state_dict(self) -> Tree:
        """The dataset's hash, and that of the choice of its episodes: neither grows with it."""
        chosen = hashlib.sha256(self.numbers.astype("<i8").tobytes())
        if self.num_clips:
            chosen.update(self.lengths.astype("<i8").tobytes())
        return {**self._store.state_dict(), "episodes_sha256": chosen.hexdigest()}

    def load_state_dict(self, state: Tree) -> None:
        """Refuses a state that was learned from other data, or from other episodes of it."""
        self._store.load_state_dict(state)
        if state.get("episodes_sha256") != self.state_dict()["episodes_sha256"]:
            raise EtudeError(
                f"This run held out other episodes of {self.path}: resume it with its own "
                "held_out and add_truncated."
            )

    def close(self) -> None:
        self._store.close()


def _sums(store: EpisodeStore, episodes: Array, steps: Array) -> Array:
    """[n] float64: what the first `steps` [n] of `episodes` [n] earn, added in their order."""
    if not len(episodes):
        return np.empty(0)
    ends, of = np.cumsum(steps), np.arange(len(episodes)).repeat(steps)
    offsets = np.arange(ends[-1]) - (ends - steps)[of]
    return np.bincount(of, store.column("rewards", episodes[of], offsets))
