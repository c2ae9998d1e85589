"""Strict JSON of checkpoints, safe to read from untrusted files, and sealed JSON.

Floats round trip exactly and integers have any length. NaN and infinities are written as in
Python's `json` (NaN, Infinity), because "best so far" often starts at minus infinity. A sealed
document contains its own SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from etude.core.trees import SEPARATOR, Tree

MAX_DEPTH = 64
"""Deeper trees are neither written nor read, so that no reader runs out of stack."""

SEAL = "seal"
"""The field of a sealed document that holds the SHA-256 of the others."""

_encode = json.JSONEncoder(sort_keys=True).encode


class Malformed(ValueError):
    """A malformed file; the message is the end of the sentence "<file> ..."."""


def encode_json(document: Tree) -> bytes:
    """Encode a document as JSON, a line per name, sorted: equal documents give equal bytes."""
    if _depth(document) > MAX_DEPTH:
        raise TypeError(f"a document is nested deeper than {MAX_DEPTH} levels")
    lines = [f"{_encode(name)}: {_encode(document[name])}" for name in sorted(document)]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def decode_json(data: bytes) -> Tree:
    """Decode one JSON object; raises `Malformed`."""
    try:
        document = json.loads(data, object_pairs_hook=_without_duplicates)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed("is not valid JSON") from error
    if not isinstance(document, dict):
        raise Malformed("is not a JSON object")
    if _depth(document) > MAX_DEPTH:
        raise Malformed(f"is nested deeper than {MAX_DEPTH} levels")
    return document


def plain(value: Any, path: str) -> Any:
    """Convert a leaf for JSON: numpy scalars to numbers, tuples to lists."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, path) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: plain(item, path) for name, item in value.items()}
    raise TypeError(f"'{path}' holds a {type(value).__name__}, which a checkpoint cannot store")


def assemble(flat: dict[str, Any]) -> Tree:
    """The tree with these leaves by path; unlike `unflatten`, for untrusted paths."""
    tree: Tree = {}
    nodes: dict[str, Tree] = {"": tree}
    for path in sorted(flat):
        *parents, name = path.split(SEPARATOR)
        if len(parents) >= MAX_DEPTH:
            raise Malformed(f"is nested deeper than {MAX_DEPTH} levels")
        node, prefix = tree, ""
        for parent in parents:
            prefix += parent + SEPARATOR
            if prefix not in nodes:
                if parent in node:
                    raise Malformed(f"uses {prefix[:-1]!r} both as a value and as a group")
                nodes[prefix] = node[parent] = {}
            node = nodes[prefix]
        if name in node:
            raise Malformed(f"uses {path!r} both as a value and as a group")
        node[name] = flat[path]
    return tree


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Tree:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise Malformed("uses a name twice")
    return document


def _depth(document: Any) -> int:
    """Number of nested levels, counted without recursion up to just above the limit."""
    level, depth = [document], 0
    while level and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list | tuple):
                inner.extend(item)
        level, depth = inner, depth + 1
    return depth


def encode_sealed(document: Tree) -> bytes:
    """Encode a document as JSON with a seal, which detects any changed byte."""
    return _encode_sealed({**document, SEAL: _seal_of(document)})


def decode_sealed(data: bytes, must: bool = False) -> Tree:
    """Decode a sealed document; raises `ValueError` with the end of the sentence "<file> ...".

    Documents of early versions have no seal and are accepted, unless `must`.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not valid JSON") from error
    if not isinstance(document, dict):
        raise ValueError("is not a JSON object")
    if not must and SEAL not in document and not any(map(_is_seal, document.items())):
        return document
    seal = document.pop(SEAL, None)
    # Fast path: the hash of the text without the line of the seal, without encoding it again.
    if hashlib.sha256(data.replace(f' "{SEAL}": "{seal}",\n'.encode(), b"", 1)).hexdigest() == seal:
        return document
    if seal != _seal_of(document) or data != _encode_sealed({**document, SEAL: seal}):
        raise ValueError("was changed after it was written")
    return document


def _is_seal(entry: tuple[str, object]) -> bool:
    """Whether an entry is a seal, even if its name was damaged."""
    name, value = entry
    return len(name) == len(SEAL) and isinstance(value, str) and len(value) == 64


def _encode_sealed(document: Tree) -> bytes:
    return (json.dumps(document, sort_keys=True, indent=1, default=repr) + "\n").encode()


def _seal_of(document: Tree) -> str:
    return hashlib.sha256(_encode_sealed(document)).hexdigest()
