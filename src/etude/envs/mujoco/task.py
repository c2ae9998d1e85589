"""A task on MuJoCo: its model, its parts and its named terms. `MujocoEnv` runs many of it at once.

Terms are plain functions that give [num_envs] or [num_envs, n] numbers. What has state, or acts on
the simulation, is a `Part`: robots, commands, random pushes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, Literal, Protocol, TypeVar

import mujoco
import numpy as np

from etude.core.contracts import ActionSpec, Array, Observations
from etude.core.errors import UsageError
from etude.core.keys import GOLDEN, Streams, mix
from etude.envs.mujoco.simulation import Camera, Model, Simulation

Function = Callable[[Any], Array]
F = TypeVar("F", bound=Callable[..., Array])
Term = Callable[[Any], Array]
"""A function of the task's view, or of the environment where the task has none."""


@dataclass(frozen=True)
class Observation:
    """A term [num_envs, n] or [num_envs], and how it is measured: each only where given, in this
    order."""

    term: Function
    noise: float | Array = 0.0
    """Uniform noise of up to so much either way, in the term's unit."""
    clip: tuple[float, float] | None = None
    scale: float | Array = 1.0
    delay: tuple[int, int] = (0, 0)
    """The measurement is so many control steps old, at least and at most: drawn per episode."""
    history: int = 1
    """The last so many measurements, newest first."""
    unit: str = ""
    """Of the term, before `scale`; a term that is `measured` says its own."""
    about: str = ""
    """What the term is, for whoever measures it on a robot; default its docstring's first line."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay[0] <= self.delay[1] or self.history < 1:
            raise UsageError(
                f"An observation's delay is (least, most) in steps, and its history 1 or more: not "
                f"{self.delay} and {self.history}."
            )

    @property
    def is_plain(self) -> bool:
        """Whether the term is shown as it is."""
        late = self.delay[1] or self.history > 1
        return not (np.any(self.noise) or self.clip or np.any(self.scale != 1.0) or late)

    @classmethod
    def of(cls, term: Function | Observation) -> Observation:
        """The term with its pipeline, or with an empty one."""
        return term if isinstance(term, Observation) else cls(term)


def measured(unit: str) -> Callable[[F], F]:
    """Decorates a term that gives numbers in this unit, "1" for those without."""

    def decorate(term: F) -> F:
        term.unit = unit  # type: ignore[attr-defined]
        return term

    return decorate


@dataclass(frozen=True)
class Group:
    """Terms that share a delay and a history, on top of their own pipelines."""

    terms: Mapping[str, Function | Observation]
    delay: tuple[int, int] = (0, 0)
    history: int = 1
    dtype: str = "float32"
    """What policies read is float32."""

    @classmethod
    def of(cls, terms: Mapping[str, Function | Observation] | Group) -> Group:
        """The group, or one of these terms that share nothing."""
        return terms if isinstance(terms, Group) else cls(terms)


class TaskEnv(Protocol):
    """The environments of a task, as its parts and terms see them."""

    task: Task
    parts: tuple[Part, ...]
    edits: list[Any]
    """What parts add to the model before it is compiled."""
    num_envs: int
    simulation: Simulation
    view: Any
    """What terms are given: `Task.view`, or the environments themselves."""
    dt: float
    """Seconds of a control step."""
    tick: int
    """Counts the states of the simulation."""
    episode: Array
    """[num_envs] int64: which episode each environment is in."""
    elapsed: Array
    """[num_envs] int64: control steps since the episode's start."""
    action: Array
    """[num_envs, n]: the policy's last action."""
    last_action: Array
    """[num_envs, n]: the action before the last; zero at an episode's start."""
    seed: np.uint64
    streams: Streams

    @property
    def draws(self) -> Draws:
        """Random numbers for this step, in all environments."""

    @property
    def reward_sums(self) -> dict[str, Array]:
        """{term: [num_envs]}: weighted, added up since the episode's start; live arrays."""

    def state(self, name: str, *shape: int, dtype: str = "float64") -> Array:
        """A new live array [num_envs, *shape] of zeros that is part of every snapshot."""

    def keep(self, name: str, array: Array) -> Array:
        """Make a live array [num_envs, ...] part of every snapshot; write it in place."""


class Draws:
    """Random numbers of some environments, decided by key, environment, episode, step and a name.

    Nothing is stored between steps, so nothing has to be in a snapshot, and the same numbers come
    however often they are asked for.
    """

    def __init__(self, env: TaskEnv, env_ids: Array | slice = slice(None)) -> None:
        self._env, self._env_ids = env, env_ids

    def uniform(self, name: str, *shape: int, low: Any = 0.0, high: Any = 1.0) -> Array:
        """[k, *shape] float64 in [low, high), which may be arrays of that shape."""
        count = int(np.prod(shape))
        stream = np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))
        index = np.arange(1, count + 1, dtype=np.uint64)
        bits = mix(self._moments()[:, None] ^ mix(stream + index * GOLDEN)) >> np.uint64(11)
        unit = bits.astype(np.float64) * 2.0**-53
        found: Array = low + unit.reshape(-1, *shape) * (np.asarray(high) - low)
        return found

    def normal(self, name: str, *shape: int) -> Array:
        """[k, *shape] float64, standard normal."""
        radius, angle = np.moveaxis(self.uniform(name, 2, *shape), 1, 0)
        normal: Array = np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * np.pi * angle)
        return normal

    def integers(self, name: str, low: int, high: int) -> Array:
        """[k] int64 from low to high, both included."""
        found: Array = np.floor(self.uniform(name, low=low, high=high + 1)).astype(np.int64)
        return found

    @cached_property
    def generators(self) -> list[np.random.Generator]:
        """numpy's generators, one per environment, at the start of its episode's stream."""
        ids = np.arange(self._env.num_envs)[self._env_ids]
        return self._env.streams.begin(ids.tolist(), self._env.episode[ids].tolist())

    def _moments(self) -> Array:
        """[k] uint64: a number for this step of each environment's episode."""
        env, ids = self._env, self._env_ids
        who = np.arange(env.num_envs, dtype=np.uint64)[ids] + np.uint64(1)
        episode = mix(mix(env.seed + who * GOLDEN) + env.episode[ids].astype(np.uint64) * GOLDEN)
        moments: Array = mix(episode + env.elapsed[ids].astype(np.uint64) * GOLDEN)
        return moments


class Part:
    """Something of a task that has state, or acts on the simulation; override what is needed."""

    _env: TaskEnv | None = None

    @property
    def env(self) -> TaskEnv:
        """The environments that the part belongs to."""
        if self._env is None:
            raise UsageError(
                f"This {type(self).__name__} belongs to no environment: name it in Task(parts=...)."
            )
        return self._env

    def edit(self, spec: mujoco.MjSpec) -> None:
        """Add to the model before it is compiled: sensors, actuators, terrain. It may be asked for
        again, by whoever draws pictures."""

    def bind(self) -> None:
        """Find arrays and ids once `self.env` is there; its simulation is not stepped yet."""

    def reset(self, env_ids: Array, draws: Draws) -> None:
        """Write the start of an episode of environments [k], which hold the model's defaults."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        """The same for what depends on where things are: derived fields are computed by now."""

    def act(self) -> None:
        """Before the physics of every control step, in all environments."""

    def update(self) -> None:
        """After it."""

    def change(self) -> None:
        """After the step was rewarded, before what comes next is observed: new commands."""

    def restored(self) -> None:
        """After a snapshot was restored: bring up to date what is no state."""


P = TypeVar("P", bound=Part)


class derived(Generic[P]):  # noqa: N801 - used like `property`
    """A property of a part that is computed once for every state of the simulation."""

    def __init__(self, compute: Callable[[P], Array]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_derived_{name}"

    def __get__(self, part: P | None, owner: type) -> Any:
        if part is None:
            return self
        known = part.__dict__.get(self._name)
        if known is None or known[0] != part.env.tick:
            known = part.__dict__[self._name] = (part.env.tick, self._compute(part))
        return known[1]


class Action(Part):
    """What a policy's action [num_envs, n] does: `apply` writes controls.

    `delay`: an action takes effect so many control steps late, at least and at most; drawn for
    every episode.
    """

    size: int
    """Numbers of an action, known once the model is there."""
    limit: float = 1.0

    def __init__(self, delay: tuple[int, int] = (0, 0)) -> None:
        if not 0 <= delay[0] <= delay[1]:
            raise UsageError(f"The delay of actions is (least, most) in steps, not {delay}.")
        self.delay = delay

    @property
    def spec(self) -> ActionSpec:
        return ActionSpec("box", low=(-self.limit,) * self.size, high=(self.limit,) * self.size)

    @abstractmethod
    def apply(self, actions: Array) -> None:
        """Write the controls for actions [num_envs, n]."""


@dataclass(frozen=True)
class Task:
    """A task: what is simulated, what is seen, what is rewarded, and when episodes end."""

    model: Model
    action: Action
    observations: Mapping[str, Mapping[str, Term | Observation] | Group]
    """{observation: {term: function}}, concatenated in order. Policies read "state"."""
    rewards: Mapping[str, tuple[Term, float]]
    """{term: (function, weight)}; a term of weight 0 is not computed."""
    max_episode_steps: int
    """Control steps after which time has run out."""
    substeps: int = 1
    """Physics steps of a control step."""
    terminations: Mapping[str, Term] = field(default_factory=dict)
    """{term: [num_envs] bool}: any of them ends the episode."""
    success: Term | Literal["survived"] | None = "survived"
    """[num_envs] bool, asked when an episode ends. "survived": whether no termination ended it;
    None: only the return says how well it went."""
    statistics: Mapping[str, Term] = field(default_factory=dict)
    """{name: [num_envs]}: logged when an episode ends."""
    outcomes: tuple[str, ...] = ()
    """What the statistic "outcome" counts through, success first; (): names of terminations."""
    parts: Sequence[Part] = ()
    """In the order in which they are asked; the action's part comes last, if not named here."""
    view: Any = None
    """What terms are given, with live arrays; None: the environment."""
    time_limit: Term | None = None
    """[num_envs] control steps, where environments differ."""
    motions: tuple[str, ...] = ()
    """Names of the motions that are imitated."""
    camera: Camera = field(default_factory=Camera)
    """Of films and windows."""
    picture_camera: Camera | None = None
    """Of the pictures that a policy sees; None: `camera`."""
    lagged: bool = False
    """Derived fields are those of before the last physics step, as `mj_step` leaves them."""
    forward_after_reset: bool = True
    """Whether observations and `begin` read derived fields of environments just reset."""

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts and the action's."""
        last = () if self.action in self.parts else (self.action,)
        return *self.parts, *last


SIMULATION, TARGET = "_simulation", "_target"
"""What pictures are drawn from: observations that are not stored."""
PROGRESS = "progress"
"""True progress, [1] from 0 at the start to 1 at success: to evaluate by, not to learn from."""
PROPRIO = "proprio"
"""What the robot measures of itself."""


class Actor(Protocol):
    """Who demonstrates: a scripted expert, or a trained policy."""

    def reset(self, env_ids: Array) -> None:
        """Environments [k] begin a new episode."""
        ...

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, n] in [-1, 1]."""
        ...


class Demonstration(Part):
    """A part that stands behind those of a task; `TaskConfig.demonstration` is its class.

    It is made of the task's config and its view, which has a "target" [num_envs, 3].
    """

    has_gripper = False
    """Whether the last action is a gripper's, open where positive."""

    def __init__(self, config: Any, view: Any) -> None:
        self.config, self.view = config, view

    @abstractmethod
    def progress(self) -> Array:
        """[num_envs]: how far each episode has come; it is clipped to 0 to 1."""

    @abstractmethod
    def proprioception(self) -> tuple[Array, ...]:
        """What the robot measures of itself, [num_envs, n] each."""

    @abstractmethod
    def expert(self) -> Actor:
        """A scripted policy that solves the task."""

    def observations(self) -> dict[str, Mapping[str, Term] | Group]:
        """What is seen beside the task's own observations."""
        state: dict[str, Term] = {"state": lambda view: self.env.simulation.state}
        return {
            PROPRIO: {"own": lambda view: np.concatenate(self.proprioception(), axis=1)},
            PROGRESS: {"progress": lambda view: np.clip(self.progress(), 0.0, 1.0)[:, None]},
            SIMULATION: Group(state, dtype="float64"),
            TARGET: Group({"target": lambda view: view.target}, dtype="float64"),
        }
