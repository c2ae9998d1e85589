"""Checkpoints give back what was put in, bit for bit, and keep what they should."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disk_faults import Watched, make_state, same, save, tag_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from etude.core.errors import UsageError
from etude.core.trees import Tree, is_array, leaves, map_arrays
from etude.runs import checkpoint, files
from etude.runs.checkpoint import DamagedCheckpoint

DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "bool"]
UNSIGNED = ["uint64", "uint32", "uint16", "uint8"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
numpy_arrays = st.one_of(*[hnp.arrays(dtype, SHAPES) for dtype in DTYPES + UNSIGNED])
arrays = st.one_of(
    numpy_arrays,
    numpy_arrays.map(lambda a: a.T),
    numpy_arrays.map(lambda a: a[::2] if a.ndim else a),
    numpy_arrays.map(lambda a: torch.from_numpy(a.copy())),
    numpy_arrays.map(lambda a: torch.from_numpy(a.copy()).T if a.ndim == 2 else torch.ones(2)),
    hnp.arrays("float32", SHAPES).map(lambda a: torch.from_numpy(a.copy()).to(torch.bfloat16)),
)
numbers = st.one_of(st.floats(), st.integers(), st.integers(2**53, 2**200), st.booleans())
plain = st.one_of(st.none(), st.text(), numbers, st.lists(st.one_of(numbers, st.text())))
names = st.text(max_size=6).filter(lambda name: "/" not in name and name != "__metadata__")


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Tree]:
    inner = st.recursive(leaf, lambda s: st.dictionaries(names, s, max_size=4), max_leaves=12)
    return st.dictionaries(names, inner, max_size=5)


@settings(max_examples=50, deadline=None)
@given(policy=trees(arrays), contract=trees(plain), training=trees(st.one_of(arrays, plain)))
def test_round_trip(policy: Tree, contract: Tree, training: Tree) -> None:
    with tempfile.TemporaryDirectory() as folder, files.using(Watched()):
        path = checkpoint.save(Path(folder), 7, (policy, contract), training)
        back_policy, back_contract, back_training = checkpoint.load_training(path)
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert same(back_policy, policy)
    assert same(back_contract, contract)
    assert same(back_training, training)
    predicted = checkpoint.checkpoint_bytes((policy, contract), training)
    assert abs(predicted - size) <= max(0.01 * size, 40)  # the digits of the step


def test_size_is_known_from_shapes_alone(tmp_path: Path) -> None:
    policy, training = make_state(1)
    training["big"] = torch.zeros(300, 1000)
    path = checkpoint.save(tmp_path, 1, policy, training)
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    shapes = map_arrays(lambda a: a.to("meta") if torch.is_tensor(a) else a, training)
    assert checkpoint.checkpoint_bytes(policy, shapes) == pytest.approx(size, rel=0.001)


def test_other_readers_can_open_the_arrays(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (policy, _), training = make_state(1)
    for part, tree in (("policy", policy), ("training", training)):
        loaded = load_file(path / part / "arrays.safetensors")
        expected = {p: np.asarray(leaf) for p, leaf in leaves(tree) if is_array(leaf)}
        assert loaded.keys() == expected.keys()
        assert all(np.array_equal(loaded[p], expected[p]) for p in expected)


@pytest.mark.parametrize(
    "bad",
    [
        {"a": object()},
        {"a": np.array(["text"])},
        {"a": np.array([1j])},
        {"a": [np.zeros(2)]},
        {"a": b"bytes"},
        {"a/b": 1},
        {"__metadata__": np.zeros(1)},
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_disk_is_touched(
    tmp_path: Path, bad: Tree
) -> None:
    with pytest.raises(TypeError, match=r"cannot|without"):
        checkpoint.save(tmp_path / "c", 1, ({}, {}), bad)
    assert not (tmp_path / "c").exists()


def test_loaded_arrays_own_their_memory(tmp_path: Path) -> None:
    arrays, _, training = checkpoint.load_training(save(tmp_path, 1))
    assert training["adam"]["m"].base is None
    assert training["adam"]["m"].flags.writeable
    assert arrays["net"]["w"].data_ptr() % 64 == 0


def test_policy_alone_can_be_copied_and_training_dropped(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    shutil.copytree(path / "policy", tmp_path / "deployed")
    assert checkpoint.load_policy_parts(tmp_path / "deployed")[1]["tag"] == 1
    shutil.rmtree(path / "training")
    assert checkpoint.load_policy_parts(tmp_path / "latest")[1]["tag"] == 1
    with pytest.raises(DamagedCheckpoint, match="only the policy was kept"):
        checkpoint.load_training(path)


def test_halves_of_two_saves_do_not_join(tmp_path: Path) -> None:
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    shutil.rmtree(two / "policy")
    shutil.copytree(one / "policy", two / "policy")
    with pytest.raises(DamagedCheckpoint, match="different saves"):
        checkpoint.load_training(two)


def test_missing_path_and_other_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint at"):
        checkpoint.load_policy_parts(tmp_path / "none")
    with pytest.raises(UsageError, match="no checkpoint of step 3"):
        checkpoint.mark(tmp_path, "best", 3)
    with pytest.raises(UsageError, match="cannot be called"):
        checkpoint.mark(tmp_path, "../best", 3)
    assert checkpoint.newest_verified(tmp_path) is None
    assert checkpoint.newest_verified(tmp_path / "none") is None


def kept(folder: Path) -> dict[int, bool]:
    """{step: whether it can be resumed}."""
    paths = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
    return {checkpoint.step_of(p): (p / "training").exists() for p in sorted(paths)}


def test_retention(tmp_path: Path) -> None:
    for step in range(10, 110, 10):
        save(tmp_path, step)
        if step == 20:
            checkpoint.mark(tmp_path, "best", step)
        checkpoint.retain(tmp_path, every=50)
    assert kept(tmp_path) == {10: False, 20: False, 50: False, 80: True, 90: True, 100: True}
    checkpoint.mark(tmp_path, "best", 90)
    assert [p.name for p in checkpoint.retain(tmp_path)] == [
        "000000000050",
        "000000000020",
        "000000000010",
    ]
    assert kept(tmp_path) == {80: True, 90: True, 100: True}
    assert checkpoint.load_policy_parts(tmp_path / "best")[1]["tag"] == 90


def test_retention_never_removes_the_last_that_verifies(tmp_path: Path) -> None:
    for step in range(1, 6):
        path = save(tmp_path, step)
        if step > 1:
            (path / "training" / "state.json").write_bytes(b"{}")
    checkpoint.retain(tmp_path, keep_last=2)
    assert kept(tmp_path) == {1: True, 4: True, 5: True}
    said: list[str] = []
    found = checkpoint.newest_verified(tmp_path, said.append)
    assert found is not None
    assert tag_of(found) == 1
    assert len(said) == 4
    (found / "policy" / "contract.json").unlink()
    save(tmp_path, 2)
    (tmp_path / "000000000002" / "policy" / "contract.json").unlink()
    assert checkpoint.retain(tmp_path, keep_last=1) == []


def test_looking_without_repair_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "policy" / "contract.json").unlink()
    (tmp_path / ".tmp-left").mkdir()
    before = sorted(os.listdir(tmp_path))
    found = checkpoint.newest_verified(tmp_path, lambda _: None, repair=False)
    assert found == tmp_path / "000000000001"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_save_of_a_megabyte_takes_milliseconds(tmp_path: Path) -> None:
    policy = {f"layer{i}": torch.randn(64, 64) for i in range(20)}
    training = {f"moment{i}": torch.randn(64, 64) for i in range(40)}
    times = []
    with files.using(Watched()):
        for step in range(10):
            start = time.process_time()
            checkpoint.save(tmp_path, step, (policy, {}), training)
            times.append(time.process_time() - start)
    assert min(times) < 0.02
