"""A recipe: everything a run is, in one frozen description, and its file."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
import yaml
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError

from etude.core.clock import ClockConfig, IntervalText, Loops
from etude.core.config import SECONDS, Config
from etude.core.contracts import Algorithm, ArraySpec, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.metrics.declared import COUNTERS, EPISODES, Metrics
from etude.core.ranks import ALONE, Ranks
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.core.user_code import code_files, module_or_file, require_trust
from etude.data.segments import SegmentBuffer
from etude.envs import NAMED_BY
from etude.envs.config import ENVS, EnvConfig
from etude.models.policies import POLICIES, BasePolicyConfig, PolicyConfig
from etude.planning import FREE as FREE
from etude.rollout.local import COLLECTORS, CollectorConfig
from etude.runs.folder import RunFolder
from etude.training.curriculum import CurriculumConfig, MotionCurriculumConfig
from etude.training.evaluation import AnyEvaluator, EvaluationConfig
from etude.training.logs.outputs import LogsConfig
from etude.training.saving import CheckpointConfig


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
    offline_evaluation: ClassVar[str] = "held-out"
    """How `etude eval` evaluates a run without an environment: a name of `etude.evaluate`, or
    module:function."""

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
    "algorithm", "etude.planning.recipe:AlgorithmConfig"
)
REWARDS: Registry[RewardsConfig] = Registry("rewards", "etude.planning.recipe:RewardsConfig")


def kinds_with(attribute: str, value: object) -> str:
    """The algorithms whose config class has such an attribute, as "sac or td3"."""
    found = []
    for name in ALGORITHMS.names():
        with suppress(UsageError):  # a package whose entry point cannot be loaded
            if getattr(ALGORITHMS.load(name), attribute) == value:
                found.append(name)
    return " or ".join(found)


class LearnerConfig(Config):
    """How learning is spread out. Shards and threads are part of a run's geometry."""

    shards: int = Field(
        1, ge=1, le=1024, description="Buffer parts, whose gradients are summed in order."
    )
    threads: int = Field(1, ge=1, le=1024, description="Torch threads of a gradient step.")
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="Device of the learner; auto is a GPU where torch finds one. Runs on a GPU are "
        "not exact, and none has been tested.",
    )
    reduce: Literal["exact", "fast"] = Field(
        "exact",
        description="How ranks sum gradients: in shard order, with the same bits on any number of "
        "ranks, or as fast as possible.",
    )
    timeout: float = Field(
        120.0,
        gt=3,
        le=SECONDS,
        description="Seconds without a heartbeat after which a rank counts as lost.",
    )
    compare_every: IntervalText = Field(
        "10 iterations",
        description="How often ranks compare their weights; they also do so before every save.",
    )

    def torch_device(self) -> torch.device:
        """The device that the learner computes on; refuses a GPU that is not there."""
        there = torch.cuda.is_available()
        if self.device == "cuda" and not there:
            raise UsageError("learner.device is cuda, but no GPU was found: use cpu.")
        return torch.device("cuda" if there and self.device != "cpu" else "cpu")


REGISTRIES: dict[str, Registry[Any]] = {
    each.section: each for each in (ENVS, POLICIES, ALGORITHMS, REWARDS, COLLECTORS)
}
"""Sections of a recipe that may be of several kinds."""


class Recipe(Config):
    """What a person asks for. Complete: the file of it runs again as it is."""

    name: str = Field(description="Name of the recipe; runs are kept under it.")
    seed: int = Field(0, ge=0, description="Where all randomness of the run comes from.")
    start_from: str | None = Field(
        None,
        description="A run, checkpoint or policy folder this run starts from: of a run its newest "
        "checkpoint, with value function or critics; of a policy folder the policy alone. --from "
        "is short for it.",
    )
    env: Annotated[SerializeAsAny[EnvConfig] | None, BeforeValidator(ENVS.validate)] = Field(
        None, description="The task; none for learning from a dataset."
    )
    collector: Annotated[SerializeAsAny[CollectorConfig], BeforeValidator(COLLECTORS.validate)] = (
        Field(CollectorConfig(), description="Rollouts.")
    )
    policy: Annotated[SerializeAsAny[BasePolicyConfig], BeforeValidator(POLICIES.validate)] = Field(
        PolicyConfig(), description="Networks."
    )
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(ALGORITHMS.validate)] = (
        Field(default_factory=lambda: ALGORITHMS.make("ppo"), description="Learning.")
    )
    rewards: Annotated[SerializeAsAny[RewardsConfig], BeforeValidator(REWARDS.validate)] = Field(
        default_factory=lambda: REWARDS.make("given"),
        description="Where rewards come from: given is the environment's own.",
    )
    learner: LearnerConfig = Field(LearnerConfig(), description="Where learning happens.")
    clock: ClockConfig = Field(description="Length of the run and its levels.")
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="From easy to whole.")
    motions: MotionCurriculumConfig = Field(
        MotionCurriculumConfig(), description="How often each motion is practised."
    )
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="Tests of the policy.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Saves.")
    logs: LogsConfig = Field(LogsConfig(), description="What is written and shown.")

    def _changed(self, changes: dict[str, Any]) -> Self:
        """Kinds first, as on the command line: they decide which fields there are."""
        kinds = {s: changes[f"{s}.kind"] for s in REGISTRIES if f"{s}.kind" in changes}
        chosen = {f"{section}.kind" for section in kinds}
        rest = {name: value for name, value in changes.items() if name not in chosen}
        return super(Recipe, self.with_kinds(kinds, changes))._changed(rest)

    def with_kinds(self, kinds: Mapping[str, str], named: Collection[str] = ()) -> Self:
        """The recipe with sections of other kinds, {section: kind}.

        named: fields that are given later; `env.id`, `env.task` and `env.parallel` choose the kind
        of the environment as well.
        """
        by = [kind for field, kind in NAMED_BY.items() if f"env.{field}" in named]
        if by and not isinstance(self.env, ENVS.load(by[0])):
            kinds = {**kinds, "env": by[0]}
        made = {s: REGISTRIES[s].convert(getattr(self, s), kind) for s, kind in kinds.items()}
        return self.model_copy(update=made)

    @property
    def task(self) -> EnvConfig:
        """The environment, of a recipe that must have one."""
        if self.env is None:
            raise UsageError(
                f"The recipe '{self.name}' has no environment: give it one to act in, with "
                "--env.id ID or --env.task module:Class."
            )
        return self.env


@dataclass(frozen=True, kw_only=True)
class Resolved(Inputs):
    """A recipe with all that follows from it before anything is learned."""

    recipe: Recipe
    loops: Loops
    geometry: Any
    """How the algorithm's sizes divide, see `AlgorithmConfig.geometry`."""
    device: torch.device


def metrics_of(recipe: Recipe) -> Metrics:
    """The metrics that a run may log: those of every run and every environment, and those that the
    kinds in its recipe declare."""
    played = () if recipe.env is None else EPISODES + recipe.env.metrics
    curricula = recipe.curriculum.metrics + recipe.motions.metrics
    return recipe.algorithm.metrics + COUNTERS + played + recipe.rewards.metrics + curricula


LATER = (
    *("clock.total_timesteps", "clock.epochs", "evaluation", "start_from"),
    *("algorithm.dataset", "algorithm.teacher"),
)
"""What a resume may change as well, and says so: how long the run is and how it is tested from
there on; and where things are that are known by their hash, or not needed any more."""


def digest(recipe: Recipe) -> str:
    """SHA-256 of all that a result follows from: the same for recipes that differ in FREE alone."""
    named = [(name, value) for name, value in fields(recipe) if not _among(name, FREE)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def changes(old: Recipe, new: Recipe) -> tuple[list[str], list[str]]:
    """What is different, "field was this and is that": what no resume may change, and LATER."""
    before, now = dict(fields(old)), dict(fields(new))
    refused: list[str] = []
    said: list[str] = []
    for name in [*now, *(name for name in before if name not in now)]:
        was, is_now = (json.dumps(fields.get(name)) for fields in (before, now))
        if was != is_now and not _among(name, FREE):
            kind = said if _among(name, LATER) else refused
            kind.append(f"{name} was {was} and is {is_now}")
    return refused, said


def fields(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Every field as it is written on the command line, section.key, with its value."""

    def inside(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from inside(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return inside(recipe.model_dump(mode="json"), "")


def _among(name: str, fields: tuple[str, ...]) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in fields)


MAX_BYTES, MAX_ITEMS, MAX_BITS = 1 << 18, 1 << 16, 1 << 10
"""Of a recipe's file, and of what it holds; those of people have some thousands."""


def load(path: Path, trust: bool = False) -> Recipe:
    """Read a recipe.yaml. Code that it names runs only with `trust`, or where it has had it."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    return parsed(data, str(path), path, trust)


def parsed(data: bytes, source: str, path: Path, trust: bool = False) -> Recipe:
    """A recipe from the text of the recipe.yaml at `path`; errors call it `source`."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        content = yaml.safe_load(data.decode())
        _check_size(content)
    except Exception as error:  # the parser has many, some of them its own mistakes
        words = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{source} cannot be read as YAML: {words}.") from error
    # Before it is validated, which imports the kinds that it names.
    require_trust(_texts(content), path, trust)
    if isinstance(content, dict):
        content.setdefault("name", path.stem)
    recipe = validated(content, source)
    require_trust(texts(recipe), path, trust)
    return recipe


def _check_size(content: Any) -> None:
    """Refuse content that a few lines say over and over, by references of YAML to itself, and text
    that cannot be written."""
    for number, item in enumerate(_items(content), 1):
        if number > MAX_ITEMS:
            raise ValueError(f"it holds more than {MAX_ITEMS:,} items")
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise ValueError(f"it holds a whole number of more than {MAX_BITS} bits")


def code_roots(recipe: Recipe) -> tuple[str, ...]:
    """Modules and files of the code that a recipe names: the roots of `compute_hashes`.

    They are known once the recipe's environment has been made.
    """
    found = {
        str(file) if (where := _module_part(text)).endswith(".py") else where
        for text, file in code_files(texts(recipe)).items()
    }
    waiting: list[Any] = [recipe]
    while waiting:
        config = waiting.pop()
        found.add(module_or_file(type(config)))
        parts = [getattr(config, name) for name in type(config).model_fields]
        waiting += [part for part in parts if isinstance(part, Config)]
        waiting += [
            p for part in parts if isinstance(part, tuple) for p in part if isinstance(p, Config)
        ]
    if recipe.env is not None:
        found.update(recipe.env.modules())
    return tuple(sorted(found))


def _module_part(text: str) -> str:
    """Of module:name, the module, and of a file the whole path."""
    return text.rpartition(":")[0] or text


def texts(recipe: Recipe) -> set[str]:
    """Every text in a recipe: whatever it names is one of them."""
    return _texts(recipe.model_dump())


def _texts(content: Any) -> set[str]:
    return {item for item in _items(content) if isinstance(item, str)}


def _items(content: Any) -> Iterator[Any]:
    """Everything that is in some content, names of fields too, and all that is in that."""
    waiting = [content]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item


def validated(content: Any, source: str) -> Recipe:
    """A recipe from plain data; errors name the field as it is written on the command line."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        from etude.core.explain import explain

        raise UsageError(f"{source}: {explain(error, Recipe)}") from error


def dump(recipe: Recipe) -> str:
    """The text of a recipe.yaml."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
