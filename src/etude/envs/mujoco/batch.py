"""MuJoCo's native batch as a simulation that cannot fail silently, and the base of tasks on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, Literal, TypeVar

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS, Batch, SimulationError

from etude.core.contracts import (
    ActionSpec,
    Array,
    ArraySpec,
    EnvSpec,
    Exactness,
    Observations,
    StepResult,
)
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.keys import Key, Streams
from etude.core.trees import Tree
from etude.envs.config import EnvConfig

View = TypeVar("View")
Term = Callable[[View], Array]

_NO_STAGE = int(mujoco.mjtStage.mjSTAGE_NONE)
_VELOCITY_STAGE = int(mujoco.mjtStage.mjSTAGE_VEL)
_ACCELERATION_STAGE = int(mujoco.mjtStage.mjSTAGE_ACC)
_REASONS = (
    "the inertia matrix is singular",
    "the contact buffer is full",
    "the constraint buffer is full",
    "a position is NaN, infinite or huge",
    "a velocity is NaN, infinite or huge",
    "an acceleration is NaN, infinite or huge",
    "a control is NaN, infinite or huge",
)
_MEMORY_REASONS = (1, 2)
_INPUTS = ("ctrl", "qpos", "qvel", "act", "qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat")
"""State fields that tasks write."""
_UP_TO_VELOCITY = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat"),
    *("site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "subtree_com", "cvel", "cinert"),
    *("actuator_length", "actuator_velocity", "ten_length", "ten_velocity"),
    *("qfrc_bias", "qfrc_passive"),
)
"""Derived fields that MuJoCo computes before accelerations. Any other counts as one of the
acceleration stage: where it is not, resets only take longer than they need."""
_BY_THE_INTEGRATOR = ("qDeriv", "qH", "qHDiagInv", "qLU")


class Simulation:
    """Rows of one model. Bound arrays are live; state fields among them are writable."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, threads: int = 1) -> None:
        self.model = model
        self.num_envs = num_envs
        self._batch = Batch(model, num_envs, max(1, threads))
        self._warnings: Array = self._batch.warning[:, :, 1]
        self._before: Array = np.empty_like(self._batch.state)
        self._expanded: tuple[str, ...] = ()
        self._accelerations: dict[str, Array] = {}
        """Bound fields of the acceleration stage."""
        self.watch: Callable[[], None] | None = None
        """Called after every step, while finished rows still stand where they ended."""
        self._batch.reset(stage=_NO_STAGE)
        # Copying a row costs a tenth of MuJoCo's own reset and gives the same numbers: zero
        # velocity, time, controls, forces and warm start.
        self._initial: Array = self._batch.state[0].copy()

    @property
    def state(self) -> Array:
        """[rows, n] float64: everything MuJoCo integrates, warm start included. Live."""
        state: Array = self._batch.state
        return state

    def bind(self, name: str) -> Array:
        """A live [rows, ...] array over an MjData field; derived fields are read-only.

        Fields of the acceleration stage (forces, accelerations, touch) describe the last substep
        after a step, and the state itself after a reset.
        """
        if name in _BY_THE_INTEGRATOR:
            raise UsageError(
                f"{name} has no value after a reset, because MuJoCo computes it only while it "
                "integrates: bind M, qfrc_bias or another field of the forward dynamics instead."
            )
        array: Array = self._batch.bind(name)
        if not array.flags.writeable and self._is_acceleration(name):
            self._accelerations[name] = array
        return array

    def _is_acceleration(self, name: str) -> bool:
        """Whether a derived field is computed only in the acceleration stage."""
        if name == "sensordata":
            return bool((self.model.sensor_needstage == _ACCELERATION_STAGE).any())
        return name not in _UP_TO_VELOCITY

    def site(self, name: str) -> Array:
        """[rows, 3] float64, live: where a site is."""
        return self.bind("site_xpos")[:, self.model.site(name).id]

    def jacobians(self, body: int, point: Array) -> tuple[Array, Array]:
        """How a point [rows, 3] of a body moves and turns with the joints: [rows, 3, nv] each."""
        translation, rotation = self._batch.jac(body, point)
        return translation, rotation

    def expand(self, name: str) -> Array:
        """Per-row values of a model field, [rows, ...], live and writable.

        They are part of the snapshot. After writing masses, sizes and the like call
        `update_constants`, so that what MuJoCo derives from them follows.
        """
        array: Array = self._batch.expand(name)
        self._find_expanded()
        return array

    def update_constants(self, rows: Array | None = None) -> None:
        """Recompute what MuJoCo derives from expanded model fields."""
        self._batch.set_const(rows)
        self._find_expanded()

    def _find_expanded(self) -> None:
        self._expanded = tuple(
            name for name in sorted(MODEL_FIELDS) if self._batch.expanded(name) is not None
        )

    def step(self, substeps: int) -> float:
        """Advance every row; derived fields then describe the new state. The seconds it took."""
        np.copyto(self._before, self._batch.state)
        # One sum finds a NaN or an infinity anywhere; MuJoCo would clamp an infinite control.
        if not np.isfinite(np.add.reduce(self._before, axis=None)):
            self._name_input()
        start = perf_counter()
        try:
            self._batch.step(nstep=substeps, stage=_VELOCITY_STAGE)
        except SimulationError as error:
            self._fail(int(error.ids[0]), self._batch.error(int(error.ids[0])))
        seconds = perf_counter() - start
        self._check()
        if self.watch is not None:
            self.watch()
        return seconds

    def reset(self, rows: Array) -> None:
        """Rows [k] to the model's initial state, with derived fields still to be computed."""
        self._batch.state[rows] = self._initial

    def forward(self, rows: Array | None = None) -> None:
        """Derived fields of rows [k] from their state, which stays as it is."""
        np.copyto(self._before, self._batch.state)
        # Without the acceleration stage its fields would be those of whichever simulation the
        # engine's thread computed before.
        stage = _ACCELERATION_STAGE if self._accelerations else _VELOCITY_STAGE
        try:
            self._batch.forward(rows, stage=stage)
        except SimulationError as error:
            self._fail(int(error.ids[0]), self._batch.error(int(error.ids[0])))
        self._check()

    def _check(self) -> None:
        # MuJoCo resets a diverged simulation by itself and goes on; only this counter tells.
        if not self._warnings.any():
            return
        row, code = (int(index) for index in np.argwhere(self._warnings)[0])
        if code in _MEMORY_REASONS:
            raise EtudeError(
                f"Simulation row {row}: {_REASONS[code]}; give the model more memory "
                "(<size memory=.../>) or fewer contacts."
            )
        self._fail(row, _REASONS[code])

    def _name_input(self) -> None:
        """Raise about the first number in the state rows that is not finite."""
        for name in _INPUTS:
            bad = np.argwhere(~np.isfinite(self.bind(name)))
            if bad.size:
                self._fail(int(bad[0, 0]), f"{name}[{bad[0, 1]}] is NaN or infinite")

    def _fail(self, row: int, reason: str) -> None:
        arrays = {"state": self._before[row].copy()}
        for name in self._expanded:
            arrays[f"model.{name}"] = self._batch.expanded(name)[row].copy()
        raise NonFinite(f"physics of row {row}: {reason}", arrays)

    def snapshot(self) -> Tree:
        """{"state": [rows, n], "model" and "accelerations": {field: [rows, ...]}}, copied."""
        return {
            "state": self._batch.state.copy(),
            "model": {name: self._batch.expanded(name).copy() for name in self._expanded},
            "accelerations": {name: array.copy() for name, array in self._accelerations.items()},
        }

    def restore(self, snapshot: Tree) -> None:
        """Continue from a snapshot of as many rows; derived fields are computed."""
        state = snapshot["state"]
        if state.shape != self._batch.state.shape:
            raise UsageError(
                f"This snapshot has {state.shape[0]} rows of {state.shape[1]} numbers, the "
                f"simulation {self.num_envs} of {self._batch.state.shape[1]}."
            )
        model = snapshot["model"]
        for name in {*model, *self._expanded}:
            plain = self.model.opt if name.startswith("opt.") else self.model
            default = getattr(plain, name.removeprefix("opt."))
            self._batch.expand(name)[...] = model.get(name, default)
        self._find_expanded()
        self._batch.state[...] = state
        self._batch.warning[...] = 0
        self.forward()
        # These describe the last substep, which cannot be computed again from the state after it.
        for name, values in snapshot["accelerations"].items():
            if name in self._accelerations:
                _overwrite(self._accelerations[name], values)


def _overwrite(output: Array, values: Array) -> None:
    """Put values into an array that is otherwise only read, as the next step replaces them."""
    output.flags.writeable = True
    output[...] = values
    output.flags.writeable = False


@dataclass(frozen=True)
class Terms(Generic[View]):
    """What a task measures: named free functions of its view, each giving [rows] or [rows, n]."""

    observations: Mapping[str, Mapping[str, Term[View]]]
    """{observation: {term: [rows, n]}}, concatenated in order."""
    rewards: Mapping[str, Term[View]]
    """{term: [rows]}; the config gives the weights."""
    terminations: Mapping[str, Term[View]]
    """{term: [rows] bool}: any of them ends the episode."""
    success: Term[View]
    """[rows] bool, asked when an episode ends."""
    statistics: Mapping[str, Term[View]] = field(default_factory=dict)
    """{name: [rows]}, reported when an episode ends."""
    outcomes: tuple[str, ...] = ()
    """What the statistic "outcome" counts through, success first."""


@dataclass(frozen=True)
class Camera:
    """Where the camera of a task stands, and how the view's `target` is drawn, if it has one."""

    look_at: tuple[float, float, float] | None = None
    """m; None: the middle of the model, seen whole."""
    follow: str | None = None
    """A body that stays above `look_at`, wherever it goes."""
    distance: float = 1.5
    """m from it."""
    azimuth: float = 140.0
    """deg about the vertical: 180 looks along -x, at the front of an arm that faces +x."""
    elevation: float = -25.0
    """deg."""
    floor: float | None = None
    """m: where to draw a floor, for a model that has none."""
    target: Literal["sphere", "disc"] = "sphere"
    target_radius: float = 0.02
    """m."""
    target_sink: float = 0.0
    """m that the mark lies below the target: a disc is drawn where things rest, not in them."""


class MujocoConfig(EnvConfig):
    """The config of a task on `MujocoTask`."""

    def exactness(self) -> Exactness:
        """Such tasks are exact: the tests of their snapshots hold them to it."""
        return Exactness(True, "the snapshot holds every number the simulation continues from")


class MujocoTask(ABC, Generic[View]):
    """A `BatchEnv` of simulated rows; a task adds its view, its terms and the hooks below.

    The view is a dataclass of live arrays, built once: simulator fields and the task's own
    arrays, which the hooks write in place.
    """

    shot = Camera()
    """How pictures show the task."""
    aims = True
    """Whether `_aim` and the first observation read derived fields of rows just placed."""

    def __init__(
        self,
        simulation: Simulation,
        view: View,
        terms: Terms[View],
        *,
        weights: Mapping[str, float],
        action: ActionSpec,
        substeps: int,
        max_episode_steps: int,
    ) -> None:
        if set(weights) != set(terms.rewards):
            raise UsageError(
                f"The reward has the terms {', '.join(terms.rewards)}; "
                f"weights were given for {', '.join(weights)}."
            )
        self.simulation = simulation
        self.view = view
        self.num_envs = rows = simulation.num_envs
        self._terms = terms
        # A term that weighs nothing is neither computed nor reported.
        self._names = [name for name in terms.rewards if weights[name]]
        self._weighted = np.zeros((len(self._names), rows))
        self._sums = np.zeros_like(self._weighted)
        self._rewards = [
            (terms.rewards[name], weights[name], weighted)
            for name, weighted in zip(self._names, self._weighted, strict=True)
        ]
        self._episode = np.zeros(rows, np.int64)
        self._elapsed = np.zeros(rows, np.int64)
        self._limit: int | Array = max_episode_steps
        """Of every row, or [rows] where they differ."""
        self.physics_seconds = 0.0
        self._streams = Streams(rows)
        simulation.forward()
        self._measure()
        self.spec = EnvSpec(
            observations={
                name: ArraySpec(array.shape[1:], "float32")
                for name, array in self._observe().items()
            },
            action=action,
            max_episode_steps=max_episode_steps,
            statistics=(
                "is_success",
                *(f"reward/{name}" for name in self._names),
                *terms.statistics,
            ),
            substeps=substeps,
            outcomes=terms.outcomes,
        )

    @abstractmethod
    def _act(self, actions: Array) -> None:
        """Write the controls for actions [rows, n]."""

    def _measure(self) -> None:
        """Bring the task's own arrays in the view up to date, all rows, after physics; a view of
        the simulator's fields alone is so already."""

    @abstractmethod
    def _place(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        """Write the initial state of rows [k], which hold the model's defaults."""

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        """Draw what depends on where things are, once rows [k] have been placed."""

    def _memory(self) -> dict[str, Array]:
        """The task's live arrays [rows, ...] that decide the future; they are snapshotted."""
        return {}

    def reset(self, key: Key) -> Observations:
        """Every row at the start of its episode 0."""
        self._streams.use(key)
        self._episode[:] = 0
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def restart(self) -> Observations:
        """Every row leaves its episode, unreported, and begins its next one."""
        self._episode += 1
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def step(self, actions: Array) -> StepResult:
        """One control step; finished rows are reset in it. `actions`: [rows, n] float32."""
        self._act(actions)
        self.physics_seconds = self.simulation.step(self.spec.substeps)
        self._elapsed += 1
        self._measure()
        reward = self._reward()
        terminated = np.zeros(self.num_envs, np.bool_)
        for ends in self._terms.terminations.values():
            terminated |= ends(self.view)
        truncated = self._elapsed >= self._limit
        # A task that ended on its last step ended: for bools "greater" is "and not".
        np.greater(truncated, terminated, out=truncated)
        rows = (terminated | truncated).nonzero()[0]
        obs = self._observe()
        if not rows.size:
            none = {name: array[:0] for name, array in obs.items()}
            return StepResult(obs, reward, terminated, truncated, rows, none)
        final_obs = {name: array[rows] for name, array in obs.items()}
        episodes = self._report(rows)
        self._episode[rows] += 1
        self._begin(rows)
        obs = self._observe()
        return StepResult(obs, reward, terminated, truncated, rows, final_obs, episodes)

    def _reward(self) -> Array:
        """[rows] float32: the weighted terms, which are also added to the episodes' sums."""
        for term, weight, weighted in self._rewards:
            np.multiply(term(self.view), weight, out=weighted)
        self._sums += self._weighted
        total: Array = np.add.reduce(self._weighted, axis=0)
        return total.astype(np.float32)

    def _observe(self) -> Observations:
        """{name: [rows, n] float32}, new arrays."""
        return {
            name: np.concatenate(
                [term(self.view) for term in parts.values()], axis=1, dtype=np.float32
            )
            for name, parts in self._terms.observations.items()
        }

    def _report(self, rows: Array) -> dict[str, Array]:
        """{name: [k] float64} about the episodes that end in rows [k]."""
        success = self._terms.success(self.view)[rows].astype(np.float64)
        sums = self._sums[:, rows]
        statistics = {
            name: term(self.view)[rows].astype(np.float64)
            for name, term in self._terms.statistics.items()
        }
        rewards = {f"reward/{name}": total for name, total in zip(self._names, sums, strict=True)}
        return {"is_success": success, **rewards, **statistics}

    def _begin(self, rows: Array) -> None:
        """Rows [k] at the start of their current episode."""
        generators = self._streams.begin(rows.tolist(), self._episode[rows].tolist())
        self._elapsed[rows] = 0
        self._sums[:, rows] = 0.0
        self.simulation.reset(rows)
        self._place(rows, generators)
        if self.aims:
            self.simulation.forward(rows)
        self._aim(rows, generators)

    def snapshot(self) -> Tree:
        """State rows, per-row model values, episode counters, open sums, the task's memory."""
        return {
            "simulation": self.simulation.snapshot(),
            "episode": self._episode.copy(),
            "elapsed": self._elapsed.copy(),
            "sums": {name: self._sums[i].copy() for i, name in enumerate(self._names)},
            "task": {name: array.copy() for name, array in self._memory().items()},
        }

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot, on any instance with as many rows."""
        self.simulation.restore(snapshot["simulation"])
        self._streams.use(key)
        self._episode[:] = snapshot["episode"]
        self._elapsed[:] = snapshot["elapsed"]
        for index, name in enumerate(self._names):
            self._sums[index] = snapshot["sums"][name]
        for name, array in self._memory().items():
            array[...] = snapshot["task"][name]

    def close(self) -> None:
        """Nothing to release: MuJoCo's memory goes with the object."""
