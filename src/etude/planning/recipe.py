"""The recipe, the interfaces of its kinds, and its file."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import torch
import yaml
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError

from etude.core.clock import ClockConfig, IntervalText, Loops
from etude.core.config import SECONDS, Config
from etude.core.contracts import Algorithm, ArraySpec, EnvSpec, Exactness
from etude.core.errors import Damaged, UsageError
from etude.core.keys import Key
from etude.core.metrics import COUNTERS, EPISODES, Metrics
from etude.core.output import amount, html_table, html_text
from etude.core.ranks import ALONE, Ranks
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.core.user_code import code_files, module_or_file, require_trust
from etude.data.segments import SegmentBuffer, nearest_divisor
from etude.envs import NAMED_BY
from etude.envs.config import ENVS, EnvConfig
from etude.models.policies import POLICIES, BasePolicyConfig, PolicyConfig
from etude.planning import FREE as FREE
from etude.planning import among
from etude.rollout.local import COLLECTORS, GROUP, CollectorConfig
from etude.runs.changes import changes_of
from etude.runs.folder import RunFolder
from etude.training.curriculum import CurriculumConfig, MotionCurriculumConfig
from etude.training.evaluation import AnyEvaluator, EvaluationConfig
from etude.training.logs.outputs import LogsConfig
from etude.training.saving import CheckpointConfig


class Deployable(Protocol):
    """A policy or reward network that a checkpoint's `policy/` is made from."""

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def contract(self) -> Tree: ...


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The environment or dataset that a run learns from, and the policy, known before it starts."""

    spec: EnvSpec
    exactness: Exactness
    deployed: Deployable
    """The policy or reward network that the run trains, on the meta device."""
    evaluation_episodes: int
    """Episodes of one evaluation."""
    snapshot: Tree
    """Snapshot of one group; {} without collection."""
    num_groups: int
    data: Any = None
    """The dataset, as the algorithm opened it; None without one."""


class Learner(NamedTuple):
    """A new algorithm, with its buffers, dataset and evaluator."""

    algorithm: Algorithm
    buffers: Sequence[SegmentBuffer] = ()
    """Buffers that collectors fill in turn; () without collection."""
    dataset: tuple[int, int] = (0, 0)
    """(episodes, steps) of the dataset, without collection."""
    evaluator: AnyEvaluator | None = None
    """An evaluator without an environment; None for episodes in the environment."""


def array_shapes(
    specs: dict[str, ArraySpec], buffer: list[int], minibatch: list[int]
) -> dict[str, Any]:
    """`PlanSection.shapes` of arrays with these leading axes in the buffer and in a minibatch."""
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
    """An algorithm's part of the plan."""

    geometry: dict[str, int]
    lines: list[str]
    """Steps of an iteration, a line each."""
    shapes: dict[str, Any]
    """{array: {"dtype", "buffer": shape, "minibatch": shape}}."""
    title: str
    """Title of the shapes."""
    usage: str
    """How often a step is used, as text."""
    data: dict[str, float]
    memory: dict[str, int]
    """Bytes of memory that are exact."""
    estimates: dict[str, int]
    """Bytes of memory that are estimated."""
    training: Tree
    """A tree with the shape of the algorithm's state in a checkpoint."""
    disk: dict[str, int] = field(default_factory=dict)
    """Bytes on disk besides checkpoints."""
    at_most: str | None = None
    """Why the number of updates is a maximum; None if it is exact."""
    notes: list[str] = field(default_factory=list)


_FEW = 8
"""Environments of a group below which a larger one is chosen."""


class AlgorithmConfig(Config):
    """Base class of algorithm configs; `kind` is the name in a recipe."""

    takes_ranks: ClassVar[bool] = False
    """Whether several ranks can share its shards."""
    compiles: ClassVar[bool] = False
    """Whether its gradient steps can be compiled (learner.step)."""
    policies: ClassVar[str] = ""
    """Family of the policies that it trains, see `PolicyConfig.family`."""
    rewards_from: ClassVar[str] = ""
    """"rollouts" or "replay": experience that a reward source must support."""
    metrics: ClassVar[Metrics] = ()
    """Its metrics; the table, the dashboard and health warnings are derived from them."""
    offline_evaluation: ClassVar[str] = "held-out"
    """How `etude eval` evaluates a run without an environment: a name of `etude.evaluate`, or
    module:function."""

    kind: str

    def read_at_start(self) -> Collection[str]:
        """Its fields that only the start of a run reads, since the run's state has their values."""
        return ()

    def schedules(self, progress: float) -> dict[str, float]:
        """{field: value} of scheduled fields at a progress from 0 (start) to 1 (end)."""
        return {}

    def learns_from(self, recipe: Recipe) -> str:
        """The field that a person must give, with what it learns from; "" for none.

        --help shows it first, and the other fields of the algorithm after it.
        """
        return ""

    def completed(self, recipe: Recipe) -> Recipe:
        """The recipe with fields filled in from the dataset."""
        return recipe

    def fitted(self, recipe: Recipe, given: Collection[str]) -> Recipe:
        """The recipe with sizes that divide `collector.num_envs`, of fields that are not in `given`
        and do not divide it already."""
        config, shards = recipe.collector, recipe.learner.shards
        agents = 1 if recipe.env is None else recipe.env.num_agents
        divides = config.num_envs % config.envs_per_group == 0
        fits = divides and config.num_envs // config.envs_per_group % shards == 0
        if fits or "collector.envs_per_group" in given or config.num_envs % (agents * shards):
            return recipe
        most = config.num_envs // shards
        group = agents * nearest_divisor(most // agents, max(config.envs_per_group // agents, 1))
        # A prime number of environments would give groups of one.
        group = most if group < min(_FEW, config.envs_per_group) and most <= GROUP else group
        return recipe.replace(collector__envs_per_group=group)

    def geometry(self, recipe: Recipe) -> Any:
        """Derived sizes; refuses sizes that do not divide."""
        return None

    @abstractmethod
    def loops(self, recipe: Recipe, geometry: Any) -> Loops:
        """The loops of a run: steps and gradient steps per iteration."""

    def inputs(self, recipe: Recipe) -> Inputs | None:
        """The inputs of offline learning; None for learning in the recipe's environment."""
        return None

    @abstractmethod
    def plan(self, run: Resolved) -> PlanSection:
        """Its part of the plan."""

    @abstractmethod
    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        """A new learner, or this rank's part of it, in its initial state."""


class RewardsSection(NamedTuple):
    """A reward source's part of the plan."""

    lines: list[str]
    geometry: dict[str, int]
    memory: dict[str, int]
    """Exact bytes of memory besides its state."""
    workspace: int
    """Estimated bytes of a gradient."""


class RewardsConfig(Config):
    """Base class of reward source configs; `kind` is the name in a recipe.

    A reward source for PPO defines `for_rollouts`, one for SAC and TD3 `for_replay`.
    """

    from_returns: ClassVar[bool] = False
    """Whether rewards are learned from returns of episodes, which a dataset must have."""
    from_clips: ClassVar[bool] = False
    """Whether it also learns from clips of episodes."""
    metrics: ClassVar[Metrics] = ()
    """Its metrics, as for algorithms."""

    kind: str

    @property
    def uses_stored(self) -> bool:
        """Whether it uses the rewards in stored experience."""
        return False

    @property
    def num_updates(self) -> int:
        """Its own gradient steps per iteration."""
        return 0

    def check(self, shards: int) -> None:
        """Refuse sizes that the shards do not divide."""

    def reads(self, observations: dict[str, ArraySpec]) -> Collection[str]:
        """Names of the observations of a dataset that it reads."""
        return ()

    def for_rollouts(
        self, run: Resolved, key: Key | None, device: torch.device, ranks: Ranks = ALONE
    ) -> Any:
        """A `RewardSource`; with key None its weights are not initialised."""
        raise NotImplementedError

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> Any:
        """A `RewardSource`; with key None its weights are not initialised."""
        raise NotImplementedError

    def require_rollouts(self, algorithm: str) -> None:
        """Refuse a source without rewards for rollouts."""
        if type(self).for_rollouts is RewardsConfig.for_rollouts:
            raise UsageError(
                f"{algorithm} learns from rollouts, and rewards.kind {self.kind} has rewards for "
                f"replay only: use algorithm {kinds_with('rewards_from', 'replay')}."
            )

    def require_replay(self, algorithm: str) -> None:
        """Refuse a source without rewards for replay."""
        if type(self).for_replay is RewardsConfig.for_replay:
            raise UsageError(
                f"{algorithm} learns from a replay, and rewards.kind {self.kind} has rewards for "
                f"rollouts only: use algorithm {kinds_with('rewards_from', 'rollouts')}."
            )

    def plan(self, source: Any) -> RewardsSection:
        """Its part of the plan; source: on the meta device."""
        return RewardsSection([], {}, {}, 0)


ALGORITHMS: Registry[AlgorithmConfig] = Registry(
    "algorithm", "etude.planning.recipe:AlgorithmConfig"
)
REWARDS: Registry[RewardsConfig] = Registry("rewards", "etude.planning.recipe:RewardsConfig")


def kinds_with(attribute: str, value: object) -> str:
    """The algorithms whose config class has this attribute, as "sac or td3"."""
    found = []
    for name in ALGORITHMS.names():
        with suppress(UsageError):  # a package whose entry point cannot be loaded
            if getattr(ALGORITHMS.load(name), attribute) == value:
                found.append(name)
    return " or ".join(found)


class LearnerConfig(Config):
    """Shards, threads and device of the learner; shards and threads are part of the geometry."""

    shards: int = Field(
        1, ge=1, le=1024, description="Parts of the buffer; their gradients are summed in order."
    )
    threads: int = Field(1, ge=1, le=1024, description="Torch threads of a gradient step.")
    step: Literal["eager", "compiled"] = Field(
        "eager",
        description="Gradient steps of sac, xqc, td3, rlpd and iql: eager, or compiled as a whole, "
        "in about half the time, after up to minutes of compiling that are kept in "
        "~/.cache/etude. Results differ in rounding.",
    )
    device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="Device of the learner; auto: a GPU if torch finds one. Runs on a GPU are not "
        "exact, and none has been tested.",
    )
    reduce: Literal["exact", "fast"] = Field(
        "exact",
        description="How ranks sum gradients: exact, in shard order, with the same bits for any "
        "number of ranks; or as fast as possible.",
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
        if self.step == "compiled" and there and self.device != "cpu":
            raise UsageError("learner.step compiled is for the CPU: leave learner.device at cpu.")
        return torch.device("cuda" if there and self.device != "cpu" else "cpu")


REGISTRIES: dict[str, Registry[Any]] = {
    each.section: each for each in (ENVS, POLICIES, ALGORITHMS, REWARDS, COLLECTORS)
}
"""{section of a recipe with kinds: their registry}."""


class Recipe(Config):
    """All settings of a run; its file can be trained again as it is."""

    name: str = Field(description="Name of the recipe, and of the folder of its runs.")
    seed: int = Field(0, ge=0, description="Seed of all random numbers of the run.")
    start_from: str | None = Field(
        None,
        description="Run, checkpoint or policy folder to start from: of a run its newest "
        "checkpoint, with value function or critics; of a policy folder only the policy. --from "
        "is short for it.",
    )
    env: Annotated[SerializeAsAny[EnvConfig] | None, BeforeValidator(ENVS.validate)] = Field(
        None, description="Environment; none for learning from a dataset."
    )
    collector: Annotated[SerializeAsAny[CollectorConfig], BeforeValidator(COLLECTORS.validate)] = (
        Field(CollectorConfig(), description="Collection of rollouts.")
    )
    policy: Annotated[SerializeAsAny[BasePolicyConfig], BeforeValidator(POLICIES.validate)] = Field(
        PolicyConfig(), description="Policy and its networks."
    )
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(ALGORITHMS.validate)] = (
        Field(
            default_factory=lambda: ALGORITHMS.make("ppo"),
            description="Algorithm and its settings.",
        )
    )
    rewards: Annotated[SerializeAsAny[RewardsConfig], BeforeValidator(REWARDS.validate)] = Field(
        default_factory=lambda: REWARDS.make("given"),
        description="Source of rewards; given: the environment's.",
    )
    learner: LearnerConfig = Field(
        LearnerConfig(), description="Shards, threads and device of the learner."
    )
    clock: ClockConfig = Field(description="Length of the run, in epochs, cycles and iterations.")
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="Training curriculum.")
    motions: MotionCurriculumConfig = Field(
        MotionCurriculumConfig(), description="Curriculum over motions."
    )
    evaluation: EvaluationConfig = Field(
        EvaluationConfig(), description="Evaluations of the policy."
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoints.")
    logs: LogsConfig = Field(LogsConfig(), description="Logs and the console.")

    def _changed(self, changes: dict[str, Any]) -> Self:
        """Change kinds first, as on the command line, since fields depend on them."""
        # A budget takes the place of a number of epochs.
        if changes.get("clock.total_timesteps") is not None:
            changes = {"clock.epochs": None, **changes}
        kinds = {s: changes[f"{s}.kind"] for s in REGISTRIES if f"{s}.kind" in changes}
        chosen = {f"{section}.kind" for section in kinds}
        rest = {name: value for name, value in changes.items() if name not in chosen}
        made = super(Recipe, self.with_kinds(kinds, changes))._changed(rest)
        if "collector.num_envs" not in changes:
            return made
        return cast(Self, made.algorithm.fitted(made, changes))

    def with_kinds(self, kinds: Mapping[str, str], named: Collection[str] = ()) -> Self:
        """The recipe with other kinds, {section: kind}.

        named: fields that will be set; `env.id`, `env.task` and `env.parallel` choose the kind of
        the environment too.
        """
        by = [kind for field, kind in NAMED_BY.items() if f"env.{field}" in named]
        if by and not isinstance(self.env, ENVS.load(by[0])):
            kinds = {**kinds, "env": by[0]}
        made = {s: REGISTRIES[s].convert(getattr(self, s), kind) for s, kind in kinds.items()}
        return self.model_copy(update=made)

    def __repr__(self) -> str:
        facts = self._facts()
        return f"<Recipe {self.name!r}: {', '.join(f'{n} {v}' for n, v in facts.items())}>"

    def _repr_html_(self) -> str:
        """Its outline in a notebook, and all settings under it."""
        below = html_text("all settings, as in recipe.yaml", dump(self))
        return html_table(f"Recipe {self.name}", self._facts(), below)

    def _facts(self) -> dict[str, str]:
        """Its outline in words: algorithm, environment or dataset, length and seed."""
        env, clock = self.env, self.clock
        # The field that names the environment of a kind for many, for example env.id of gym.
        named = [str(value) for field in NAMED_BY if (value := getattr(env, field, ""))]
        dataset = str(getattr(self.algorithm, "dataset", "") or "")
        steps, epochs = clock.total_timesteps, clock.epochs
        facts = {
            "algorithm": self.algorithm.kind,
            "environment": " ".join([env.kind, *named]) if env is not None else "",
            "dataset": dataset,
            "length": f"{steps:,} steps" if steps else amount(epochs or 0, "epoch"),
            "seed": str(self.seed),
        }
        return {name: value for name, value in facts.items() if value}

    @property
    def task(self) -> EnvConfig:
        """The environment; refuses a recipe without one."""
        if self.env is None:
            raise UsageError(
                f"The recipe '{self.name}' has no environment: choose one with --env.id ID or "
                "--env.task module:Class."
            )
        return self.env


@dataclass(frozen=True, kw_only=True)
class Resolved(Inputs):
    """A recipe with everything that is derived from it before training."""

    recipe: Recipe
    loops: Loops
    geometry: Any
    """Derived sizes, see `AlgorithmConfig.geometry`."""
    device: torch.device


def metrics_of(recipe: Recipe) -> Metrics:
    """The metrics that a run may log: those of all runs, and those of the recipe's kinds."""
    played = () if recipe.env is None else EPISODES + recipe.env.metrics
    curricula = recipe.curriculum.metrics + recipe.motions.metrics
    return recipe.algorithm.metrics + COUNTERS + played + recipe.rewards.metrics + curricula


LATER = (
    *("clock.total_timesteps", "clock.epochs", "evaluation", "start_from"),
    *("algorithm.dataset", "algorithm.teacher"),
)
"""Fields besides FREE that a resume may change, with a message: length and evaluation of the rest
of the run, and paths of files that are known by their hash or not needed any more."""


CHANGEABLE = ("algorithm", "rewards", "evaluation", *FREE)
"""Sections and fields that `etude resume --SECTION.FIELD VALUE` may change from a step on, where
the geometry, the loops and the shapes of the run's state stay the same. The environment, the
policy, the seed and the clock are not among them."""


def digest(recipe: Recipe) -> str:
    """SHA-256 of the fields that decide results: equal for recipes that differ only in FREE."""
    named = [(name, value) for name, value in fields(recipe) if not among(name, FREE)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def changes(old: Recipe, new: Recipe) -> tuple[list[str], list[str]]:
    """(refused changes, allowed changes of LATER) as texts "field was this and is that"."""
    before, now = dict(fields(old)), dict(fields(new))
    refused: list[str] = []
    allowed: list[str] = []
    for name in [*now, *(name for name in before if name not in now)]:
        was, is_now = (json.dumps(fields.get(name)) for fields in (before, now))
        if was != is_now and not among(name, FREE):
            kind = allowed if among(name, LATER) else refused
            kind.append(f"{name} was {was} and is {is_now}")
    return refused, allowed


def differing_fields(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """{section.key: (value in old, value in new)} of all fields that differ."""
    before, now = dict(fields(old)), dict(fields(new))
    names = dict.fromkeys([*now, *before])
    pairs = {name: (before.get(name), now.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def with_changes(recipe: Recipe, folder: RunFolder, trust: bool = False) -> Recipe:
    """The recipe of a run with the settings that resumes have changed; trust: as of `load`."""
    try:
        found = changes_of(folder.manifest())
    except Damaged:  # a resume restores it
        return recipe
    # Before validation, which imports the kinds that values name.
    require_trust(_texts([change.fields for change in found]), folder.recipe, trust)
    for change in found:
        if wrong := [name for name in change.fields if not among(name, CHANGEABLE)]:
            raise UsageError(f"The manifest of {folder.path} changes {wrong[0]}, which cannot be.")
        recipe = recipe.replace(**{n.replace(".", "__"): b for n, (_, b) in change.fields.items()})
    return recipe


def fields(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """(section.key, value) of all fields."""

    def inside(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from inside(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return inside(recipe.model_dump(mode="json"), "")


MAX_BYTES, MAX_ITEMS, MAX_BITS = 1 << 18, 1 << 16, 1 << 10
"""Limits on the file of a recipe and its items; usual recipes have some thousands."""


def load(path: Path, trust: bool = False) -> Recipe:
    """Read a recipe.yaml. Code that it names runs only with `trust`, now or earlier."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    return parsed(data, str(path), path, trust)


def parsed(data: bytes, source: str, path: Path, trust: bool = False) -> Recipe:
    """A recipe from the text of the recipe.yaml at `path`; source: its name in errors."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        content = yaml.safe_load(data.decode())
        _check_size(content)
    except Exception as error:  # the parser raises many types, some by mistake
        words = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{source} cannot be read as YAML: {words}.") from error
    # Before validation, which imports the kinds that the recipe names.
    require_trust(_texts(content), path, trust)
    if isinstance(content, dict):
        content.setdefault("name", path.stem)
    recipe = validated(content, source)
    require_trust(texts(recipe), path, trust)
    return recipe


def _check_size(content: Any) -> None:
    """Refuse content that YAML's aliases multiply, and text that cannot be encoded."""
    for number, item in enumerate(_items(content), 1):
        if number > MAX_ITEMS:
            raise ValueError(f"it holds more than {MAX_ITEMS:,} items")
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise ValueError(f"it holds a whole number of more than {MAX_BITS} bits")


def code_roots(recipe: Recipe) -> tuple[str, ...]:
    """Modules and files of the code that a recipe names: the roots of `compute_hashes`.

    They are known after the recipe's environment has been made.
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
    """The module of module:name, or the path of a file."""
    return text.rpartition(":")[0] or text


def texts(recipe: Recipe) -> set[str]:
    """All texts in a recipe, among them all names of code."""
    return _texts(recipe.model_dump())


def _texts(content: Any) -> set[str]:
    return {item for item in _items(content) if isinstance(item, str)}


def _items(content: Any) -> Iterator[Any]:
    """All items in nested content, including names of fields."""
    waiting = [content]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item


def validated(content: Any, source: str) -> Recipe:
    """A recipe from plain data; errors begin with `source` and name the field."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        from etude.core.explain import explain

        raise UsageError(f"{source}: {explain(error, Recipe)}") from error


def dump(recipe: Recipe) -> str:
    """The text of a recipe.yaml."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
