"""What the app must know of a kind of algorithm: its loops, its parts, and its lines in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from etude.core.clock import Clock, Nest
from etude.core.contracts import Algorithm, Collector, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.planning.recipe import Recipe
from etude.runs.folder import RunFolder
from etude.training.evaluation import Tester


class Deployable(Protocol):
    """What a checkpoint's `policy/` is made from."""

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def contract(self) -> Tree: ...


class World(NamedTuple):
    """What a run learns from, looked at before it starts."""

    spec: EnvSpec
    exactness: Exactness
    deployed: Deployable
    """On the meta device."""
    snapshot: Tree
    """One group's; {} where nothing is collected."""
    num_groups: int
    test_episodes: int
    """Of one evaluation."""


class Assembly(NamedTuple):
    """The parts of a run that depend on what it learns, and from what."""

    algorithm: Algorithm
    collector: Collector
    evaluator: Tester
    spec: EnvSpec


@dataclass(frozen=True)
class Sketch:
    """What a method adds to a plan."""

    geometry: dict[str, int]
    lines: list[str]
    """What an iteration does, a line each."""
    shapes: dict[str, Any]
    """{array: {"dtype", "buffer": shape, "minibatch": shape}}."""
    title: str
    """Of the shapes."""
    usage: str
    """How often a step is used, in words."""
    data: dict[str, float]
    memory: dict[str, int]
    """Bytes that are exact."""
    estimates: dict[str, int]
    """Bytes that are not."""
    training: Tree
    """The shape of the algorithm's state in a checkpoint."""
    disk: dict[str, int] = field(default_factory=dict)
    """Bytes on disk beside checkpoints."""
    at_most: str | None = None
    """Why the number of updates is a maximum, if it is one."""
    notes: list[str] = field(default_factory=list)


class Method(Protocol):
    """One kind of algorithm."""

    @property
    def takes_ranks(self) -> bool:
        """Whether several processes can share its shards."""
        ...

    def nest(self, recipe: Recipe) -> Nest:
        """The loops; refuses sizes that do not divide."""
        ...

    def look(self, recipe: Recipe) -> World:
        """What there is to learn from; refuses what cannot be learned from."""
        ...

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        """Its part of the plan."""
        ...

    def assemble(
        self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock, ranks: Ranks
    ) -> Assembly:
        """Its parts of a run, or this rank's of them, at the state of a fresh start."""
        ...


def device(recipe: Recipe) -> torch.device:
    """Where the learner computes."""
    choice, there = recipe.learner.device, torch.cuda.is_available()
    if choice == "cuda" and not there:
        raise UsageError("learner.device is cuda, but no GPU was found: use auto or cpu.")
    return torch.device("cuda" if there and choice != "cpu" else "cpu")
