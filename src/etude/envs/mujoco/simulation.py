"""MuJoCo's native batch as a simulation that cannot fail silently, and how pictures show it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal, TypeAlias

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS, Batch, SimulationError

from etude.core.contracts import Array
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.trees import Tree

Model: TypeAlias = str | Path | mujoco.MjSpec | mujoco.MjModel
"""An MJCF file, the name of a robot of MuJoCo Menagerie, MJCF text, a spec, or a compiled model,
which no part can add to."""

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


def _warn(text: str) -> None:
    """Print what MuJoCo remarks on a model. What it remarks on a step, of every environment, is an
    error here, see `Simulation._check`."""
    if "Time = " not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)


mujoco.set_mju_user_warning(_warn)


class Simulation:
    """Parallel environments of one model. Bound arrays are live; state fields are writable."""

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
        """Called after every physics step, while finished environments stand where they ended."""
        self._batch.reset(stage=_NO_STAGE)
        # Copying a state costs a tenth of MuJoCo's own reset and gives the same numbers: zero
        # velocity, time, controls, forces and warm start.
        self._initial: Array = self._batch.state[0].copy()

    @property
    def state(self) -> Array:
        """[num_envs, n] float64: everything MuJoCo integrates, warm start included. Live."""
        state: Array = self._batch.state
        return state

    def bind(self, name: str) -> Array:
        """A live [num_envs, ...] array over an MjData field; derived fields are read-only.

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
        """[num_envs, 3] float64, live: where a site is."""
        return self.bind("site_xpos")[:, self.model.site(name).id]

    def jacobians(self, body: int, point: Array) -> tuple[Array, Array]:
        """How a point [num_envs, 3] of a body moves, turns with the joints: [num_envs, 3, nv]."""
        translation, rotation = self._batch.jac(body, point)
        return translation, rotation

    def expand(self, name: str) -> Array:
        """Values per environment of a model field, [num_envs, ...], live and writable.

        They are part of the snapshot. After writing masses, sizes and the like call
        `update_constants`, so that what MuJoCo derives from them follows.
        """
        array: Array = self._batch.expand(name)
        self._find_expanded()
        return array

    def update_constants(self, env_ids: Array | None = None) -> None:
        """Recompute what MuJoCo derives from expanded model fields."""
        self._batch.set_const(env_ids)
        self._find_expanded()

    def _find_expanded(self) -> None:
        self._expanded = tuple(
            name for name in sorted(MODEL_FIELDS) if self._batch.expanded(name) is not None
        )

    def step(self, substeps: int, lagged: bool = False) -> float:
        """Advance all environments; the seconds it took.

        Derived fields then describe the new state, or with `lagged` that before the last substep.
        """
        np.copyto(self._before, self._batch.state)
        # One sum finds a NaN or an infinity anywhere; MuJoCo would clamp an infinite control.
        if not np.isfinite(np.add.reduce(self._before, axis=None)):
            self._name_input()
        start = perf_counter()
        try:
            if self.watch is not None:  # The same numbers, one physics step after the other.
                for _ in range(substeps - 1):
                    self._batch.step(nstep=1, stage=_NO_STAGE)
                    self.watch()
                substeps = 1
            self._batch.step(nstep=substeps, stage=_NO_STAGE if lagged else _VELOCITY_STAGE)
        except SimulationError as error:
            self._fail(int(error.ids[0]), self._batch.error(int(error.ids[0])))
        seconds = perf_counter() - start
        self._check()
        if self.watch is not None:
            self.watch()
        return seconds

    def reset(self, env_ids: Array) -> None:
        """Environments [k] to the model's initial state, with derived fields not yet computed."""
        self._batch.state[env_ids] = self._initial

    def forward(self, env_ids: Array | None = None) -> None:
        """Derived fields of environments [k] from their state, which stays as it is."""
        np.copyto(self._before, self._batch.state)
        # Without the acceleration stage its fields would be those of whichever simulation the
        # engine's thread computed before.
        stage = _ACCELERATION_STAGE if self._accelerations else _VELOCITY_STAGE
        try:
            self._batch.forward(env_ids, stage=stage)
        except SimulationError as error:
            self._fail(int(error.ids[0]), self._batch.error(int(error.ids[0])))
        self._check()

    def _check(self) -> None:
        # MuJoCo resets a diverged simulation by itself and goes on; only this counter tells.
        if not self._warnings.any():
            return
        env_id, code = (int(index) for index in np.argwhere(self._warnings)[0])
        if code in _MEMORY_REASONS:
            raise EtudeError(
                f"Environment {env_id}: {_REASONS[code]}; give the model more memory "
                "(<size memory=.../>) or fewer contacts."
            )
        self._fail(env_id, _REASONS[code])

    def _name_input(self) -> None:
        """Raise about the first number in the state that is not finite."""
        for name in _INPUTS:
            bad = np.argwhere(~np.isfinite(self.bind(name)))
            if bad.size:
                self._fail(int(bad[0, 0]), f"{name}[{bad[0, 1]}] is NaN or infinite")

    def _fail(self, env_id: int, reason: str) -> None:
        arrays = {"state": self._before[env_id].copy()}
        for name in self._expanded:
            arrays[f"model.{name}"] = self._batch.expanded(name)[env_id].copy()
        raise NonFinite(f"physics of environment {env_id}: {reason}", arrays)

    def snapshot(self) -> Tree:
        """{"state": [num_envs, n], "model", "accelerations": {field: [num_envs, ...]}}, copied."""
        return {
            "state": self._batch.state.copy(),
            "model": {name: self._batch.expanded(name).copy() for name in self._expanded},
            "accelerations": {name: array.copy() for name, array in self._accelerations.items()},
        }

    def restore(self, snapshot: Tree) -> None:
        """Continue from a snapshot of as many environments; derived fields are computed."""
        state = snapshot["state"]
        if state.shape != self._batch.state.shape:
            raise UsageError(
                f"This snapshot has {state.shape[0]} environments of {state.shape[1]} numbers, the "
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
class Camera:
    """Where the camera of a task stands, and how the view's `target` is drawn, if it has one."""

    look_at: tuple[float, float, float] | None = None
    """m; None: the middle of what moves."""
    follow: str | None = None
    """A body that stays above `look_at`, wherever it goes; None: the root of the robot, where it
    floats and no `look_at` is given."""
    distance: float | None = None
    """m from it; None: so that what moves is seen whole; of a robot on a fixed base, wherever its
    joints take it."""
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


def load_spec(model: str | Path | mujoco.MjSpec) -> mujoco.MjSpec:
    """A spec that can be edited: of a file or a name, of MJCF text or of a spec."""
    if isinstance(model, mujoco.MjSpec):
        return model.copy()
    try:
        if "<" in str(model):
            return mujoco.MjSpec.from_string(str(model))
        return mujoco.MjSpec.from_file(str(model_file(model)))
    except ValueError as error:
        raise UsageError(f"MuJoCo cannot read the model {model}: {error}") from error


def compile_model(
    model: Model, edits: Sequence[Callable[[mujoco.MjSpec], None]] = ()
) -> mujoco.MjModel:
    """The model with what parts add to it, which is their method `edit`."""
    if isinstance(model, mujoco.MjModel):
        if edits:
            raise UsageError(
                f"{type(getattr(edits[0], '__self__', edits[0])).__name__} adds to the model, and "
                "a compiled one cannot be changed: give the task a file or an MjSpec."
            )
        return model
    spec = load_spec(model)
    for edit in edits:
        edit(spec)
    try:
        return spec.compile()
    except ValueError as error:
        raise UsageError(f"MuJoCo cannot compile the model: {error}") from error


def avoid_sparse(model: mujoco.MjModel) -> tuple[str, ...]:
    """Set dense Jacobians where MuJoCo computes wrong with sparse ones; notes for the plan.

    4.0.0 builds a wrong Hessian of the Newton solver from a sparse constraint Jacobian, which it
    chooses by itself from 60 degrees of freedom on. 4.0.1 mends that.
    """
    if mujoco.mj_versionString() != "4.0.0" or not mujoco.mj_isSparse(model):
        return ()
    model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
    return (
        f"The model has {model.nv} degrees of freedom and is simulated with dense Jacobians, which "
        "may take longer: MuJoCo 4.0.0 computes wrong accelerations with sparse ones.",
    )


def digest(model: mujoco.MjModel) -> str:
    """SHA-256 over the numbers of a model that move it: without names, files and looks."""
    found, looks = hashlib.sha256(), ("name", "text", "tex_", "mat_", "light_", "cam_", "skin_")
    for part in (model, model.opt):
        for name in sorted(dir(part)):
            value = None if name.startswith(("_", *looks)) else getattr(part, name)
            shown = name.endswith(("_rgba", "_user", "pathadr"))
            if isinstance(value, int | float | np.ndarray) and not shown:
                found.update(name.encode() + np.asarray(value).tobytes())
    return found.hexdigest()


def model_file(model: str | Path) -> Path:
    """An MJCF or URDF file, or that of a robot of MuJoCo Menagerie by its name.

    A name is "unitree_go1", which is the robot on its floor, or "unitree_go1/go1", which is one of
    its files. The package `mujoco-menagerie` finds it, and downloads it when it is first used.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    robot, _, entry = str(model).partition("/")
    if path.suffix or not robot.isidentifier() or "/" in entry:
        raise UsageError(f"There is no model file {path}.")
    try:
        import mujoco_menagerie as menagerie
    except ImportError:
        raise UsageError(
            f"There is no model file {path}. If {robot} is a robot of MuJoCo Menagerie, install "
            "its package: pip install mujoco-menagerie."
        ) from None
    try:
        return Path(menagerie.get(robot).xml(entry or None))
    except menagerie.UnknownRobotError as error:
        from etude.core.explain import nearest

        near = nearest(robot, menagerie.names())
        raise UsageError(
            f"There is no model file {path}, and no robot {robot} in MuJoCo Menagerie."
            + (f" Did you mean {near}?" if near else "")
        ) from error
    except menagerie.MenagerieError as error:
        raise UsageError(f"MuJoCo Menagerie cannot give {model}: {error}") from error
