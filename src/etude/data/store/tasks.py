"""The task of an episode as an observation: the vector of its sentence.

The vector is the sentence's embedding if the dataset has embeddings (`etude data add-embeddings`),
otherwise a one-hot of the sentence among all different ones, sorted. It is not stored with steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import UsageError
from etude.data.sentences import TASK, quoted
from etude.data.store.geometry import OBS, StoreGeometry
from etude.data.store.manifest import (
    Dataset,
    Episodes,
    aligned,
    geometry_of,
    open_episodes,
    shards_of,
    table_of,
)
from etude.data.store.sampling import Transitions

_MAX_HOT = 4_096
"""Largest size of a one-hot."""


class DatasetWithTask(Dataset):
    """A dataset whose steps also have the observation "task"."""

    def __init__(self, data: Episodes) -> None:
        super().__init__(data.path, shards_of(data), table_of(data), data.labels, data.seal_sha256)
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

    def transitions(self, places: Array, offsets: Array) -> Transitions:
        steps = super().transitions(places, offsets)
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
    """Open a dataset, with the observation "task" if it is read and not stored with the steps."""
    data = open_episodes(path, reads)
    return DatasetWithTask(data) if TASK in reads and TASK not in data.geometry.specs else data


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
