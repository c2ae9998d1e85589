"""Inputs that once found something are refused or taken as promised; so is every valid one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from readers import CORPUS, READERS, change

INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", READERS)
def test_valid_inputs_are_taken(name: str, tmp_path: Path) -> None:
    reader = READERS[name](tmp_path)
    assert reader.seeds
    for data in reader.seeds:
        assert reader.read(data) is None


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("hdf5", "motion")])
def test_changed_inputs_end_in_a_sentence(name: str, tmp_path: Path) -> None:
    reader = READERS[name](tmp_path)
    refused = 0
    for number in range(40):
        chance = random.Random(number)
        data = change(chance.choice(reader.seeds), chance)
        refused += data is not None and reader.read(data) is not None
    assert refused


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_found_something(path: Path, tmp_path: Path) -> None:
    reader = READERS[path.parent.name](tmp_path)
    if not reader.native:
        reader.read(path.read_bytes())
        return
    folder, env = str(CORPUS.parent), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(CORPUS.parent / "readers.py"), path.parent.name, path, tmp_path]
    subprocess.run(command, env=env, cwd=folder, timeout=60, check=False)
