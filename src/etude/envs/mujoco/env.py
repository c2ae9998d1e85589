"""Tasks on MuJoCo: a task is a model, parts and named terms, and this runs many of it at once.

A `TaskConfig` describes a task in `define`, which returns a `Task`. Terms are plain functions that
give [num_envs] or [num_envs, n] numbers. What has state, or acts on the simulation, is a `Part`:
robots, commands, random pushes. Arrays that a part asks `env.state` for are in every snapshot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, Literal, TypeVar

import mujoco
import numpy as np

from etude.core.contracts import (
    ActionSpec,
    Array,
    ArraySpec,
    EnvSpec,
    Exactness,
    Observations,
    StepResult,
)
from etude.core.errors import UsageError
from etude.core.keys import GOLDEN, Key, Streams, mix
from etude.core.trees import Tree
from etude.envs.config import EnvConfig
from etude.envs.mujoco.observing import Group, Observation, Reader, check_terms
from etude.envs.mujoco.simulation import (
    Camera,
    Model,
    Simulation,
    avoid_sparse,
    compile_model,
    digest,
)

A = TypeVar("A")
Term = Callable[[Any], Array]
"""A function of the task's view, or of the environment where the task has none."""


class Draws:
    """Random numbers of some environments, decided by key, environment, episode, step and a name.

    Nothing is stored between steps, so nothing has to be in a snapshot, and the same numbers come
    however often they are asked for.
    """

    def __init__(self, env: MujocoEnv, env_ids: Array | slice = slice(None)) -> None:
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

    _env: MujocoEnv | None = None

    @property
    def env(self) -> MujocoEnv:
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


class TaskConfig(EnvConfig):
    """The config of a task on MuJoCo: its fields are options, `define` is the task."""

    @abstractmethod
    def define(self) -> Task:
        """The task with these options. Called once for every group of environments."""

    def build(self, num_envs: int, threads: int = 1) -> MujocoEnv:
        return MujocoEnv(self.define(), num_envs, threads)

    def exactness(self) -> Exactness:
        """Such tasks are exact: state is declared, and `etude check` finds what is not."""
        return Exactness(True, "the snapshot holds every number the simulation continues from")


class MujocoEnv:
    """Many environments of one task, a `BatchEnv`."""

    state_advice = "What a part remembers is env.state(...), made in bind() and set in reset()."

    def __init__(self, task: Task, num_envs: int, threads: int = 1) -> None:
        self.task, self.num_envs = task, num_envs
        self.parts = task.all_parts
        self.edits = self._with("edit")
        """What parts add to the model before it is compiled."""
        model = compile_model(task.model, self.edits)
        notes = avoid_sparse(model)
        self.simulation = Simulation(model, num_envs, threads)
        self.dt = self.simulation.model.opt.timestep * task.substeps
        """Seconds of a control step."""
        self.episode: Array = np.zeros(num_envs, np.int64)
        """[num_envs]: which episode each environment is in."""
        self.elapsed: Array = np.zeros(num_envs, np.int64)
        """[num_envs]: control steps since the episode's start."""
        self.tick = 0  # counts states of the simulation, for `derived`
        self.seed = np.uint64(0)
        self.streams = Streams(num_envs)
        self.physics_seconds = 0.0
        self._states: dict[str, Array] = {}
        self.view = self if task.view is None else task.view
        for part in self.parts:
            part._env = self
        for part in self.parts:
            part.bind()
        self._acting, self._updating, self._changing = map(self._with, ("act", "update", "change"))
        self._resetting, self._beginning = self._with("reset"), self._with("begin")
        self._delayed: Array | None = None
        if task.action.delay[1]:
            self._delay = self.state("action/delay", dtype="int64")
            self._delayed = self.state(
                "action/queue", task.action.delay[1] + 1, task.action.size, dtype="float32"
            )
        self.action: Array = self.state("action", task.action.size)
        """[num_envs, n]: the policy's last action."""
        self.last_action: Array = self.state("last_action", task.action.size)
        """[num_envs, n]: the one before it; zero at an episode's start."""
        self.terminated: Array = np.zeros(num_envs, np.bool_)
        """[num_envs]: whether the last step ended the episode."""
        self.ended_by: dict[str, Array] = {}  # {termination: [num_envs] bool} of the last step
        self._names = [name for name, (_, weight) in task.rewards.items() if weight]
        self._weighted: Array = np.zeros((len(self._names), num_envs))
        self._sums = np.zeros_like(self._weighted)
        self.simulation.forward()
        self._update()
        check_terms(self)
        self._readers = {
            name: Reader(self, name, terms) for name, terms in task.observations.items()
        }
        scored = () if task.success is None else ("is_success", "outcome")
        rewarded = (f"reward/{name}" for name in self._names)
        self.spec = EnvSpec(
            observations={
                name: ArraySpec(array.shape[1:], str(array.dtype))
                for name, array in self._observe().items()
            },
            action=task.action.spec,
            max_episode_steps=task.max_episode_steps,
            statistics=tuple(dict.fromkeys((*scored, *rewarded, *task.statistics))),
            substeps=task.substeps,
            model=digest(self.simulation.model),
            outcomes=task.outcomes or ("success", *task.terminations, "no success in time"),
            motions=task.motions,
            notes=notes,
        )

    def _with(self, hook: str) -> list[Any]:
        """That method of the parts which have their own."""
        return [
            getattr(part, hook)
            for part in self.parts
            if getattr(type(part), hook) is not getattr(Part, hook)
        ]

    def state(self, name: str, *shape: int, dtype: str = "float64") -> Array:
        """A new live array [num_envs, *shape] of zeros that is part of every snapshot."""
        return self.keep(name, np.zeros((self.num_envs, *shape), dtype))

    def keep(self, name: str, array: Array) -> Array:
        """Make a live array [num_envs, ...] part of every snapshot; it must be written in place."""
        name = name.replace("/", ".")
        if name in self._states:
            raise UsageError(f"Two parts of a task have a state named {name!r}: rename one.")
        self._states[name] = array
        return array

    @property
    def reward_sums(self) -> dict[str, Array]:
        """{term: [num_envs]}: weighted, added up since the episode's start; live arrays."""
        return dict(zip(self._names, self._sums, strict=True))

    @property
    def draws(self) -> Draws:
        """Random numbers for this step, in all environments."""
        return Draws(self)

    def ability(self, kind: type[A]) -> A | None:
        """This, or the part of it that has an ability."""
        return next((each for each in (self, *self.parts) if isinstance(each, kind)), None)

    def describe(self) -> Tree:
        """What runs a policy of this task elsewhere; see `etude.core.abilities.Described`."""
        from etude.envs.mujoco.describing import describe

        return describe(self)

    def reset(self, key: Key) -> Observations:
        """Every environment at the start of its episode 0."""
        self._use(key)
        self.episode[:] = 0
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def restart(self) -> Observations:
        """Every environment leaves its episode, unreported, and begins its next one."""
        self.episode += 1
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def step(self, actions: Array) -> StepResult:
        """One control step; environments that finish are reset in it. actions: [num_envs, n]."""
        task = self.task
        self.last_action[:] = self.action
        self.action[:] = actions
        task.action.apply(self._late(actions))
        for act in self._acting:
            act()
        self.physics_seconds = self.simulation.step(task.substeps, task.lagged)
        self.elapsed += 1
        self._update()
        terminated = np.zeros(self.num_envs, np.bool_)
        for name, ends in task.terminations.items():
            self.ended_by[name] = ends(self.view).copy()
            terminated |= self.ended_by[name]
        self.terminated = terminated
        reward = self._reward()
        limit = task.max_episode_steps if task.time_limit is None else task.time_limit(self.view)
        truncated = self.elapsed >= limit
        # A task that ended on its last step ended: for bools "greater" is "and not".
        np.greater(truncated, terminated, out=truncated)
        env_ids = (terminated | truncated).nonzero()[0]
        for change in self._changing:
            change()
        for reader in self._readers.values():
            reader.push()
        obs = self._observe()
        if not env_ids.size:
            none = {name: array[:0] for name, array in obs.items()}
            return StepResult(obs, reward, terminated, truncated, env_ids, none)
        final_obs = {name: array[env_ids] for name, array in obs.items()}
        episodes = self._report(env_ids)
        self.episode[env_ids] += 1
        self._begin(env_ids)
        obs = self._observe()
        return StepResult(obs, reward, terminated, truncated, env_ids, final_obs, episodes)

    def _late(self, actions: Array) -> Array:
        """[num_envs, n]: the actions that take effect now."""
        if self._delayed is None:
            return actions
        self._delayed[:, 1:] = self._delayed[:, :-1].copy()
        self._delayed[:, 0] = actions
        late: Array = self._delayed[np.arange(self.num_envs), self._delay]
        return late

    def _update(self) -> None:
        self.tick += 1
        for update in self._updating:
            update()

    def _reward(self) -> Array:
        """[num_envs] float32: the weighted terms, which are also added to the episodes' sums."""
        for name, weighted in zip(self._names, self._weighted, strict=True):
            term, weight = self.task.rewards[name]
            np.multiply(term(self.view), weight, out=weighted)
        self._sums += self._weighted
        total: Array = np.add.reduce(self._weighted, axis=0)
        return total.astype(np.float32)

    def _observe(self) -> Observations:
        """{name: [num_envs, n]}, new arrays."""
        return {name: reader.read() for name, reader in self._readers.items()}

    def _report(self, env_ids: Array) -> dict[str, Array]:
        """{name: [k] float64} about the episodes that end in environments [k]."""
        sums = self._sums[:, env_ids]
        return {
            **self._success(env_ids),
            **{f"reward/{name}": total for name, total in zip(self._names, sums, strict=True)},
            **{
                name: term(self.view)[env_ids].astype(np.float64)
                for name, term in self.task.statistics.items()
            },
        }

    def _success(self, env_ids: Array) -> dict[str, Array]:
        """Whether the episodes succeed that end in environments [k], and what ended the others."""
        success = self.task.success
        if success is None:
            return {}
        succeeded = ~self.terminated if success == "survived" else success(self.view)
        if succeeded.dtype != bool:
            raise UsageError(f"`success` of the task gives {succeeded.dtype}: let it give bool.")
        ways = np.stack([succeeded, *self.ended_by.values(), np.ones_like(succeeded)])[:, env_ids]
        return {"is_success": ways[0].astype(np.float64), "outcome": ways.argmax(0) * 1.0}

    def _begin(self, env_ids: Array) -> None:
        """Environments [k] at the start of their current episode."""
        draws = Draws(self, env_ids)
        self.elapsed[env_ids] = 0
        self._sums[:, env_ids] = 0.0
        self.action[env_ids] = self.last_action[env_ids] = 0.0
        if self._delayed is not None:
            self._delayed[env_ids] = 0.0
            self._delay[env_ids] = draws.integers("action/delay", *self.task.action.delay)
        self.simulation.reset(env_ids)
        for reset in self._resetting:
            reset(env_ids, draws)
        if self.task.forward_after_reset:
            self.simulation.forward(env_ids)
        self.tick += 1
        for begin in self._beginning:
            begin(env_ids, draws)
        for reader in self._readers.values():
            reader.begin(env_ids, draws)

    def _use(self, key: Key) -> None:
        self.streams.use(key)
        self.seed = np.uint64(key.child("draws").integer())

    def snapshot(self) -> Tree:
        """The simulation, values of the model that differ, episode counters, open sums, states."""
        return {
            "simulation": self.simulation.snapshot(),
            "episode": self.episode.copy(),
            "elapsed": self.elapsed.copy(),
            "sums": {name: total.copy() for name, total in self.reward_sums.items()},
            "task": {name: array.copy() for name, array in self._states.items()},
        }

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot, on any instance with as many environments."""
        self.simulation.restore(snapshot["simulation"])
        self._use(key)
        self.episode[:] = snapshot["episode"]
        self.elapsed[:] = snapshot["elapsed"]
        for name, total in self.reward_sums.items():
            total[:] = snapshot["sums"][name]
        for name, array in self._states.items():
            if name not in snapshot["task"]:
                raise UsageError(
                    f"This snapshot has no '{name}': it is of another version of the task, or of "
                    "Etude. The policy can still be loaded and evaluated."
                )
            array[...] = snapshot["task"][name]
        self.tick += 1
        for part in self.parts:
            part.restored()

    def close(self) -> None:
        """Nothing to release: MuJoCo's memory goes with the object."""
