"""Chosen episodes of a sealed store, drawn from as the store draws from all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from etude.core.contracts import ActionSpec, Array, Fragment
from etude.core.errors import EtudeError
from etude.core.trees import Tree
from etude.experience.store.episodes import EpisodeStore, Subsets, Transitions
from etude.experience.store.sampling import choose


class EpisodesOf:
    """Episodes of a sealed store, whole ones before clips of them."""

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
