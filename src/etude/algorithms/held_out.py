"""A dataset to learn from: its config, what is held out of it, and the part that is learned from.

Some episodes are held out, every n-th in the order of their returns, so that both parts hold good
and bad ones. An episode and the clips that were cut from it are on one side: a test on steps that
were learned from would tell nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, field_validator

from etude.core.contracts import ActionSpec, Array
from etude.core.errors import EtudeError, UsageError
from etude.core.recipe import Config
from etude.core.trees import Tree
from etude.experience.contrast import contrast
from etude.experience.episodes import EpisodeStore, Subsets, Transitions
from etude.experience.episodes_about import read_sources
from etude.experience.episodes_intake import Steps


class DatasetConfig(Config):
    """What is learned from a dataset, and what is kept from it."""

    dataset: str = Field(
        "", description="Folder of a finished dataset to learn from; see `etude data`."
    )
    held_out: float = Field(
        0.1, ge=0, le=0.5, description="Part of a dataset's episodes kept for tests; 0 keeps none."
    )
    allow_equal_returns: bool = Field(
        False, description="Go on with a dataset whose returns teach no reward."
    )

    @field_validator("dataset")
    @classmethod
    def _whole_path(cls, dataset: str) -> str:
        """A run is found again from another folder, and so must be what it learns from."""
        return str(Path(dataset).absolute()) if dataset else dataset

    def schedules(self, progress: float) -> dict[str, float]:
        """The fields that change over a run: none."""
        return {}


def refuse_equal_returns(store: EpisodeStore, held_out: float) -> None:
    """Raise `UsageError` if what is learned from of a dataset cannot teach a reward."""
    kept, _ = split_store(store, held_out)
    found = contrast(store.returns[kept], store.lengths[kept])
    if not found.enough:
        raise UsageError(
            f"{store.path} teaches no reward: {found.reason}, so a constant per step solves the "
            "loss. Add episodes that fail, or clips cut off before the end (etude data import "
            "can add them), or go on regardless with allow_equal_returns."
        )


def split_store(store: EpisodeStore, held_out: float) -> tuple[Array, Array]:
    """`split` of a dataset, with its clips beside what they were cut from."""
    return split(store.returns, held_out, read_sources(store.path, store.num_episodes))


def split(returns: Array, held_out: float, sources: Array | None = None) -> tuple[Array, Array]:
    """Numbers of the episodes to learn from and of those held out, each ascending int64.

    Every n-th in the order of the returns, n = 1 / held_out, beginning in the middle of the
    first n: the same for the same returns, without a random number. Episodes [n] of one of
    `sources` [n] int64 stay together, in the place of their mean return.
    """
    if not held_out:
        return np.arange(len(returns)), np.empty(0, np.int64)
    every = round(1.0 / held_out)
    own = np.arange(len(returns)) if sources is None else sources
    _, place, counts = np.unique(own, return_inverse=True, return_counts=True)
    means = np.bincount(place, returns) / counts
    chosen = np.zeros(len(means), bool)
    chosen[np.argsort(means, kind="stable")[every // 2 :: every]] = True
    return np.flatnonzero(~chosen[place]), np.flatnonzero(chosen[place])


class EpisodesOf:
    """Some episodes of a sealed store, drawn from as the store draws from all."""

    def __init__(
        self, store: EpisodeStore, numbers: Array, action: ActionSpec | None = None
    ) -> None:
        """numbers: [n] int64, counted from the oldest held; the store no longer changes.

        action: what the stored actions are for. Those drawn are then a policy's, in [-1, 1].
        """
        self._store, self.numbers, self._action = store, numbers, action
        self.path, self.time, self.lanes = store.path, store.time, store.lanes
        self.returns, self.lengths = store.returns[numbers], store.lengths[numbers]
        self.num_episodes = len(numbers)
        self.num_transitions = int(self.lengths.sum())
        self._ends: Array = np.cumsum(self.lengths)

    def sample_transitions(self, generator: np.random.Generator, num: int) -> Transitions:
        """`num` transitions, uniform and with replacement."""
        drawn = generator.integers(0, self.num_transitions, num)
        places = self._ends.searchsorted(drawn, "right")
        offsets = drawn - (self._ends - self.lengths)[places]
        return self._in_units(self._store.transitions(self.numbers[places], offsets))

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets:
        drawn = generator.integers(0, self.num_transitions, num_subsets)
        return self.subsets_of(generator, self._ends.searchsorted(drawn, "right"), num_steps)

    def subsets_of(
        self, generator: np.random.Generator, episodes: Array, num_steps: int
    ) -> Subsets:
        """The same from given ones of these episodes [subsets], counted among them."""
        drawn = self._store.subsets_of(generator, self.numbers[episodes], num_steps)
        return drawn._replace(steps=self._in_units(drawn.steps))

    def episode(self, number: int) -> tuple[Transitions, float]:
        """One of these episodes, counted among them: its T transitions, its return."""
        steps, whole = self._store.episode(int(self.numbers[number]))
        return self._in_units(steps), whole

    def _in_units(self, steps: Transitions) -> Transitions:
        if self._action is not None:
            self._action.from_env(steps.actions)
        return steps

    def append(self, fragments: Sequence[Steps]) -> None:
        """Refused: a dataset is finished."""
        raise EtudeError(f"{self.path} cannot be appended to: it is sealed.")

    def delete_garbage(self, needed_by: Sequence[Tree]) -> list[Path]:
        """A finished dataset is nobody's to delete."""
        return []

    def state_dict(self) -> Tree:
        """The dataset's hash, and that of the choice of its episodes: neither grows with it."""
        chosen = hashlib.sha256(self.numbers.astype("<i8").tobytes()).hexdigest()
        return {**self._store.state_dict(), "episodes_sha256": chosen}

    def load_state_dict(self, state: Tree) -> None:
        """Refuses a state that was learned from other data, or from other episodes of it."""
        self._store.load_state_dict(state)
        if state.get("episodes_sha256") != self.state_dict()["episodes_sha256"]:
            raise EtudeError(
                f"This run held out other episodes of {self.path}: resume it with its own "
                "held_out, and with the about.json the dataset had."
            )

    def close(self) -> None:
        self._store.close()
