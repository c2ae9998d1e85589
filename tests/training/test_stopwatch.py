"""Steps per second are of collecting and training, whatever else the run does."""

from __future__ import annotations

import time

import pytest

from etude.training.loop import Stopwatch


def test_evaluation_and_saving_do_not_slow_the_steps_per_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = Stopwatch()
    watch.begin(500)
    for name, seconds in (("collect", 2.0), ("train", 3.0), ("test", 40.0), ("save", 10.0)):
        with watch.phase(name):
            now += seconds
    row = watch.read(1500, 4)
    assert row["time/fps"] == pytest.approx(200.0)
    assert row["time/collect_fps"] == pytest.approx(500.0)
    assert row["time/time_elapsed"] == pytest.approx(55.0)
    assert row["time/test"] == pytest.approx(40.0)
