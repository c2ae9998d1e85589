"""What a kind of algorithm and a kind of reward source offer to whoever plans and builds a run.

A new algorithm derives its config from `AlgorithmConfig`, or from `OnPolicyConfig` or
`OffPolicyConfig`, which do most of it; a new reward source from `RewardsConfig`. Registered under
an entry point, or named by module:Class, it is planned, trained and resumed like those of this
package.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from etude.core.clock import Loops
from etude.core.config import Config
from etude.core.contracts import Algorithm, ArraySpec, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.experience.segments import SegmentBuffer
from etude.metrics.declared import Metrics
from etude.runs.folder import RunFolder
from etude.training.evaluation import AnyEvaluator

if TYPE_CHECKING:
    from etude.planning.recipe import Recipe
    from etude.planning.resolve import Resolved


class Deployable(Protocol):
    """What a checkpoint's `policy/` is made from."""

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def contract(self) -> Tree: ...


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run learns from, found out before it starts."""

    spec: EnvSpec
    exactness: Exactness
    deployed: Deployable
    """The policy (or reward network) that the run will have learned, on the meta device."""
    evaluation_episodes: int
    """Of one evaluation."""
    snapshot: Tree
    """One group's; {} where nothing is collected."""
    num_groups: int
    data: Any = None
    """The dataset that is learned from, as the algorithm opened it; None without one."""


class Learner(NamedTuple):
    """A new algorithm, and what the run around it must know."""

    algorithm: Algorithm
    buffers: Sequence[SegmentBuffer] = ()
    """What collectors fill in turn; none where nothing is collected."""
    dataset: tuple[int, int] = (0, 0)
    """(episodes, steps) that are learned from, where nothing is collected."""
    evaluator: AnyEvaluator | None = None
    """Where an evaluation is no episodes in an environment."""


def array_shapes(
    specs: dict[str, ArraySpec], buffer: list[int], minibatch: list[int]
) -> dict[str, Any]:
    """A plan's `shapes` of arrays with these leading axes in the buffer and in a minibatch."""
    return {
        name: {
            "dtype": spec.dtype,
            "buffer": [*buffer, *spec.shape],
            "minibatch": [*minibatch, *spec.shape],
        }
        for name, spec in specs.items()
    }


@dataclass(frozen=True)
class PlanSection:
    """What an algorithm adds to a plan."""

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


class AlgorithmConfig(Config):
    """The base of every algorithm's config; `kind` is its name in a recipe."""

    takes_ranks: ClassVar[bool] = False
    """Whether several processes can share its shards."""
    policies: ClassVar[str] = ""
    """The family of policies that it trains, see `PolicyConfig.family`."""
    rewards_from: ClassVar[str] = ""
    """"rollouts" or "replay": what the rewards of a reward source must be for."""
    metrics: ClassVar[Metrics] = ()
    """What it logs: columns of the table, curves of the dashboard and warnings follow."""
    report: ClassVar[str] = "etude.reports.offline:examine"
    """What `etude eval` does with a run that has no environment, as module:function."""

    if TYPE_CHECKING:
        kind: str

    def schedules(self, progress: float) -> dict[str, float]:
        """The fields that change over a run, at a progress from 0 (its start) to 1 (its end)."""
        return {}

    def completed(self, recipe: Recipe) -> Recipe:
        """The recipe with what its author left to the data it learns from."""
        return recipe

    def geometry(self, recipe: Recipe) -> Any:
        """How sizes divide, worked out once; refuses those that do not."""
        return None

    @abstractmethod
    def loops(self, recipe: Recipe, geometry: Any) -> Loops:
        """The loops of a run: steps and gradient steps of an iteration."""

    def inputs(self, recipe: Recipe) -> Inputs | None:
        """The dataset that is learned from; None for learning in the recipe's environment."""
        return None

    @abstractmethod
    def plan(self, run: Resolved) -> PlanSection:
        """Its part of the plan."""

    @abstractmethod
    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        """A new learner, or this rank's part of it, at the state of a fresh start."""


class RewardsSection(NamedTuple):
    """What a reward source adds to a plan."""

    lines: list[str]
    geometry: dict[str, int]
    memory: dict[str, int]
    """Bytes that are exact, beside its state."""
    workspace: int
    """Bytes of a gradient, estimated."""


class RewardsConfig(Config):
    """The base of every reward source's config; `kind` is its name in a recipe.

    A source of rewards for PPO defines `for_rollouts`, one for SAC and TD3 `for_replay`.
    """

    from_returns: ClassVar[bool] = False
    """Whether rewards are learned from returns of episodes, which a dataset must then have."""
    from_clips: ClassVar[bool] = False
    """Whether clips of episodes teach it something as well."""
    metrics: ClassVar[Metrics] = ()
    """What it logs, as of an algorithm."""

    if TYPE_CHECKING:
        kind: str

    @property
    def uses_stored(self) -> bool:
        """Whether the rewards that experience was stored with are learned from."""
        return False

    @property
    def num_updates(self) -> int:
        """Gradient steps of an iteration that are counted as its own."""
        return 0

    def check(self, shards: int) -> None:
        """Refuse sizes that do not divide over the shards."""

    def reads(self, observations: dict[str, ArraySpec]) -> Collection[str]:
        """The observations of a dataset that it looks at."""
        return ()

    def for_rollouts(
        self, run: Resolved, key: Key | None, device: torch.device, ranks: Ranks = ALONE
    ) -> Any:
        """A `RewardSource`; without a key its weights are not drawn."""
        raise NotImplementedError

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> Any:
        """A `RewardSource`; without a key its weights are not drawn."""
        raise NotImplementedError

    def require_rollouts(self, algorithm: str) -> None:
        """Refuse a source that has nothing to say of fresh experience."""
        if type(self).for_rollouts is RewardsConfig.for_rollouts:
            raise UsageError(
                f"{algorithm} learns from fresh rollouts, and rewards.kind {self.kind} has rewards "
                f"for replay alone: use algorithm {kinds_with('rewards_from', 'replay')}."
            )

    def require_replay(self, algorithm: str) -> None:
        """Refuse a source that has nothing to say of replayed experience."""
        if type(self).for_replay is RewardsConfig.for_replay:
            raise UsageError(
                f"{algorithm} learns from a replay, and rewards.kind {self.kind} has rewards for "
                f"fresh rollouts alone: use algorithm {kinds_with('rewards_from', 'rollouts')}."
            )

    def plan(self, source: Any) -> RewardsSection:
        """Its part of the plan; `source` was made on the meta device."""
        return RewardsSection([], {}, {}, 0)


ALGORITHMS: Registry[AlgorithmConfig] = Registry(
    "algorithm", "etude.planning.kinds:AlgorithmConfig"
)
REWARDS: Registry[RewardsConfig] = Registry("rewards", "etude.planning.kinds:RewardsConfig")


def kinds_with(attribute: str, value: object) -> str:
    """The algorithms whose config class has such an attribute, as "sac or td3"."""
    found = []
    for name in ALGORITHMS.names():
        with suppress(UsageError):  # a package whose entry point cannot be loaded
            if getattr(ALGORITHMS.load(name), attribute) == value:
                found.append(name)
    return " or ".join(found)
