"""Write arrays as safetensors in one pass, and read them strictly.

The format is eight bytes of header length, a JSON header, then raw little-endian data. Unlike the
safetensors library, this hashes and writes arrays without a second copy, and computes the size of a
file without writing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from etude.core.errors import is_out_of_memory
from etude.runs.documents import Malformed, decode_json
from etude.runs.files import Chunk

MAX_HEADER = 1 << 24
"""Parsed within seconds; the limit of the safetensors library is larger."""
MAX_NDIM = 32

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_NAME_OF_NUMPY = {dtype[1:]: name for name, dtype in _NUMPY.items()}
_NAME_OF_TORCH = {dtype: name for name, dtype in _TORCH.items()}


class Layout(NamedTuple):
    """Layout of a safetensors file, computed from shapes and types."""

    header: bytes
    order: list[str]
    size: int


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(arrays: dict[str, Any]) -> Layout:
    """The layout of {path: array, tensor or {}}.

    The metadata lists tensors and empty groups. Wide types come first, so that every array is
    aligned to its type.
    """
    empty = sorted(path for path, leaf in arrays.items() if isinstance(leaf, dict))
    tensors = sorted(path for path, leaf in arrays.items() if isinstance(leaf, torch.Tensor))
    described = {p: _describe(p, leaf) for p, leaf in arrays.items() if not isinstance(leaf, dict)}
    order = sorted(described, key=lambda path: (-described[path][2], path))
    notes = {"torch": tensors, "empty": empty}
    header: dict[str, Any] = {}
    if metadata := {name: json.dumps(paths) for name, paths in notes.items() if paths}:
        header["__metadata__"] = metadata
    end = 0
    for path in order:
        name, shape, width = described[path]
        begin, end = end, end + math.prod(shape) * width
        header[path] = {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"{len(arrays)} arrays need a header of {len(text)} bytes; too many")
    return Layout(len(text).to_bytes(8, "little") + text, order, 8 + len(text) + end)


def chunks(arrays: dict[str, Any], plan: Layout) -> Iterator[Chunk]:
    """Yield the bytes of the file, one array at a time."""
    yield plan.header
    for path in plan.order:
        yield _raw(arrays[path])


def read(stream: BinaryIO, size: int) -> dict[str, Any]:
    """Read {path: array, tensor or {}} from a file of `size` bytes; raises `Malformed`.

    Each array is allocated separately: vectorised sums may depend on the alignment of memory, which
    would differ for views into one buffer.
    """
    if size < 8:
        raise Malformed("is too short for a safetensors file")
    length = int.from_bytes(_exactly(stream, 8), "little")
    if length > min(MAX_HEADER, size - 8):
        raise Malformed(f"claims a header of {length} bytes")
    header = decode_json(_exactly(stream, length))
    metadata = header.pop("__metadata__", {})
    tensors, empty = _paths(metadata, "torch"), _paths(metadata, "empty")
    if not tensors <= header.keys() or empty & header.keys():
        raise Malformed("has metadata that does not fit its arrays")
    entries = sorted((_entry(n, e) for n, e in header.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise Malformed(f"has a gap or an overlap before array {entry.name!r}")
        position = entry.end
    if position != size - 8 - length:
        raise Malformed("holds more or less data than its header describes")
    arrays = {entry.name: _array(stream, entry, entry.name in tensors) for entry in entries}
    return arrays | {path: {} for path in empty}


def _describe(path: str, leaf: Any) -> tuple[str, tuple[int, ...], int]:
    """(safetensors type, shape, bytes per element); also on the meta device."""
    if path == "__metadata__":
        raise TypeError("an array cannot be called '__metadata__'; safetensors reserves the name")
    if isinstance(leaf, torch.Tensor):
        name = _NAME_OF_TORCH.get(leaf.dtype)
    else:
        name = _NAME_OF_NUMPY.get(f"{leaf.dtype.kind}{leaf.dtype.itemsize}")
    if name is None:
        raise TypeError(f"'{path}' has type {leaf.dtype}, which safetensors cannot hold")
    if leaf.ndim > MAX_NDIM:
        raise TypeError(f"'{path}' has {leaf.ndim} dimensions; at most {MAX_NDIM} can be saved")
    return name, tuple(int(n) for n in leaf.shape), _TORCH[name].itemsize


def _raw(leaf: Any) -> Chunk:
    if math.prod(leaf.shape) == 0:
        return b""  # an empty tensor may have strides without a view as bytes
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data
    little = np.ascontiguousarray(leaf).astype(leaf.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise Malformed("ended early")
    return data


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _paths(metadata: Any, note: str) -> set[str]:
    """A list of paths from the metadata, whose values are strings in safetensors."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Malformed("has metadata that is not made of strings")
    listed = f'{{"paths":{metadata.get(note, "[]")}}}'
    paths = decode_json(listed.encode(errors="replace")).get("paths")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise Malformed("has metadata that does not list paths")
    return set(paths)


def _entry(name: str, entry: Any) -> _Entry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"describes array {name!r} wrongly")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TORCH:
        raise Malformed(f"gives array {name!r} an unknown type")
    if not isinstance(shape, list) or len(shape) > MAX_NDIM or not all(map(_is_count, shape)):
        raise Malformed(f"gives array {name!r} an impossible shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise Malformed(f"places array {name!r} wrongly")
    if math.prod(shape) * _TORCH[dtype].itemsize != offsets[1] - offsets[0]:
        raise Malformed(f"gives array {name!r} a shape that does not fit its bytes")
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _array(stream: BinaryIO, entry: _Entry, as_tensor: bool) -> Any:
    array: Any
    try:
        if as_tensor or entry.dtype not in _NUMPY:
            array = torch.empty(entry.shape, dtype=_TORCH[entry.dtype])
        else:
            array = np.empty(entry.shape, _NUMPY[entry.dtype])
    except (ValueError, OverflowError, TypeError, RuntimeError, MemoryError) as error:
        if entry.begin != entry.end and is_out_of_memory(error):
            raise  # The file has enough bytes, so it is not damaged.
        raise Malformed(f"gives array {entry.name!r} a shape that cannot be made") from error
    if entry.begin == entry.end:
        return array
    flat = array.reshape(-1)
    raw = flat.view(torch.uint8).numpy() if torch.is_tensor(flat) else flat.view(np.uint8)
    if stream.readinto(raw.data) != raw.size:  # type: ignore[attr-defined]
        raise Malformed("ended early")
    if entry.dtype == "BOOL" and int(raw.max()) > 1:
        raise Malformed(f"holds values in array {entry.name!r} that are neither true nor false")
    return array
