"""Labels of a dataset's episodes: name, kind, group, success, task.

`labels.json` has one value per episode in every column. `sealed.json` has its SHA-256, so that a
missing or changed table is damage: the split into training and held-out episodes depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.data.store.log import DamagedStore

LABELS = "labels.json"
MAX_EMBEDDING = 1 << 14
"""Largest size of the vector of a sentence."""
_LARGEST = float(np.finfo(np.float32).max)
_COLUMNS: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: type(value) is str,
    "kind": lambda value: type(value) is str,
    "group": lambda value: type(value) is int,
    "success": lambda value: value is None or type(value) is bool,
    "rewarded": lambda value: type(value) is bool,
    "task": lambda value: type(value) is int,
}


@dataclass(frozen=True)
class Labels:
    """The columns of the table, one value per episode in each."""

    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """"whole", "clip", or how a recorded episode came about."""
    sources: list[int] = field(default_factory=list)
    """The number of the episode from which a clip was cut; other episodes have their own."""
    successes: list[bool | None] = field(default_factory=list)
    """None if unknown."""
    rewarded: list[bool] = field(default_factory=list)
    """False if the rewards are unknown, and stored as zeros."""
    tasks: list[str] = field(default_factory=list)
    """The task in words; "" if unknown."""
    embeddings: dict[str, list[float]] = field(default_factory=dict)
    """{sentence: vector}, all of one size: embeddings of the tasks, and possibly of other
    sentences, by a frozen text encoder; {} without any."""

    def add(
        self,
        name: str,
        kind: str = "whole",
        source: int | None = None,
        success: bool | None = None,
        rewarded: bool = True,
        task: str = "",
    ) -> None:
        """Append the next episode; source: the episode from which it was cut, if any."""
        self.sources.append(len(self.names) if source is None else source)
        self.names.append(name)
        self.kinds.append(kind)
        self.successes.append(success)
        self.rewarded.append(rewarded)
        self.tasks.append(task)

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def unknown(cls, num_episodes: int) -> Labels:
        """Labels of episodes without any information."""
        labels = cls()
        for number in range(num_episodes):
            labels.add(f"episode {number}")
        return labels

    def extend(self, other: Labels, numbers: Sequence[int], groups: Sequence[int]) -> None:
        """Append episodes of another table, by their `numbers` there and `groups` here, and its
        embeddings."""
        self.embed(other.embeddings)
        for number, group in zip(numbers, groups, strict=True):
            self.add(
                other.names[number],
                other.kinds[number],
                group,
                other.successes[number],
                other.rewarded[number],
                other.tasks[number],
            )

    def embed(self, embeddings: Mapping[str, list[float]]) -> None:
        """Add vectors of sentences; refuses a second, different vector of a sentence."""
        size = {len(vector) for vector in {**self.embeddings, **embeddings}.values()}
        if len(size) > 1:
            raise UsageError(
                f"The embeddings of tasks have {' and '.join(map(str, sorted(size)))} numbers: "
                "make them all with one encoder."
            )
        for sentence, vector in embeddings.items():
            if self.embeddings.setdefault(sentence, vector) != vector:
                raise UsageError(
                    f"The task '{sentence}' has two different embeddings: make them all with one "
                    "encoder."
                )

    @property
    def groups(self) -> Array:
        """[episodes] int64: episodes with the same number share steps."""
        return np.array(self.sources, np.int64)

    @property
    def num_unrewarded(self) -> int:
        return len(self) - sum(self.rewarded)

    @property
    def num_successes(self) -> int | None:
        """None if the success of an episode is unknown."""
        return None if None in self.successes else sum(map(bool, self.successes))

    def to_json(self) -> Tree:
        """As JSON, with each sentence once and its number in the episodes."""
        sentences = {task: number for number, task in enumerate(dict.fromkeys(self.tasks))}
        return {
            "format": 1,
            "sentences": list(sentences),
            "name": self.names,
            "kind": self.kinds,
            "group": self.sources,
            "success": self.successes,
            "rewarded": self.rewarded,
            "task": [sentences[task] for task in self.tasks],
            **({"embeddings": self.embeddings} if self.embeddings else {}),
        }

    @classmethod
    def parse(cls, document: Any, num_episodes: int, path: Path) -> Labels:
        """The labels in an untrusted document from `path`; raises `DamagedStore`."""
        sentences = document.get("sentences")
        if document.get("format") != 1 or not isinstance(sentences, list):
            raise DamagedStore(path, "does not describe the episodes of a dataset")
        if not all(type(sentence) is str for sentence in sentences):
            raise DamagedStore(path, "has tasks that are not sentences")
        columns = {name: document.get(name) for name in _COLUMNS}
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != num_episodes:
                raise DamagedStore(path, f"does not have one '{name}' for every episode")
            if not all(map(_COLUMNS[name], column)):
                raise DamagedStore(path, f"has a '{name}' of the wrong type")
        groups, tasks = columns["group"], columns["task"]
        if not all(0 <= g <= i and groups[g] == g for i, g in enumerate(groups)):
            raise DamagedStore(path, "has a group that does not begin with its own episode")
        if not all(0 <= task < len(sentences) for task in tasks):
            raise DamagedStore(path, "has a task number without a sentence")
        columns["task"] = [sentences[task] for task in tasks]
        embeddings = document.get("embeddings", {})
        if not isinstance(embeddings, dict) or not all(map(_is_vector, embeddings.values())):
            raise DamagedStore(path, "has embeddings that are not vectors")
        if len({len(vector) for vector in embeddings.values()}) > 1:
            raise DamagedStore(path, "has embeddings of different sizes")
        labels = cls(*columns.values())
        labels.embeddings.update(embeddings)
        return labels


def _is_vector(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_EMBEDDING:
        return False
    return all(type(x) in (int, float) and abs(x) <= _LARGEST for x in value)
