"""A crash below Python: whatever the disk has lost or reordered, the run can be resumed.

Short runs are recorded by a file system of the test's own; `crash_model` says what may be left of
them, and `gates/faults/crash_states.py` looks at all of it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from crash_model import Folders
from crashed_runs import LIVES, Crash, Recording, crashes, ends_equal, judge, record
from etude.api import train
from recording_fs import Entry, why_not

pytestmark = [
    pytest.mark.rotated,
    pytest.mark.skipif(why_not() is not None, reason=f"cannot record: {why_not()}"),
]
STATES = 200


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    return record(tmp_path_factory.mktemp("recorded"), LIVES)


def some(recording: Recording, number: int) -> list[Crash]:
    """States from all over a recording."""
    return random.Random(7).sample(list(crashes(recording, draws=1)), number)


@pytest.mark.parametrize("number", range(len(LIVES)), ids=LIVES)
def test_a_crash_leaves_a_run_that_can_be_resumed(
    number: int, recordings: list[Recording], tmp_path: Path
) -> None:
    recording, folders = recordings[number], Folders(tmp_path / "pool")
    found = some(recording, STATES // len(LIVES))
    for crash in found:
        assert judge(crash, recording, tmp_path / "state", folders) is None, crash.label
    untouched = train(recording.recipe, tmp_path / "untouched")
    assert {crash.step for crash in found} >= {None, *recording.saved}
    for crash in found[:2]:
        assert ends_equal(crash, tmp_path / "state", folders, untouched), crash.label


def lost(entry: Entry, flush: str, part: str) -> bool:
    return entry.kind == flush and part in entry.path


@pytest.mark.parametrize(
    ("flush", "part"),
    [
        ("fsync", "metrics.jsonl"),
        ("fsync", "training/arrays.safetensors"),
        ("fsync", "replay/shard-0/steps"),
        ("fsyncdir", "checkpoints"),
        ("fsyncdir", "replay/shard-0"),
    ],
)
def test_a_flush_that_is_left_out_is_noticed(
    flush: str, part: str, recordings: list[Recording], tmp_path: Path
) -> None:
    whole = recordings[-1]
    assert any(lost(entry, flush, part) for entry in whole.entries)
    kept = [entry for entry in whole.entries if not lost(entry, flush, part)]
    broken, folders = Recording(whole.name, kept), Folders(tmp_path / "pool")
    states = (crash for crash in crashes(broken, draws=1) if crash.step)
    assert any(judge(crash, broken, tmp_path / "state", folders) for crash in states)
