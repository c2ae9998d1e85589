"""Conversion of Gymnasium's spaces and their values; snapshots of MuJoCo environments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from mujoco.batch import DATA_FIELDS

from etude.core.contracts import ActionSpec, Array, ArraySpec, Observations
from etude.core.errors import UsageError, describe_error
from etude.core.guard import check_array

FILM_RATE = 30.0
"""Steps per second of environments without `render_fps`."""
_OF_EXTRA = {"Box2D", "pygame"}
"""Modules of the extra `gymnasium`."""


def rendered(render: Callable[[], Any], name: str) -> Array:
    """Call `render`: [height, width, 3] uint8; errors are one sentence."""
    # Without a window: SDL, which many environments use, would look for a screen.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        picture: Array = np.asarray(render())
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(missing_package(name, error)) from error
    except Exception as error:  # third-party code may raise anything
        raise UsageError(f"'{name}' cannot be rendered: {describe_error(error)}.") from error
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise UsageError(
            f"'{name}' cannot be rendered: its render does not return [height, width, 3] uint8 in "
            "the mode rgb_array."
        )
    return picture


def missing_package(name: str, error: Exception) -> str:
    """A sentence on the package that an environment lacks; error: Gymnasium's or Python's."""
    cause = error.__cause__ or error
    package = cause.name if isinstance(cause, ImportError) else None
    if package in _OF_EXTRA:
        return f"'{name}' needs the package {package}: pip install 'etude[gymnasium]'."
    return f"'{name}' needs a package that is missing: {one_line(error)}."


def one_line(error: Exception) -> str:
    """The message of an error on one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


NUMBERS: set[Any] = {float, int, bool, np.float64, np.float32}
"""Types of rewards that need no check."""
FLAGS: set[Any] = {bool, np.bool_}


class Spaces:
    """Observation and action space of an environment; `env_id`: its name in messages."""

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Space[Any], env_id: str
    ) -> None:
        self.single, self.observations = _observation_specs(observation, env_id)
        self.action = _action_spec(action, env_id)
        self._action_space = action
        self._env_id = env_id
        # Shape of a single observation, and the dtype of its last value.
        self.shape = None if self.single is None else self.observations[self.single].shape
        self.dtype: np.dtype[Any] | None = None
        self.bounds = _bounds(observation, self.single)

    def empty(self, rows: int) -> Observations:
        """Zeros {name: [rows, ...]} that `store` fills."""
        return {
            name: np.zeros((rows, *spec.shape), spec.dtype)
            for name, spec in self.observations.items()
        }

    def store(self, obs: Observations, row: int, value: Any) -> None:
        """Write an observation to a row; refuse values outside of the space."""
        if self.single is not None:
            try:  # The fast path, for almost all values.
                if value.shape == self.shape and value.dtype is self.dtype:
                    obs[self.single][row] = value
                    return
            except AttributeError:
                pass
            value = {self.single: value}
        for name, array in obs.items():
            try:
                part = value[name]
            except (KeyError, TypeError, IndexError) as error:
                names = sorted(value) if isinstance(value, dict) else type(value).__name__
                raise UsageError(
                    f"'{self._env_id}' observes {names}, but its space is a dict of "
                    f"{sorted(self.observations)}."
                ) from error
            what = f"'{self._env_id}' gives its observation '{name}'"
            part = check_array(part, self.observations[name].shape, array.dtype, what)
            array[row] = part
            self.dtype = part.dtype

    def number(self, value: Any, what: str) -> float:
        """A reward or another scalar as a float."""
        if value.__class__ in NUMBERS:
            number: float = value
            return number
        what = f"'{self._env_id}' gives {what}"
        return float(check_array(value, (), np.dtype(np.float64), what))

    def flag(self, value: Any, what: str) -> bool:
        """A flag such as terminated as a bool; 0 and 1 are accepted."""
        if value.__class__ in FLAGS:
            flag: bool = value
            return flag
        is_one = isinstance(value, int | np.integer) and value in (0, 1)
        what = f"'{self._env_id}' gives {what}"
        return bool(value if is_one else check_array(value, (), np.dtype(np.bool_), what))

    def actions(self, actions: Array) -> Sequence[Any]:
        """Actions of the rows' action spaces, for actions from `ActionSpec.to_env`.

        actions: [rows, n] float32 for a box, [rows] or [rows, n] integers for choices. They are
        copied, because an environment may keep or change its action.
        """
        space = self._action_space
        if isinstance(space, spaces.Discrete):
            chosen: list[int] = (actions + int(space.start)).tolist()
            return chosen
        return list(actions.astype(space.dtype).reshape(len(actions), *(space.shape or ())))


def _observation_specs(
    space: spaces.Space[Any], env_id: str
) -> tuple[str | None, dict[str, ArraySpec]]:
    """Name of a single observation, or None for a dict; and the specs."""
    if isinstance(space, spaces.Box):
        picture = space.dtype == np.uint8 and len(space.shape) == 3
        name = "image" if picture else "state"
        return name, {name: _array_spec(space)}
    if isinstance(space, spaces.Dict):
        boxes = {name: box for name, box in space.items() if isinstance(box, spaces.Box)}
        if len(boxes) == len(space):
            return None, {str(name): _array_spec(box) for name, box in boxes.items()}
    raise UsageError(
        f"'{env_id}' observes {space}; a Box or a Dict of Boxes is needed. "
        "gymnasium.wrappers.FlattenObservation converts most spaces."
    )


def _bounds(space: spaces.Space[Any], single: str | None) -> dict[str, tuple[Array, Array]]:
    """Bounds {name: (low, high)} of the float boxes with a finite bound."""
    boxes = {single: space} if single is not None else dict(space.items())
    return {
        str(name): (box.low, box.high)
        for name, box in boxes.items()
        if box.dtype != np.uint8 and np.isfinite([box.low, box.high]).any()
    }


def _array_spec(box: spaces.Box) -> ArraySpec:
    return ArraySpec(box.shape, "uint8" if box.dtype == np.uint8 else "float32")


def _action_spec(space: spaces.Space[Any], env_id: str) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", sizes=(int(space.n),))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return ActionSpec("multi_discrete", sizes=tuple(space.nvec.tolist()))
    if isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).all():
        low, high = space.low.ravel().tolist(), space.high.ravel().tolist()
        return ActionSpec("box", low=tuple(low), high=tuple(high))
    raise UsageError(
        f"'{env_id}' acts in {space}; a bounded Box, Discrete or MultiDiscrete is needed."
    )


_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
FIELDS = sorted(DATA_FIELDS)
"""Arrays of MjData outside of its arena, whose unused memory is arbitrary."""


def physics(env: gymnasium.Env[Any, Any]) -> tuple[mujoco.MjModel, mujoco.MjData] | None:
    """Model and data of a MuJoCo environment; None for others."""
    inner: Any = env.unwrapped
    model, data = getattr(inner, "model", None), getattr(inner, "data", None)
    if isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData):
        return model, data
    return None


def _data_arrays(data: mujoco.MjData) -> Iterator[Array]:
    for name in FIELDS:
        array = getattr(data, name)
        if isinstance(array, np.ndarray) and array.size:
            yield array


def save_physics(model: mujoco.MjModel, data: mujoco.MjData) -> Array:
    """Snapshot [n] uint8: the integration state, then every derived array.

    Derived arrays lag the state by a substep after `mj_step`, and some rewards read them before
    the next one, so they cannot be recomputed.
    """
    state = np.empty(mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_getState(model, data, state, _STATE)
    parts = [state.tobytes(), *(array.tobytes() for array in _data_arrays(data))]
    return np.frombuffer(b"".join(parts), np.uint8)


def load_physics(model: mujoco.MjModel, data: mujoco.MjData, saved: Array) -> None:
    """Restore a snapshot of `save_physics`."""
    raw = saved.tobytes()
    state = np.frombuffer(raw, np.float64, mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_setState(model, data, state, _STATE)
    # Contacts live in MuJoCo's arena and are not saved; this finds them again.
    mujoco.mj_forward(model, data)
    offset = state.nbytes
    for array in _data_arrays(data):
        array[...] = np.frombuffer(raw, array.dtype, array.size, offset).reshape(array.shape)
        offset += array.nbytes
