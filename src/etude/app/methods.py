"""What the app must know of a kind of algorithm: its loops, its parts, and its lines in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from etude.app.recipe import Recipe
from etude.core.clock import Nest
from etude.core.contracts import Algorithm, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.experience.segments import SegmentBuffer
from etude.models.policies import BasePolicy
from etude.runs.folder import RunFolder


class Learning(NamedTuple):
    """A new algorithm, and the buffers that collectors fill for it in turn."""

    algorithm: Algorithm
    buffers: Sequence[SegmentBuffer]


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

    policies: tuple[str, ...]
    """The kinds of policy it trains."""

    def nest(self, recipe: Recipe) -> Nest:
        """The loops; refuses sizes that do not divide."""
        ...

    def learner(self, recipe: Recipe, env: EnvSpec, key: Key, folder: RunFolder) -> Learning:
        """The algorithm with a new policy, at the start of a run."""
        ...

    def sketch(self, recipe: Recipe, env: EnvSpec, policy: BasePolicy, snapshot: Tree) -> Sketch:
        """`policy` is on the meta device, `snapshot` one group's."""
        ...


def device(recipe: Recipe) -> torch.device:
    """Where the learner computes."""
    choice, there = recipe.learner.device, torch.cuda.is_available()
    if choice == "cuda" and not there:
        raise UsageError("learner.device is cuda, but no GPU was found: use auto or cpu.")
    return torch.device("cuda" if there and choice != "cpu" else "cpu")
