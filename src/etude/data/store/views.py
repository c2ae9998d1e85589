"""Minibatches of some episodes of a sealed dataset, with the vectors of their tasks.

The vector of a task is its sentence's embedding if the dataset has embeddings (`etude data
add-embeddings`), otherwise a one-hot of the sentence among all different ones, sorted. It is not
stored with steps.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from etude.core.contracts import ActionSpec, Array, ArraySpec, Fragment, Observations
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.data.sentences import TASK, quoted
from etude.data.store.geometry import OBS, StoreGeometry
from etude.data.store.manifest import (
    Dataset,
    Episodes,
    aligned,
    geometry_of,
    num_excluded,
    open_episodes,
    shards_of,
    table_of,
)
from etude.data.store.sampling import (
    EpisodeSearch,
    MultiStep,
    Subsets,
    Transitions,
    choose,
    read_multi_step,
)
from etude.runs.file_system import AlreadyLocked, FolderLock


class Windows(NamedTuple):
    """Observations around steps, and the actions that follow."""

    obs: Observations
    """{name: [n, past + 1 + ahead, ...]}: before and after a step; before an episode's first step
    its first observation, after its last step its last."""
    actions: Array
    """[n, actions, dims]: from the step on; after an episode's last action, that action again."""
    valid: Array
    """[n, actions] bool: the action belongs to the episode."""


class EpisodesOf:
    """Episodes of a sealed dataset: whole ones, then clips of them."""

    def __init__(
        self,
        store: Episodes,
        numbers: Array,
        action: ActionSpec | None = None,
        lengths: Array | None = None,
    ) -> None:
        """numbers: [n] int64, of the episodes in the dataset.

        action: the action space of the stored actions, which are then scaled to [-1, 1].
        lengths: [n] int64, the number of first steps that each has; None for all steps.
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
        self.num_evicted = 0  # a replay store has this too
        self._ends: Array = np.cumsum(self.lengths)
        self._whole = np.flatnonzero(~self._is_clip)
        edges = np.append(0, np.cumsum(self.lengths[self._whole]))
        self._whole_starts: Array = edges[:-1]
        self._find, self._find_whole = EpisodeSearch(self._ends), EpisodeSearch(edges[1:])
        self.num_transitions = int(self.lengths[self._whole].sum())

    @property
    def num_whole(self) -> int:
        """Number of episodes that are not clips."""
        return self.num_episodes - self.num_clips

    @property
    def groups(self) -> Array:
        """[n] int64: episodes that share steps have the same number."""
        found: Array = self._store.labels.groups[self.numbers]
        return found

    @property
    def successes(self) -> list[bool | None]:
        """[n]: None if unknown, and for clips, which lack the end."""
        labels = self._store.labels
        known = [
            None if kind == "clip" else success
            for kind, success in zip(labels.kinds, labels.successes, strict=True)
        ]
        pairs = zip(self.numbers.tolist(), self._is_clip.tolist(), strict=True)
        return [None if is_clip else known[number] for number, is_clip in pairs]

    def rewards(self, number: int) -> Array:
        """The stored rewards of an episode, [T] float64."""
        length = int(self.lengths[number])
        places = np.full(length, self.numbers[number])
        return self._store.column("rewards", places, np.arange(length)).astype(np.float64)

    def part(self, chosen: slice) -> EpisodesOf:
        """A slice of these episodes."""
        return EpisodesOf(self._store, self.numbers[chosen], self._action, self.lengths[chosen])

    def sample_transitions(self, generator: np.random.Generator, num: int) -> Transitions:
        """Draw `num` transitions of whole episodes, uniformly and with replacement."""
        return self._steps(*self._draw(generator, num))

    def sample_multi_step(
        self, generator: np.random.Generator, num: int, num_steps: int
    ) -> MultiStep:
        """Draw like `sample_transitions`, each with the up to `num_steps` - 1 steps after it."""
        places, offsets = self._draw(generator, num)
        numbers, lengths = self.numbers[places], self.lengths[places]
        found = read_multi_step(self._store, numbers, offsets, lengths, num_steps)
        if self._action is not None:
            self._action.from_env(found.steps.actions)
        return found

    def _draw(self, generator: np.random.Generator, num: int) -> tuple[Array, Array]:
        """Draw places [num] and offsets [num] of steps of whole episodes."""
        drawn = generator.integers(0, self.num_transitions, num)
        among = self._find_whole.find(drawn)
        return self._whole[among] if self.num_clips else among, drawn - self._whole_starts[among]

    def sample_windows(
        self,
        generator: np.random.Generator,
        num: int,
        names: Collection[str],
        past: int,
        ahead: int,
        actions: int,
    ) -> Windows:
        """Draw windows around `num` steps of whole episodes, uniformly and with replacement.

        names: observations to read. past, ahead: number of observations before and after that of
        the step. actions: number of actions from the step on.
        """
        return self.windows(*self._draw(generator, num), names, past, ahead, actions)

    def windows(
        self,
        places: Array,
        offsets: Array,
        names: Collection[str],
        past: int,
        ahead: int,
        actions: int,
    ) -> Windows:
        """Windows around the steps `offsets` [n] of the episodes `places` [n]."""
        last = self.lengths[places][:, None] - 1

        def columns(fields: Collection[str], steps: Array) -> dict[str, Array]:
            at = np.clip(steps, 0, last)
            of = self.numbers[places].repeat(at.shape[1])
            found = self._store.columns(fields, of, at.reshape(-1))
            return {name: x.reshape(*at.shape, *x.shape[1:]) for name, x in found.items()}

        seen = columns(
            [OBS + name for name in names], offsets[:, None] + np.arange(-past, ahead + 1)
        )
        steps = offsets[:, None] + np.arange(actions)
        taken = np.ascontiguousarray(columns(["actions"], steps)["actions"])
        if self._action is not None:
            self._action.from_env(taken.reshape(-1, *taken.shape[2:]))
        obs = {name: np.ascontiguousarray(seen[OBS + name]) for name in names}
        return Windows(obs, taken, steps <= last)

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets:
        drawn = generator.integers(0, self._ends[-1], num_subsets)
        return self.subsets_of(generator, self._find.find(drawn), num_steps)

    def subsets_of(
        self, generator: np.random.Generator, episodes: Array, num_steps: int
    ) -> Subsets:
        """Draw subsets from given ones of these episodes, `episodes` [subsets]."""
        lengths = self.lengths[episodes]
        offsets = choose(generator, lengths, num_steps)
        steps = self._steps(episodes.repeat(num_steps), offsets.reshape(-1))
        return Subsets(steps.folded(offsets.shape), self.returns[episodes], lengths)

    def episode(self, number: int) -> tuple[Transitions, float]:
        """One of these episodes: its T transitions and its return."""
        length = int(self.lengths[number])
        steps = self._steps(np.full(length, number), np.arange(length))
        return steps, float(self.returns[number])

    def _steps(self, places: Array, offsets: Array) -> Transitions:
        """Steps `offsets` [n] of the episodes `places` [n] among these."""
        steps = self._store.transitions(self.numbers[places], offsets)
        if self.num_clips:
            steps.truncated[self._is_clip[places] & (offsets == self.lengths[places] - 1)] = True
        if self._action is not None:
            self._action.from_env(steps.actions)
        return steps

    def sample_observations(
        self, generator: np.random.Generator, num: int, names: Collection[str]
    ) -> Observations:
        """Draw like `sample_transitions`, but read only some observations, {name: [num, ...]}."""
        places, offsets = self._draw(generator, num)
        fields = [OBS + name for name in names]
        found = self._store.columns(fields, self.numbers[places], offsets)
        return {name: np.ascontiguousarray(found[OBS + name]) for name in names}

    def sample_actions(self, generator: np.random.Generator, num: int) -> Array:
        """Draw like `sample_transitions`, but read only the stored actions, [num, n]."""
        places, offsets = self._draw(generator, num)
        return self._store.column("actions", self.numbers[places], offsets)

    def append(self, fragments: Sequence[Fragment]) -> None:
        """Refuse: a dataset never changes."""
        raise EtudeError(f"{self.path} cannot be appended to: it is sealed.")

    def delete_garbage(self, needed_by: Sequence[Tree]) -> list[Path]:
        """Delete nothing: a dataset never changes."""
        return []

    def check_unchanged(self) -> None:
        """Raise if a file of the dataset that is in use was changed."""
        self._store.check_unchanged()

    def state_dict(self) -> Tree:
        """The hash of the dataset, and that of the choice of episodes."""
        chosen = hashlib.sha256(self.numbers.astype("<i8").tobytes())
        if self.num_clips:
            chosen.update(self.lengths.astype("<i8").tobytes())
        return {**self._store.state_dict(), "episodes_sha256": chosen.hexdigest()}

    def load_state_dict(self, state: Tree) -> None:
        """Refuse the state of a run on other data or on other episodes."""
        self._store.load_state_dict(state)
        if state.get("episodes_sha256") != self.state_dict()["episodes_sha256"]:
            raise EtudeError(
                f"This run held out other episodes of {self.path}: resume it with its own "
                "held_out and add_truncated."
            )

    def close(self) -> None:
        self._store.close()


def _sums(store: Episodes, episodes: Array, steps: Array) -> Array:
    """[n] float64: sums of the rewards of the first `steps` [n] of `episodes` [n], in order."""
    if not len(episodes):
        return np.empty(0)
    ends, of = np.cumsum(steps), np.arange(len(episodes)).repeat(steps)
    offsets = np.arange(ends[-1]) - (ends - steps)[of]
    return np.bincount(of, store.column("rewards", episodes[of], offsets))


_MAX_HOT = 4_096
"""Largest size of a one-hot."""


class DatasetWithTask(Dataset):
    """A dataset whose steps also have the observation "task"."""

    def __init__(self, data: Episodes) -> None:
        super().__init__(data.path, shards_of(data), table_of(data), data.labels, data.seal_sha256)
        self.num_excluded = num_excluded(data)
        sentences, self._vectors = _embedded(data)
        """[sentences, n] float32."""
        place = {sentence: number for number, sentence in enumerate(sentences)}
        self._tasks: Array = np.array([place[task] for task in data.labels.tasks], np.int64)
        """[episodes]: the number of the sentence."""
        self.sentences = dict(zip(sentences, map(tuple, self._vectors.tolist()), strict=True))
        """{sentence: vector}."""

    @cached_property
    def geometry(self) -> StoreGeometry:
        return _with_task(super().geometry, ArraySpec(self._vectors.shape[1:]))

    def columns(self, names: Collection[str], places: Array, offsets: Array) -> dict[str, Array]:
        stored = [name for name in names if name != OBS + TASK]
        found = super().columns(stored, places, offsets) if stored else {}
        if len(stored) < len(names):
            found = {**found, OBS + TASK: self._task_vectors(places)}
        return found

    def transitions(
        self, places: Array, offsets: Array, counts: Array | None = None
    ) -> Transitions:
        steps = super().transitions(places, offsets, counts)
        task = self._task_vectors(places)
        return steps._replace(
            obs={**steps.obs, TASK: task}, next_obs={**steps.next_obs, TASK: task}
        )

    def _task_vectors(self, places: Array) -> Array:
        """[n, size] float32: the vectors of the tasks of the episodes `places` [n]."""
        found = aligned(len(places), self._vectors)
        np.take(self._vectors, self._tasks[places], axis=0, out=found)
        return found


def open_with_task(path: Path, reads: Collection[str]) -> Episodes:
    """Open a dataset to learn from, with the observation "task" if it is read and not stored with
    the steps. Its excluded episodes do not change until it is closed."""
    data = open_episodes(path, reads)
    lock = _lock_for_reading(path)
    if TASK in reads and TASK not in data.geometry.specs:
        data = DatasetWithTask(data)
    data.release = lock.release
    weakref.finalize(data, lock.release)
    return data


def _lock_for_reading(path: Path) -> FolderLock:
    """Keep other processes from excluding episodes of a dataset while it is learned from."""
    try:
        return FolderLock(path, shared=True)
    except AlreadyLocked as error:
        raise UsageError(
            f"{path} is being changed by another process: start again when that has finished."
        ) from error


def geometry_with_task(path: Path) -> StoreGeometry:
    """The fields of a dataset, with the observation "task" if there are several tasks or
    embeddings of them."""
    geometry = geometry_of(path)
    if TASK in geometry.observations:
        return geometry
    data = open_episodes(path, ())
    labels = data.labels
    data.close()
    if len(set(labels.tasks)) < 2 and not labels.embeddings:
        return geometry
    return _with_task(geometry, ArraySpec(_embedded(data)[1].shape[1:]))


def sentences_of(path: Path) -> dict[str, tuple[float, ...]]:
    """{sentence: vector} of a dataset, for policies that take their task as an observation."""
    data = open_episodes(path, ())
    data.close()
    sentences, vectors = _embedded(data)
    return dict(zip(sentences, map(tuple, vectors.tolist()), strict=True))


def sentences_in(data: Episodes) -> dict[str, tuple[float, ...]]:
    """{sentence: vector} of an open dataset; {} if it is read without its tasks."""
    return data.sentences if isinstance(data, DatasetWithTask) else {}


def _embedded(data: Episodes) -> tuple[list[str], Array]:
    """Sorted sentences and their vectors [sentences, n] float32."""
    labels = data.labels
    distinct = sorted(set(labels.tasks))
    if not labels.embeddings:
        if len(distinct) > _MAX_HOT:
            raise UsageError(
                f"{data.path} has {len(distinct):,} different tasks, too many for a one-hot: give "
                "their embeddings with `etude data add-embeddings`."
            )
        return distinct, np.eye(len(distinct), dtype=np.float32)
    if lacking := [task for task in distinct if task not in labels.embeddings]:
        raise UsageError(
            f"{data.path} has no embedding of {quoted(lacking)}: give it with "
            "`etude data add-embeddings`."
        )
    sentences = sorted(labels.embeddings)
    return sentences, np.array([labels.embeddings[each] for each in sentences], np.float32)


def _with_task(geometry: StoreGeometry, spec: ArraySpec) -> StoreGeometry:
    return replace(geometry, specs={**geometry.specs, OBS + TASK: spec})
