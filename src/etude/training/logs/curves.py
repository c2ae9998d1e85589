"""Curves and bars as characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

MAX_POINTS = 256
EIGHTHS = " ▁▂▃▄▅▆▇█"


class Curve:
    """A metric over a whole run, in at most `MAX_POINTS` points."""

    def __init__(self, rows_before: int = 0) -> None:
        """rows_before: rows of the run before the metric's first value."""
        self.last: float | None = None
        self.per_point = 1
        """Rows that make a point."""
        self._means: list[float] = []
        self._open: list[float] = []
        if rows_before:
            self.add(None, rows_before)

    def add(self, value: float | None, rows: int = 1) -> None:
        """Add the value of one or several rows; a row without a value repeats the last one."""
        self.last = self.last if value is None else value
        while rows:
            taken = min(rows, self.per_point - len(self._open))
            self._open += [math.nan if self.last is None else self.last] * taken
            rows -= taken
            self._close_point()

    def _close_point(self) -> None:
        if len(self._open) < self.per_point:
            return
        self._means.append(fmean(self._open))
        self._open = []
        if len(self._means) == MAX_POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(a + b) / 2 for a, b in pairs]
            self.per_point *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """Oldest first, NaN before the first value; the last may have fewer rows than others."""
        rest = self._open  # another thread may replace this list
        return (*self._means, *([fmean(rest)] if rest else []))


def span_of(count: int, expected: int) -> int:
    """The number of points in the width of a curve.

    This is the whole run if it is short. In a longer one the curve fills at least half of the
    width; when it has reached the end, the scale is halved.
    """
    zoom = 8
    while zoom < count:
        zoom *= 2
    return max(min(zoom, expected), count, 1)


def spread(values: Sequence[float], span: int, width: int) -> list[float]:
    """One value per column: means of several values, or the same value in several columns."""
    columns = []
    for i in range(width):
        start = i * span // width
        piece = values[start : max((i + 1) * span // width, start + 1)]
        if not piece:
            break
        columns.append(sum(piece) / len(piece))
    return columns


class Axis(NamedTuple):
    """The scale of a curve: the values at its bottom and top line, and how it is divided."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """The position of a value from 0 at the bottom to 1 at the top, clamped."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        extent = high - low if high > low else 1.0  # may be so small that 1 / it overflows
        return min(max((value - low) / extent, 0.0), 1.0)


Bounds = tuple[float | None, float | None]
"""The lowest and the highest value to draw; None for no limit."""
LEAST_EXTENT = 0.1
"""The least extent of an axis relative to the largest value, so that small changes look small."""
LOGARITHMIC = 20.0
"""An axis is logarithmic if the largest of positive values exceeds the median by this factor."""


def axis_of(values: Sequence[float], bounds: Bounds = (None, None)) -> Axis:
    """An axis that fits the values, within bounds. Bounds that the values do not reach and a few
    outliers do not flatten the curve."""
    least, most = (-math.inf if bounds[0] is None else bounds[0]), bounds[1]
    most = math.inf if most is None else most
    inside = [min(max(value, least), most) for value in values] or [0.0]
    low, high = min(inside), max(inside)
    middle = median(inside)
    if low > 0.0 and bounds == (0, None) and high > LOGARITHMIC * middle:
        return Axis(low, high, True)
    missing = LEAST_EXTENT * max(abs(low), abs(high)) - (high - low)
    if missing > 0.0 and math.isfinite(missing):
        low, high = low - missing / 2, high + missing / 2
        low, high = max(low, least), min(high, most)
    return Axis(low, high)


@lru_cache(maxsize=64)
def spark(
    values: tuple[float, ...],
    span: int,
    width: int,
    height: int = 1,
    bounds: Bounds = (None, None),
) -> tuple[tuple[str, ...], Axis]:
    """A filled curve in `height` lines of `width` characters, the top line first; and its axis.

    span: number of values in the whole width. Cached, since a curve changes less often than it is
    drawn.
    """
    columns = spread(values, span, width)
    axis = axis_of([value for value in columns if not math.isnan(value)], bounds)
    # The lowest value is drawn as a line, unlike a missing one.
    levels = [0 if math.isnan(v) else max(1, round(8 * height * axis.share(v))) for v in columns]
    lines = []
    for line in reversed(range(height)):
        text = "".join(EIGHTHS[max(0, min(8, level - 8 * line))] for level in levels)
        lines.append(text.ljust(width))
    return tuple(lines), axis


def bar(share: float, width: int) -> tuple[str, str]:
    """A progress bar: its done part and the rest, `width` characters together."""
    halves = round(2 * width * max(0.0, min(1.0, share)))
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return done, "─" * (width - len(done))


def split(shares: Sequence[float], width: int) -> list[int]:
    """Divide `width` into whole numbers of characters in proportion to the shares."""
    total = sum(shares)
    if total <= 0.0:
        return [0] * len(shares)
    ends, reached = [0], 0.0
    for share in shares:
        reached += share
        ends.append(round(width * reached / total))
    return [b - a for a, b in pairwise(ends)]


def number(value: float) -> str:
    """A number of any size in about six characters."""
    size = abs(value)
    if size >= 1e6:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or value == 0.0 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """0:07, 12:34, 3:04:05, 2 d 03:04."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
