"""Parallel simulation with MuJoCo's batch engine, with every failure raised; cameras and models."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, Protocol, TypeAlias

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS, Batch, SimulationError

from etude.core.contracts import Array
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.trees import Tree

Model: TypeAlias = str | Path | mujoco.MjSpec | mujoco.MjModel
"""An MJCF file, the name of a robot of MuJoCo Menagerie, MJCF text, a spec, or a compiled model,
to which parts cannot add."""

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
_UNSTABLE = (
    "; the simulation is unstable: a smaller timestep, softer actuators, or a start that fulfils "
    "all constraints may help"
)
_MEMORY_REASONS = (1, 2)
_ADDRESSES = {0: "qvel", 3: "qpos", 4: "qvel", 5: "qvel", 6: "ctrl"}
"""{reason: field whose index MuJoCo gives with its warning}."""
_INPUTS = ("ctrl", "qpos", "qvel", "act", "qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat")
"""State fields that tasks write."""
_UP_TO_VELOCITY = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat"),
    *("site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "subtree_com", "cvel", "cinert"),
    *("actuator_length", "actuator_velocity", "ten_length", "ten_velocity"),
    *("qfrc_bias", "qfrc_passive"),
)
"""Derived fields that MuJoCo computes before accelerations. All others are treated as fields of the
acceleration stage; for those that are not, a reset only takes longer."""
_BY_THE_INTEGRATOR = ("qDeriv", "qH", "qHDiagInv", "qLU")


def _warn(text: str) -> None:
    """Print MuJoCo's warnings about a model. Those about a step are raised as errors, see
    `Simulation._check`."""
    if "Time = " not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)


mujoco.set_mju_user_warning(_warn)


class Simulation:
    """Parallel environments of one model. Bound arrays are views; state fields are writable."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, threads: int = 1) -> None:
        self.model = model
        self.num_envs = num_envs
        self._batch = Batch(model, num_envs, max(1, threads))
        self._warnings: Array = self._batch.warning[:, :, 1]
        self._before: Array = np.empty_like(self._batch.state)
        self._expanded: tuple[str, ...] = ()
        self._accelerations: dict[str, Array] = {}
        """Bound fields of the acceleration stage."""
        self.watchers: list[Callable[[], None]] = []
        """Called after every physics step, before finished environments are reset."""
        self._batch.reset(stage=_NO_STAGE)
        # Copying this state costs a tenth of MuJoCo's reset and has the same result: zero velocity,
        # time, controls, forces and warm start.
        self._initial: Array = self._batch.state[0].copy()

    @property
    def state(self) -> Array:
        """[num_envs, n] float64: the integration state with the warm start; a view."""
        state: Array = self._batch.state
        return state

    def bind(self, name: str) -> Array:
        """View [num_envs, ...] of an MjData field; derived fields are read-only.

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
        """Position of a site, [num_envs, 3] float64; a view."""
        return self.bind("site_xpos")[:, self.model.site(name).id]

    def jacobians(self, body: int, point: Array) -> tuple[Array, Array]:
        """Jacobians (translation, rotation) [num_envs, 3, nv] of a point [num_envs, 3] of a
        body."""
        translation, rotation = self._batch.jac(body, point)
        return translation, rotation

    def expand(self, name: str) -> Array:
        """Per-environment values [num_envs, ...] of a model field; a writable view.

        They are part of the snapshot. Call `update_constants` after writing fields that MuJoCo
        derives constants from, such as masses and sizes.
        """
        array: Array = self._batch.expand(name)
        self._find_expanded()
        return array

    def update_constants(self, env_ids: Array | None = None) -> None:
        """Recompute the constants that MuJoCo derives from expanded model fields."""
        self._batch.set_const(env_ids)
        self._find_expanded()

    def _find_expanded(self) -> None:
        self._expanded = tuple(
            name for name in sorted(MODEL_FIELDS) if self._batch.expanded(name) is not None
        )

    def step(self, substeps: int, lagged: bool = False) -> float:
        """Advance all environments by `substeps` physics steps; returns the seconds taken.

        Derived fields describe the new state, or with `lagged` the state before the last substep.
        """
        np.copyto(self._before, self._batch.state)
        # One sum detects any NaN or infinity; MuJoCo would clamp an infinite control.
        if not np.isfinite(np.add.reduce(self._before, axis=None)):
            self._name_input()
        start = perf_counter()
        try:
            if self.watchers:  # Single physics steps give the same numbers.
                for _ in range(substeps - 1):
                    self._batch.step(nstep=1, stage=_NO_STAGE)
                    self._watch()
                substeps = 1
            self._batch.step(nstep=substeps, stage=_NO_STAGE if lagged else _VELOCITY_STAGE)
        except SimulationError as error:
            self._fail(int(error.ids[0]), self._batch.error(int(error.ids[0])))
        seconds = perf_counter() - start
        self._check()
        self._watch()
        return seconds

    def _watch(self) -> None:
        for watch in self.watchers:
            watch()

    def reset(self, env_ids: Array) -> None:
        """Set environments [k] to the model's initial state, without computing derived fields."""
        self._batch.state[env_ids] = self._initial

    def forward(self, env_ids: Array | None = None) -> None:
        """Compute the derived fields of environments [k] from their state."""
        np.copyto(self._before, self._batch.state)
        # Without the acceleration stage, its fields would be left from the simulation that the
        # engine's thread computed before.
        stage = _ACCELERATION_STAGE if self._accelerations else _VELOCITY_STAGE
        try:
            self._batch.forward(env_ids, stage=stage)
        except SimulationError as error:
            self._fail(int(error.ids[0]), self._batch.error(int(error.ids[0])))
        self._check()

    def _check(self) -> None:
        # MuJoCo resets a diverged simulation and continues; only this counter shows it.
        if not self._warnings.any():
            return
        env_id, code = (int(index) for index in np.argwhere(self._warnings)[0])
        if code in _MEMORY_REASONS:
            raise EtudeError(
                f"Environment {env_id}: {_REASONS[code]}; give the model more memory "
                "(<size memory=.../>) or fewer contacts."
            )
        found = int(self._batch.warning[env_id, code, 0])
        place = joint_at(self.model, found, _ADDRESSES[code]) if code in _ADDRESSES else ""
        fix = _UNSTABLE if _ADDRESSES.get(code) in ("qpos", "qvel") else ""
        self._fail(env_id, f"{_REASONS[code]}{place}{fix}")

    def _name_input(self) -> None:
        """Raise an error for the first number in the state that is not finite."""
        for name in _INPUTS:
            bad = np.argwhere(~np.isfinite(self.bind(name)))
            if bad.size:
                place = joint_at(self.model, int(bad[0, 1]), name)
                self._fail(int(bad[0, 0]), f"{name}[{bad[0, 1]}] is NaN or infinite{place}")

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
        """Restore a snapshot of the same number of environments, and compute derived fields."""
        state = snapshot["state"]
        if state.shape != self._batch.state.shape:
            raise UsageError(
                f"This snapshot has {state.shape[0]} environments of {state.shape[1]} numbers, and "
                f"the simulation {self.num_envs} of {self._batch.state.shape[1]}."
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
        # These describe the last substep, which cannot be recomputed from the state after it.
        for name, values in snapshot["accelerations"].items():
            if name in self._accelerations:
                _overwrite(self._accelerations[name], values)


def joint_at(model: mujoco.MjModel, index: int, name: str) -> str:
    """Name the joint or actuator of an index of qpos, qvel or ctrl: " at joint knee"; else ""."""
    if name == "ctrl":
        number = int(np.searchsorted(model.actuator_ctrladr, index, "right")) - 1
        actuator = model.actuator(number).name
        return f" at actuator {actuator}" if actuator else ""
    if name not in ("qpos", "qvel", "qfrc_applied"):
        return ""
    addresses = model.jnt_qposadr if name == "qpos" else model.jnt_dofadr
    joint = model.joint(int(np.searchsorted(addresses, index, "right")) - 1)
    body = model.body(int(model.jnt_bodyid[joint.id])).name
    return f" at joint {joint.name}" if joint.name else f" at a joint of body {body}"


def _overwrite(output: Array, values: Array) -> None:
    """Write to a read-only array, whose values the next step replaces."""
    output.flags.writeable = True
    output[...] = values
    output.flags.writeable = False


@dataclass(frozen=True)
class Camera:
    """Camera of a task, and the marker of its view's `target`."""

    look_at: tuple[float, float, float] | None = None
    """Point to look at, m; None: the middle of the moving bodies."""
    follow: str | None = None
    """Name of a body that the camera follows, kept above `look_at`; None: the root of a floating
    robot if no `look_at` is given."""
    distance: float | None = None
    """Distance from that point, m; None: far enough to show all moving bodies, for a robot on a
    fixed base in all poses of its joints."""
    azimuth: float = 140.0
    """Angle about the vertical, deg: 180 looks along -x, at the front of an arm that faces +x."""
    elevation: float = -25.0
    """Angle above the horizon, deg."""
    floor: float | None = None
    """Height of the floor to draw for a model without one, m."""
    target: Literal["sphere", "disc"] = "sphere"
    target_radius: float = 0.02
    """Radius of the marker, m."""
    target_sink: float = 0.0
    """Depth of the marker below the target, m: a disc lies on the surface under an object."""


class Line(NamedTuple):
    """A line of the legend of a picture."""

    text: str
    color: tuple[float, float, float]
    """Red, green and blue in [0, 1]."""


class Marker(Protocol):
    """A shape of films and windows, recorded with a state and drawn with it."""

    def draw(
        self, scene: mujoco.MjvScene, model: mujoco.MjModel, data: mujoco.MjData
    ) -> list[Line]:
        """Add geoms to the scene of a state; returns lines for the legend."""
        ...


def load_spec(model: str | Path | mujoco.MjSpec) -> mujoco.MjSpec:
    """An editable spec of a file, a name in MuJoCo Menagerie, MJCF text or a spec."""
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
    """Compile the model after the parts' methods `edit` have added to it."""
    if isinstance(model, mujoco.MjModel):
        if edits:
            raise UsageError(
                f"{type(getattr(edits[0], '__self__', edits[0])).__name__} adds to the model, and "
                "a compiled model cannot be changed: give the task a file or an MjSpec."
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
    """Set dense Jacobians where MuJoCo's sparse ones are wrong; returns notes for the plan.

    From 60 degrees of freedom on, MuJoCo 4.0.0 uses a sparse constraint Jacobian, from which it
    builds a wrong Hessian for the Newton solver. 4.0.1 fixes that.
    """
    if mujoco.mj_versionString() != "4.0.0" or not mujoco.mj_isSparse(model):
        return ()
    model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
    return (
        f"The model has {model.nv} degrees of freedom and is simulated with dense Jacobians, which "
        "may take longer: MuJoCo 4.0.0 computes wrong accelerations with sparse ones.",
    )


def digest(model: mujoco.MjModel) -> str:
    """SHA-256 of the numbers of a model that affect its physics, without names, files and
    visuals."""
    found, looks = hashlib.sha256(), ("name", "text", "tex_", "mat_", "light_", "cam_", "skin_")
    for part in (model, model.opt):
        for name in sorted(dir(part)):
            value = None if name.startswith(("_", *looks)) else getattr(part, name)
            shown = name.endswith(("_rgba", "_user", "pathadr"))
            if isinstance(value, int | float | np.ndarray) and not shown:
                found.update(name.encode() + np.asarray(value).tobytes())
    return found.hexdigest()


def model_file(model: str | Path) -> Path:
    """Find an MJCF or URDF file, or a robot of MuJoCo Menagerie by its name.

    A name such as "unitree_go1" is the robot with its floor; "unitree_go1/go1" is one of its files.
    The package `mujoco-menagerie` downloads a robot when it is first used.
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
            "the package: pip install mujoco-menagerie."
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
