"""State as a tree: nested dicts whose leaves are arrays, numbers, strings or None."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Tree = dict[str, Any]
SEPARATOR = "/"


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array or a tensor, and not JSON."""
    return isinstance(leaf, np.ndarray) or _is_tensor(leaf)


def _is_tensor(leaf: object) -> bool:
    """Whether a leaf is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path "a/b/c", leaf) of every leaf, in sorted order.

    An empty dict counts as a leaf, so that it is saved too.
    """
    for name in sorted(tree):
        if not isinstance(name, str) or SEPARATOR in name:
            raise TypeError(f"a tree's names are strings without '/', not {name!r}")
        path, value = f"{prefix}{name}", tree[name]
        if isinstance(value, dict) and value:
            yield from leaves(value, path + SEPARATOR)
        else:
            yield path, value


def unflatten(flat: dict[str, Any]) -> Tree:
    """The tree with the given {path: leaf}; the inverse of `leaves`."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def map_arrays(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `function` to every array of a tree."""
    return unflatten(
        {path: function(leaf) if is_array(leaf) else leaf for path, leaf in leaves(tree)}
    )


def without_arrays(tree: Tree) -> Tree:
    """Remove all arrays of a tree."""
    return unflatten({path: leaf for path, leaf in leaves(tree) if not is_array(leaf)})


def copy_arrays(tree: Tree) -> Tree:
    """Copy all arrays of a tree."""
    return map_arrays(lambda a: a.detach().clone() if _is_tensor(a) else a.copy(), tree)


def num_bytes(tree: Tree) -> int:
    """Total bytes of the arrays of a tree."""
    return sum(int(leaf.nbytes) for _, leaf in leaves(tree) if is_array(leaf))


def digest(tree: Tree) -> str:
    """SHA-256 over the paths, types, shapes and bits of all leaves."""
    sha = hashlib.sha256()
    for path, leaf in leaves(tree):
        if is_array(leaf):
            array = leaf.detach().cpu().numpy() if _is_tensor(leaf) else leaf
            sha.update(f"{path}|{array.dtype.str}|{array.shape}|".encode())
            sha.update(np.ascontiguousarray(array).tobytes())
        else:
            sha.update(f"{path}|{json.dumps(leaf, sort_keys=True)}|".encode())
    return sha.hexdigest()
