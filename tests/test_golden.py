"""Every method computes what it computed before: hashes of short runs are kept with the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_runs import FILE, RUNS, golden_hash, machine

KNOWN = json.loads(FILE.read_text())


@pytest.mark.slow
@pytest.mark.skipif(
    machine() != KNOWN["machine"], reason="this processor rounds unlike the one of golden.json"
)
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_short_run_gives_the_same_bits_as_before(name: str, tmp_path: Path) -> None:
    """Where a change is meant, say why in docs/decisions and run tests/lib/golden_runs.py."""
    assert golden_hash(RUNS[name](tmp_path), tmp_path) == KNOWN[name]
