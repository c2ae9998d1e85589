"""Curves and bars as characters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.training.logs.curves import (
    MAX_POINTS,
    Axis,
    Curve,
    axis_of,
    bar,
    duration,
    number,
    span_of,
    spark,
    split,
)

FLOATS = st.floats(-1e300, 1e300)


def test_a_curve_rises_as_its_values_do() -> None:
    assert spark((0.0, 1.0, 2.0, 3.0), 4, 4)[0] == ("▁▃▅█",)
    assert spark((0.0, 8.0), 2, 4, 2) == (("  ██", "▁▁██"), Axis(0.0, 8.0))
    assert spark((math.nan, 1.0), 4, 8)[0] == ("  ▄▄    ",)
    assert spark((), 8, 5)[0] == ("     ",)


def test_an_axis_fits_its_values() -> None:
    assert spark((0.97, 0.98, 0.99, 1.0), 4, 4, 1, (0.0, 1.0))[0] != ("████",)
    assert axis_of([1600.0, 1610.0], (0, None)) == pytest.approx((1524.5, 1685.5, False))  # noise
    assert axis_of([-7.0, 0.5, 0.9], (-1, 1)) == (-1.0, 0.9, False)
    spikes = [0.01] * 9 + [5.0]
    assert axis_of(spikes, (0, None)) == (0.01, 5.0, True)
    assert axis_of(spikes).is_log is False  # it might be below 0
    assert axis_of([], (0, 1)).share(0.5) == 0.5


def test_one_spike_does_not_flatten_the_rest() -> None:
    values = (*[0.01, 0.02, 0.04] * 4, 5.0)
    lines, _ = spark(values, 13, 13, 2, (0, None))
    assert len(set(lines[1])) >= 4


@given(st.lists(FLOATS | st.just(math.nan), max_size=300), st.integers(1, 90), st.integers(1, 6))
def test_a_curve_has_its_size(values: list[float], width: int, height: int) -> None:
    lines, _ = spark(tuple(values), span_of(len(values), 1000), width, height)
    assert [len(line) for line in lines] == [width] * height


def test_a_long_run_keeps_its_shape_in_few_points() -> None:
    curve = Curve()
    for i in range(100_000):
        curve.add(float(i))
    points = curve.points
    assert len(points) <= MAX_POINTS
    assert list(points) == sorted(points)
    assert points[0] < 1000
    assert points[-1] > 99_000
    assert curve.last == 99_999


def test_a_metric_that_comes_late_starts_where_it_belongs() -> None:
    curve = Curve(rows_before=3)
    curve.add(1.0)
    curve.add(None)
    assert [math.isnan(point) for point in curve.points] == [True, True, True, False, False]
    assert curve.points[3:] == (1.0, 1.0)


def test_the_scale_is_the_run_or_doubles() -> None:
    assert [span_of(n, 20) for n in (1, 9, 17, 20, 25)] == [8, 16, 20, 20, 25]
    assert span_of(100, 10**6) == 128
    assert span_of(0, 0) == 1


def test_bars_fill_their_width() -> None:
    assert bar(0.5, 4) == ("━━", "──")
    assert bar(7.0, 2) == ("━━", "")
    assert bar(-1.0, 2) == ("", "──")
    assert split([1.0, 1.0, 2.0], 8) == [2, 2, 4]
    assert sum(split([0.3, 0.3, 0.1], 7)) == 7
    assert split([0.0], 7) == [0]


def test_numbers_and_durations_are_short() -> None:
    shown = [number(v) for v in (0.0, 0.0123, 3.14159, -250.77, 12_345.6, 3.2e9)]
    assert shown == ["0.00", "0.012", "3.14", "-250.8", "12,346", "3.20e+09"]
    assert [duration(s) for s in (7, 754, 11_045, 184_000)] == [
        "0:07",
        "12:34",
        "3:04:05",
        "2 d 03:06",
    ]
