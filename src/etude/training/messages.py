"""Plain data as bytes, for ranks to tell each other: JSON, and arrays as safetensors.

Not pickle: whoever gets into the conversation of a run's ranks must not get to run code in it.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from etude.core.trees import is_array
from etude.runs import tensors


def encode(value: Any) -> bytes:
    """Dicts with names, lists, numbers, strings, None and arrays, bit for bit."""
    arrays: dict[str, Any] = {}
    text = json.dumps(_without(value, arrays)).encode()
    layout = tensors.layout(arrays)
    return b"".join([len(text).to_bytes(8, "little"), text, *tensors.chunks(arrays, layout)])


def decode(data: bytes) -> Any:
    """What `encode` was given; tuples are lists. Each array has memory of its own."""
    stream = io.BytesIO(data)
    length = int.from_bytes(stream.read(8), "little")
    text = stream.read(length)
    return _with(json.loads(text), tensors.read(stream, len(data) - 8 - length))


def _without(value: Any, arrays: dict[str, Any]) -> Any:
    """The value as JSON, whose objects are either a dict or the name of an array."""
    if is_array(value):
        name = str(len(arrays))
        arrays[name] = value
        return {"array": name}
    if isinstance(value, dict):
        return {"dict": {name: _without(item, arrays) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_without(item, arrays) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _with(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_with(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    return {name: _with(item, arrays) for name, item in value["dict"].items()}
