"""A task on MuJoCo: model, parts and named terms. `MujocoEnv` simulates it in parallel.

Terms are functions that return [num_envs] or [num_envs, n] numbers. Whatever has state or acts on
the simulation is a `Part`: robots, commands, random pushes.
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

from etude.core.contracts import ActionSpec, Array, Observations, Reflection
from etude.core.errors import UsageError
from etude.core.keys import GOLDEN, Streams, mix
from etude.envs.mujoco.mirror import Mirror
from etude.envs.mujoco.simulation import Camera, Marker, Model, Simulation

Function = Callable[[Any], Array]
F = TypeVar("F", bound=Callable[..., Array])
Term = Callable[[Any], Array]
"""A function of the task's view, or of the environment if the task has no view."""


@dataclass(frozen=True)
class Observation:
    """A term [num_envs, n] or [num_envs] with its pipeline, applied in the order of the fields."""

    term: Function
    noise: float | Array = 0.0
    """Half-width of uniform noise, in the term's unit."""
    clip: tuple[float, float] | None = None
    scale: float | Array = 1.0
    delay: tuple[int, int] = (0, 0)
    """Delay in control steps (minimum, maximum), drawn per episode."""
    history: int = 1
    """Number of stacked measurements, newest first."""
    unit: str = ""
    """Unit of the term before `scale`; default that of its decorator `measured`."""
    about: str = ""
    """Description for exports, for use on a robot; default the first paragraph of its docstring."""
    mirror: Mirror | None = None
    """The term's reflection left for right, before `scale`; None if it is not known."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay[0] <= self.delay[1] or self.history < 1:
            raise UsageError(
                f"An observation's delay must be (minimum, maximum) in steps, and its history 1 or "
                f"more, not {self.delay} and {self.history}."
            )

    @property
    def is_plain(self) -> bool:
        """Whether the term is observed unchanged."""
        late = self.delay[1] or self.history > 1
        return not (np.any(self.noise) or self.clip or np.any(self.scale != 1.0) or late)

    @classmethod
    def of(cls, term: Function | Observation) -> Observation:
        """The term with an empty pipeline, or the observation unchanged."""
        return term if isinstance(term, Observation) else cls(term)


def measured(unit: str) -> Callable[[F], F]:
    """Decorator that sets the unit of a term; "1" for numbers without a unit."""

    def decorate(term: F) -> F:
        term.unit = unit  # type: ignore[attr-defined]
        return term

    return decorate


@dataclass(frozen=True)
class Group:
    """Terms with a common delay and history, applied after their own pipelines."""

    terms: Mapping[str, Function | Observation]
    delay: tuple[int, int] = (0, 0)
    history: int = 1
    dtype: str = "float32"
    """Policies read float32."""

    @classmethod
    def of(cls, terms: Mapping[str, Function | Observation] | Group) -> Group:
        """The terms as a group without delay or history, or the group unchanged."""
        return terms if isinstance(terms, Group) else cls(terms)


class TaskEnv(Protocol):
    """The parallel environments of a task, as its parts and terms see them."""

    task: Task
    parts: tuple[Part, ...]
    edits: list[Any]
    """The parts' methods `edit`, which add to the model before it is compiled."""
    num_envs: int
    simulation: Simulation
    view: Any
    """The argument of terms: `Task.view`, or the environments themselves."""
    dt: float
    """Length of a control step, s."""
    tick: int
    """Number of the simulation's current state."""
    episode: Array
    """[num_envs] int64: number of each environment's current episode."""
    elapsed: Array
    """[num_envs] int64: control steps since the start of the episode."""
    action: Array
    """[num_envs, n]: the policy's last action."""
    last_action: Array
    """[num_envs, n]: the action before the last; zero at the start of an episode."""
    terminated: Array
    """[num_envs] bool: whether the last step terminated the episode."""
    seed: np.uint64
    streams: Streams

    @property
    def draws(self) -> Draws:
        """Random numbers of this step for all environments."""

    @property
    def reward_sums(self) -> dict[str, Array]:
        """Weighted rewards summed over the open episode, {term: [num_envs]}; live arrays."""

    def state(self, name: str, *shape: int, dtype: str = "float64") -> Array:
        """A new array [num_envs, *shape] of zeros that is part of every snapshot."""

    def keep(self, name: str, array: Array) -> Array:
        """Add an array [num_envs, ...] to every snapshot; write to it in place."""


class Draws:
    """Counter-based random numbers of some environments.

    They are a function of key, environment, episode, step and a name, so a snapshot needs no state
    of generators and repeated calls return the same numbers.
    """

    def __init__(self, env: TaskEnv, env_ids: Array | slice = slice(None)) -> None:
        self._env, self._env_ids = env, env_ids

    def uniform(self, name: str, *shape: int, low: Any = 0.0, high: Any = 1.0) -> Array:
        """[k, *shape] float64 in [low, high); the bounds may be arrays of that shape."""
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
        """[k] int64 from low to high inclusive."""
        found: Array = np.floor(self.uniform(name, low=low, high=high + 1)).astype(np.int64)
        return found

    @cached_property
    def generators(self) -> list[np.random.Generator]:
        """A numpy generator per environment, at the start of its episode's stream."""
        ids = np.arange(self._env.num_envs)[self._env_ids]
        return self._env.streams.begin(ids.tolist(), self._env.episode[ids].tolist())

    def _moments(self) -> Array:
        """[k] uint64: hash of environment, episode and step."""
        env, ids = self._env, self._env_ids
        who = np.arange(env.num_envs, dtype=np.uint64)[ids] + np.uint64(1)
        episode = mix(mix(env.seed + who * GOLDEN) + env.episode[ids].astype(np.uint64) * GOLDEN)
        moments: Array = mix(episode + env.elapsed[ids].astype(np.uint64) * GOLDEN)
        return moments


class Part:
    """A component of a task with state or an effect on the simulation. Override the hooks it
    needs."""

    _env: TaskEnv | None = None

    @property
    def env(self) -> TaskEnv:
        """The environments that the part belongs to."""
        if self._env is None:
            raise UsageError(
                f"This {type(self).__name__} has no environment: add it to Task(parts=...)."
            )
        return self._env

    def edit(self, spec: mujoco.MjSpec) -> None:
        """Add sensors, actuators or terrain to the model before it is compiled. Called again for
        the model that pictures are drawn from."""

    def bind(self) -> None:
        """Bind arrays and look up ids. Called once `self.env` is set, before the first step."""

    def reset(self, env_ids: Array, draws: Draws) -> None:
        """Write the initial state of environments [k], which hold the model's defaults."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        """Start the episodes of environments [k]. Called after `reset`, with derived fields
        computed."""

    def act(self) -> None:
        """Called before the physics of every control step."""

    def update(self) -> None:
        """Called after the physics of every control step."""

    def change(self) -> None:
        """Called after the rewards of a step, before the observations, to change commands."""

    def restored(self) -> None:
        """Called after a snapshot was restored, to update what is derived from the state."""

    def markers(self, env_id: int, step: int) -> Sequence[Marker]:
        """Shapes that films and windows draw of an environment beside the model, for example the
        command that it follows; step: control steps since the start of its episode. Not called in
        training. May be called within a control step: read arrays, no `derived`."""
        return ()


P = TypeVar("P", bound=Part)


class derived(Generic[P]):  # noqa: N801 - used like `property`
    """A property of a part, computed once per state of the simulation."""

    def __init__(self, compute: Callable[[P], Any]) -> None:
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
    """The action term: `apply` writes the controls for actions [num_envs, n].

    `delay`: control steps until an action takes effect (minimum, maximum), drawn per episode.
    """

    size: int
    """Dimension of an action, set in `bind`."""
    limit: float = 1.0

    def __init__(self, delay: tuple[int, int] = (0, 0)) -> None:
        if not 0 <= delay[0] <= delay[1]:
            raise UsageError(
                f"The delay of actions must be (minimum, maximum) in steps, not {delay}."
            )
        self.delay = delay

    @property
    def spec(self) -> ActionSpec:
        return ActionSpec("box", low=(-self.limit,) * self.size, high=(self.limit,) * self.size)

    @abstractmethod
    def apply(self, actions: Array) -> None:
        """Write the controls for actions [num_envs, n]."""

    def mirror(self) -> Reflection | None:
        """The reflection of an action left for right; None if it is not known."""
        return None


@dataclass(frozen=True)
class Task:
    """A task: model, actions, observations, rewards and terminations."""

    model: Model
    action: Action
    observations: Mapping[str, Mapping[str, Term | Observation] | Group]
    """{observation: {term: function}}: terms are concatenated in order. Policies read "state"."""
    rewards: Mapping[str, tuple[Term, float]]
    """{term: (function, weight)}; a term of weight 0 is not computed."""
    max_episode_steps: int
    """Control steps after which an episode is truncated."""
    substeps: int = 1
    """Physics steps per control step."""
    terminations: Mapping[str, Term] = field(default_factory=dict)
    """{term: [num_envs] bool}: any of them terminates the episode."""
    success: Term | Literal["survived"] | None = "survived"
    """[num_envs] bool, evaluated when an episode ends. "survived": the episode was truncated, not
    terminated; None: the task has no success, only a return."""
    statistics: Mapping[str, Term] = field(default_factory=dict)
    """{name: [num_envs]}: logged when an episode ends."""
    outcomes: tuple[str, ...] = ()
    """Names of the values of the statistic "outcome", success first; (): the terminations."""
    parts: Sequence[Part] = ()
    """In the order of their calls; the action comes last if it is not among them."""
    view: Any = None
    """The argument of terms, with live arrays; None: the environment."""
    time_limit: Term | None = None
    """Episode length [num_envs] in control steps, if it differs between environments."""
    motions: tuple[str, ...] = ()
    """Names of the reference motions."""
    camera: Camera = field(default_factory=Camera)
    """Camera of films and windows."""
    picture_camera: Camera | None = None
    """Camera of the image observation; None: `camera`."""
    lagged: bool = False
    """Whether derived fields lag the state by one physics step, as after `mj_step`."""

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts, with the action."""
        last = () if self.action in self.parts else (self.action,)
        return *self.parts, *last


SIMULATION, TARGET = "_simulation", "_target"
"""Observations that pictures are rendered from; they are not stored."""
PROGRESS = "progress"
"""True progress [1], from 0 at the start to 1 at success: for evaluation, not for learning."""
PROPRIO = "proprio"
"""Observation of proprioception."""


class Actor(Protocol):
    """The policy of a demonstration: a scripted expert or a trained policy."""

    def reset(self, env_ids: Array) -> None:
        """Start new episodes in environments [k]."""
        ...

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, n] in [-1, 1]."""
        ...


class Demonstration(Part):
    """Progress measure and expert of a task: a part after its other parts,
    `TaskConfig.demonstration`.

    The constructor takes the task's config and its view, which has a `target` [num_envs, 3].
    """

    has_gripper = False
    """Whether the last action controls a gripper, open if positive."""

    def __init__(self, config: Any, view: Any) -> None:
        self.config, self.view = config, view

    @abstractmethod
    def progress(self) -> Array:
        """Progress [num_envs] of each episode; it is clipped to [0, 1]."""

    @abstractmethod
    def proprioception(self) -> tuple[Array, ...]:
        """Proprioceptive measurements, [num_envs, n] each."""

    @abstractmethod
    def expert(self) -> Actor:
        """A scripted policy that solves the task."""

    def observations(self) -> dict[str, Mapping[str, Term] | Group]:
        """Observations in addition to the task's own."""
        state: dict[str, Term] = {"state": lambda view: self.env.simulation.state}
        return {
            PROPRIO: {"own": lambda view: np.concatenate(self.proprioception(), axis=1)},
            PROGRESS: {"progress": lambda view: np.clip(self.progress(), 0.0, 1.0)[:, None]},
            SIMULATION: Group(state, dtype="float64"),
            TARGET: Group({"target": lambda view: view.target}, dtype="float64"),
        }
