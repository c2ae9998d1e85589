"""What a foreign Gymnasium environment remembers, as text and bytes: found, saved and put back.

Nothing here can hold code: numbers, strings, arrays, containers of these and random generators
are taken; whatever else an environment keeps is left alone, and the probe tells if that mattered.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import gymnasium
import mujoco
import numpy as np
from mujoco.batch import DATA_FIELDS

from etude.core.contracts import Array

_PLAIN = (type(None), bool, int, float, str)
_ARRAY_KINDS = "biufcSU"
_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    generator.__name__: generator
    for generator in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}
_CONSTANT = {"metadata", "fullpath"}
"""Attributes that are no state; a file's path differs from machine to machine."""
_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)
_FIELDS = sorted(DATA_FIELDS)


class _ForeignError(Exception):
    """A value that is neither plain, nor an array, nor a generator."""


def encode(value: object) -> Any:
    """A value as JSON: plain ones as they are, the rest as [tag, ...]."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAY_KINDS:
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        data = base64.b64encode(value.tobytes()).decode("ascii")
        return [tag, value.dtype.str, list(value.shape), data]
    if type(value) in (tuple, list):
        return [type(value).__name__, [encode(item) for item in value]]  # type: ignore[attr-defined]
    if isinstance(value, deque):
        return ["deque", value.maxlen, [encode(item) for item in value]]
    if type(value) is dict:
        return ["dict", [[encode(name), encode(item)] for name, item in value.items()]]
    if isinstance(value, np.random.Generator):
        name = type(value.bit_generator).__name__
        if name in _BIT_GENERATORS:
            return ["generator", name, encode(value.bit_generator.state)]
    raise _ForeignError(type(value).__name__)


def decode(code: Any) -> Any:
    """The value that `encode` was given."""
    if type(code) in _PLAIN:
        return code
    tag, *rest = code
    if tag in ("array", "scalar"):
        dtype, shape, data = rest
        flat: Array = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
        return flat.reshape(shape).copy() if tag == "array" else flat[0]
    if tag == "tuple":
        return tuple(decode(item) for item in rest[0])
    if tag == "list":
        return [decode(item) for item in rest[0]]
    if tag == "deque":
        return deque((decode(item) for item in rest[1]), maxlen=rest[0])
    if tag == "dict":
        return {decode(name): decode(item) for name, item in rest[0]}
    generator = np.random.Generator(_BIT_GENERATORS[rest[0]]())
    generator.bit_generator.state = decode(rest[1])
    return generator


def layers(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """The environment's wrappers from the outside in, then itself."""
    layer: Any = env
    while layer is not env.unwrapped:
        yield layer
        layer = layer.env
    yield layer


def save_attributes(env: gymnasium.Env[Any, Any]) -> str:
    """All attributes of all layers that can be saved, as one line of JSON."""
    saved: list[dict[str, Any]] = []
    for layer in layers(env):
        attributes: dict[str, Any] = {}
        for name, value in vars(layer).items():
            if name in _CONSTANT:
                continue
            try:
                attributes[name] = encode(value)
            except _ForeignError:
                continue
        saved.append(attributes)
    return json.dumps(saved, separators=(",", ":"))


def load_attributes(env: gymnasium.Env[Any, Any], text: str) -> None:
    """Put back what `save_attributes` gave, into any instance of the same environment."""
    for layer, attributes in zip(layers(env), json.loads(text), strict=True):
        for name, code in attributes.items():
            value, current = decode(code), vars(layer).get(name)
            if isinstance(value, np.random.Generator) and type(
                getattr(current, "bit_generator", None)
            ) is type(value.bit_generator):
                # In place: other parts of the environment may hold the same generator.
                current.bit_generator.state = value.bit_generator.state
            else:
                setattr(layer, name, value)


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
