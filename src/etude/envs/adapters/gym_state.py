"""What MuJoCo remembers inside a foreign Gymnasium environment, as bytes: saved and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import mujoco
import numpy as np
from mujoco.batch import DATA_FIELDS

from etude.core.contracts import Array

_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_FIELDS = sorted(DATA_FIELDS)


def physics(env: gymnasium.Env[Any, Any]) -> tuple[mujoco.MjModel, mujoco.MjData] | None:
    """Model and data of a MuJoCo environment."""
    inner: Any = env.unwrapped
    model, data = getattr(inner, "model", None), getattr(inner, "data", None)
    if isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData):
        return model, data
    return None


def _data_arrays(data: mujoco.MjData) -> Iterator[Array]:
    for name in _FIELDS:
        array = getattr(data, name)
        if isinstance(array, np.ndarray) and array.size:
            yield array


def save_physics(model: mujoco.MjModel, data: mujoco.MjData) -> Array:
    """[n] uint8: the integration state, then every derived array.

    Derived arrays lag the state by a substep after `mj_step`, and some rewards read them before
    the next one, so they cannot be recomputed.
    """
    state = np.empty(mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_getState(model, data, state, _STATE)
    parts = [state.tobytes(), *(array.tobytes() for array in _data_arrays(data))]
    return np.frombuffer(b"".join(parts), np.uint8)


def load_physics(model: mujoco.MjModel, data: mujoco.MjData, saved: Array) -> None:
    """Put back what `save_physics` gave."""
    raw = saved.tobytes()
    state = np.frombuffer(raw, np.float64, mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_setState(model, data, state, _STATE)
    # Contacts live in MuJoCo's arena and are not saved; this finds them again.
    mujoco.mj_forward(model, data)
    offset = state.nbytes
    for array in _data_arrays(data):
        array[...] = np.frombuffer(raw, array.dtype, array.size, offset).reshape(array.shape)
        offset += array.nbytes
