"""Trees: flat and back, copies, and a digest that notices everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.core.trees import copy_arrays, digest, leaves, map_arrays, num_bytes, unflatten

names = st.text("abcxyz_0-. ", min_size=1, max_size=4)
arrays = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.bool_, np.uint8]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
trees = st.recursive(
    st.dictionaries(names, st.one_of(arrays, plain), max_size=3),
    lambda inner: st.dictionaries(names, st.one_of(arrays, plain, inner), max_size=3),
    max_leaves=8,
)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, np.ndarray):
        equal = one.dtype == two.dtype and one.shape == two.shape
        return equal and one.tobytes() == two.tobytes()
    return type(one) is type(two) and bool(one == two)


@given(trees)
def test_unflatten_undoes_leaves(tree: dict[str, Any]) -> None:
    flat = dict(leaves(tree))
    assert list(flat) == sorted(flat, key=lambda path: path.split("/"))
    assert same(unflatten(flat), tree)


@given(trees)
def test_a_copy_is_equal_and_shares_nothing(tree: dict[str, Any]) -> None:
    copy = copy_arrays(tree)
    assert same(copy, tree)
    assert digest(copy) == digest(tree)
    assert num_bytes(copy) == num_bytes(tree)
    originals = [leaf for _, leaf in leaves(tree) if isinstance(leaf, np.ndarray)]
    copies = [leaf for _, leaf in leaves(copy) if isinstance(leaf, np.ndarray)]
    for one, two in zip(originals, copies, strict=True):
        assert not np.shares_memory(one, two)


@given(trees)
def test_a_digest_does_not_depend_on_the_order_of_insertion(tree: dict[str, Any]) -> None:
    assert digest(dict(reversed(tree.items()))) == digest(tree)


@given(hnp.arrays(np.uint8, st.integers(1, 40)), st.data())
def test_a_digest_notices_every_bit(array: np.ndarray, data: st.DataObject) -> None:
    before = digest({"a": array})
    array[data.draw(st.integers(0, array.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest({"a": array}) != before


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": np.zeros(4, np.float32)}, {"a": np.zeros(4, np.int32)}),
        ({"a": np.zeros(4)}, {"a": np.zeros((2, 2))}),
        ({"a": np.zeros(4)}, {"b": np.zeros(4)}),
        ({"a": {"b": 1}}, {"a": 1, "b": 1}),
        ({"a": np.zeros(())}, {"a": np.zeros(1)}),
        ({"a": np.float64(0.0) * np.ones(2)}, {"a": -np.zeros(2)}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": "1"}),
        ({"a": {}}, {}),
        ({"a": {}}, {"a": None}),
        ({"a": np.zeros(2), "b": np.zeros(1)}, {"a": np.zeros(1), "b": np.zeros(2)}),
    ],
)
def test_a_digest_notices_type_shape_and_path(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert digest(one) != digest(two)


def test_tensors_and_arrays_of_the_same_bits_agree() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch.from_numpy(array.copy()).requires_grad_()
    assert digest({"a": tensor}) == digest({"a": array})
    assert digest({"a": tensor.t()}) == digest({"a": np.ascontiguousarray(array.T)})
    assert num_bytes({"a": tensor, "b": {"c": array, "d": 3}}) == 2 * 48


def test_map_arrays_leaves_the_rest_alone() -> None:
    tree = {"a": np.ones(2), "b": {"c": 3, "d": torch.ones(1)}, "e": {}}
    doubled = map_arrays(lambda array: array * 2, tree)
    assert doubled["a"].tolist() == [2.0, 2.0]
    assert doubled["b"]["c"] == 3
    assert float(doubled["b"]["d"]) == 2.0
    assert doubled["e"] == {}


@pytest.mark.parametrize("name", ["a/b", 3])
def test_names_that_would_be_lost_are_refused(name: Any) -> None:
    with pytest.raises(TypeError, match="names"):
        list(leaves({name: 1}))
