"""The table in a pipe, and its epoch summaries."""

from __future__ import annotations

import io
import math

from etude.core.metrics import Best, Health
from etude.training.logs.console import ConsoleTable, bottleneck, fleet
from log_points import METRICS, rows_like_a_run


def make(stream: io.StringIO) -> ConsoleTable:
    return ConsoleTable(Health(METRICS, 100), stream)


def shown(table: ConsoleTable, stream: io.StringIO, row: dict[str, object]) -> list[str]:
    before = len(stream.getvalue())
    table.write(row)
    return stream.getvalue()[before:].splitlines()


def test_an_epoch_ends_with_a_line_about_it() -> None:
    stream = io.StringIO()
    table = make(stream)
    table.begin([])
    rows = rows_like_a_run(10)
    heading, first = shown(table, stream, rows[0])
    assert heading.split()[:4] == ["steps", "episodes", "seconds", "fps"]
    assert first.split()[:2] == ["512", "3"]
    assert len(shown(table, stream, rows[1])) == 1
    before = len(stream.getvalue())
    table.epoch(1, {"rollout/success_rate": 0.3, "train/R_loss": 0.25})
    # What the summary of the epoch does not hold is that of its last row.
    summary = "  epoch 1: success 30%, return 0.67, R loss 0.25\n"
    assert stream.getvalue()[before:] == summary
    assert len(shown(table, stream, rows[2])) == 1


def test_the_last_evaluation_stands_beside_the_best() -> None:
    stream, health = io.StringIO(), Health(METRICS, 100)
    table = ConsoleTable(health, stream)
    for i, evaluated in enumerate((120.0, 340.0, 250.0, 12.0), start=1):
        row = {"timesteps": 1000 * i, "iterations": i, "eval/mean_reward": evaluated}
        table.write({**row, "rollout/ep_rew_mean": 100.0})
        health.best = Best(0.0, 340.0, 2000) if i > 1 else Best(0.0, 120.0, 1000)
        table.epoch(i, {})
    last = stream.getvalue().splitlines()[-1]
    assert "eval return 12.00 (best 340.00 at 2,000)" in last
    assert "WARNING eval return fell (from 340.00 to 12.00: the best policy is kept" in last


def test_the_trend_is_of_what_is_reached() -> None:
    stream = io.StringIO()
    table = make(stream)
    for i in range(12):
        table.write({"timesteps": i, "iterations": i, "rollout/ep_rew_mean": 10.0 * i})
    table.epoch(1, {})
    assert stream.getvalue().splitlines()[-1] == "  epoch 1: return 110.00 rising"


def test_a_warning_says_what_to_try_once() -> None:
    stream = io.StringIO()
    table = make(stream)
    wrong = {"train/approx_kl": 0.5, "rollout/ep_rew_mean": 0.0, "rollout/success_rate": 0.0}
    bad = [{**row, "epoch": i, **wrong} for i, row in enumerate(rows_like_a_run(6))]
    table.begin(bad[:2])  # a resume: the third in a row is the first it prints
    for row in bad[2:4]:
        table.write(row)
        table.epoch(int(row["epoch"]), {})
    first, second = (line for line in stream.getvalue().splitlines() if "epoch" in line)
    assert "WARNING KL too high (" in first
    assert "algorithm.learning_rate" in first
    assert second.endswith("WARNING KL too high")


def test_numbers_that_are_none_leave_a_gap() -> None:
    stream = io.StringIO()
    table = make(stream)
    row = {"timesteps": 512, "episodes": 1, "epoch": 1, "time/fps": math.nan, "train/std": None}
    _, line = shown(table, stream, row)
    assert line.split() == ["512", "1"]


def test_workers_and_the_bottleneck_are_named() -> None:
    row = {"system/workers": 2.0, "system/groups": 8.0, "system/restarts": 3.0}
    row |= {"system/bytes_per_second": 2.5e6, "time/collect": 3.0, "time/train": 1.0}
    assert fleet(row) == ["2 workers, 8 groups, 3 restarts", "2.5 MB/s, bottleneck collection"]
    assert bottleneck(row | {"time/transport": 2.0}) == "transport"
    assert bottleneck(row | {"time/train": 4.0}) == "learning"
    assert fleet({"time/collect": 3.0}) == []
