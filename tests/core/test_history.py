"""Long histories: a bounded part of them, the same whenever the run was interrupted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from etude.core.history import KEPT, RECENT, History, Row, Thinned, history_of
from etude.core.metrics import COUNTERS, EPISODES, Health
from etude.runs.metrics_log import DiskHistory
from etude.training.logs.curves import Curve


def rows_of(count: int) -> list[Row]:
    """Every tenth has an evaluation."""
    tested = {"eval/mean_reward": 0.0}
    return [
        {"timesteps": 8 * i, "iterations": i, "rollout/ep_rew_mean": float(i % 97)}
        | ({**tested, "eval/mean_reward": float(i)} if i % 10 == 9 else {})
        for i in range(count)
    ]


def thinned(count: int) -> Thinned[int]:
    kept = Thinned[int]()
    for i in range(count):
        kept.add(i, i % 10 == 9)
    return kept


def test_a_short_history_is_whole_and_a_long_one_is_bounded_and_even() -> None:
    assert [*thinned(KEPT)] == [*range(KEPT)]
    for count in (5 * KEPT, 31 * KEPT + 7):
        kept = [*thinned(count)]
        assert len(kept) <= 4 * KEPT + RECENT + 2
        assert kept[-RECENT:] == [*range(count - RECENT, count)]
        plain = [i for i in kept[:-RECENT] if i % 10 != 9]
        assert kept[0] == 0
        assert KEPT - RECENT <= len(plain) <= 2 * KEPT
        steps = {b - a for a, b in pairwise(plain)}
        assert max(steps) <= 2 * min(steps) + 2
    weights = sum(rows for _, rows in thinned(31 * KEPT).weighted())
    assert abs(weights / (31 * KEPT) - 1) < 0.02


def test_what_is_kept_does_not_follow_from_interruptions() -> None:
    untouched, kept = thinned(9 * KEPT), thinned(4 * KEPT).mapped(lambda item: item)
    for i in range(4 * KEPT, 9 * KEPT):
        kept.add(i, i % 10 == 9)
    assert kept.numbered() == untouched.numbered()


def test_rows_on_disk_are_thinned_as_rows_in_memory(tmp_path: Path) -> None:
    rows = rows_of(5 * KEPT)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    on_disk, in_memory = DiskHistory(path), History(rows)
    assert on_disk.thinned().numbered() == in_memory.thinned().numbered()
    assert on_disk.last == in_memory.last == rows[-1]
    assert [*on_disk] == rows
    assert history_of(on_disk) is on_disk
    assert history_of([]).last == {} == DiskHistory(tmp_path / "none").last


def test_a_resumed_run_is_as_healthy_as_an_untouched_one(tmp_path: Path) -> None:
    rows = rows_of(4 * KEPT)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[: 3 * KEPT]))
    untouched, resumed = (Health((*COUNTERS, *EPISODES), len(rows)) for _ in range(2))
    for row in rows:
        untouched.add(row)
    resumed.begin(DiskHistory(path))
    assert resumed.progress > 0.7
    for row in rows[3 * KEPT :]:
        resumed.add(row)
    assert len(untouched.rows) < 3 * KEPT
    assert resumed.rows == untouched.rows
    assert resumed.trend == untouched.trend
    assert resumed.evaluated == untouched.evaluated
    assert resumed.evaluated is not None
    assert resumed.evaluated.last["timesteps"] == max(
        row["timesteps"] for row in rows if "eval/mean_reward" in row
    )


def test_a_row_that_stands_for_many_is_as_many_on_a_curve() -> None:
    at_once, one_by_one = Curve(700), Curve(700)
    for rows, value in ((3, 1.0), (1500, None), (1, 4.0), (4096, 2.0)):
        at_once.add(value, rows)
        for _ in range(rows):
            one_by_one.add(value)
    assert repr(at_once.points) == repr(one_by_one.points)
