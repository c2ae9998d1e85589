"""A picture of a comparison: curves over seeds with their bands, and the final score of each run.

It is drawn once, on a canvas that is an SVG or a PNG.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

import numpy as np

from etude.compare.comparison import Comparison, Group
from etude.compare.reading import printable
from etude.core.metrics import statistics
from etude.training.logs.curves import number

COLORS = ("#2563eb", "#e07b00", "#16935a", "#c2335b", "#7c4dbd", "#0f8b9c", "#8a6d1f", "#5b6472")
INK, FAINT, GRID, PAPER = "#1e2228", "#667085", "#e4e7ec", "#ffffff"
WIDTH, HEIGHT = 960, 440
_LEFT, _TOP, _BOTTOM, _SIDE, _LINE = 64, 44, 52, 200, 20
_PNG_SCALE = 2
Point = tuple[float, float]


class Canvas(Protocol):
    """What the picture is drawn on; lengths are pixels, y grows downward."""

    def line(self, points: Sequence[Point], color: str, width: float = 1.0) -> None:
        """A line through points."""

    def area(self, points: Sequence[Point], color: str, opacity: float) -> None:
        """A filled polygon."""

    def dot(self, at: Point, radius: float, color: str, opacity: float = 1.0) -> None:
        """A filled circle."""

    def text(
        self, at: Point, text: str, color: str = INK, anchor: str = "start", size: int = 13
    ) -> None:
        """A line of text whose start, middle or end is at a point, on its middle height."""


class SvgCanvas:
    """An SVG, with whatever text there is escaped."""

    def __init__(self, width: float, height: float) -> None:
        self._size = (width, height)
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], color: str, width: float = 1.0) -> None:
        self._parts.append(
            f'<polyline points="{_joined(points)}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}" stroke-linejoin="round"/>'
        )

    def area(self, points: Sequence[Point], color: str, opacity: float) -> None:
        self._parts.append(
            f'<polygon points="{_joined(points)}" fill="{color}" fill-opacity="{opacity:g}"/>'
        )

    def dot(self, at: Point, radius: float, color: str, opacity: float = 1.0) -> None:
        self._parts.append(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}" fill="{color}" '
            f'fill-opacity="{opacity:g}"/>'
        )

    def text(
        self, at: Point, text: str, color: str = INK, anchor: str = "start", size: int = 13
    ) -> None:
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1] + 0.35 * size:.1f}" fill="{color}" '
            f'font-size="{size}" text-anchor="{anchor}">{escape(printable(text))}</text>'
        )

    def bytes(self) -> bytes:
        """The file."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif">\n'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        ).encode()


class PngCanvas:
    """A PNG of twice the resolution, smoothed."""

    def __init__(self, width: float, height: float) -> None:
        from PIL import Image, ImageDraw

        self._scale, self._over = _PNG_SCALE, 2
        size = (round(width * self._unit), round(height * self._unit))
        self._image = Image.new("RGB", size, PAPER)
        self._pen = ImageDraw.Draw(self._image, "RGBA")

    @property
    def _unit(self) -> int:
        return self._scale * self._over

    def line(self, points: Sequence[Point], color: str, width: float = 1.0) -> None:
        scaled = self._scaled(points)
        self._pen.line(scaled, color, max(round(width * self._unit), 1), joint="curve")

    def area(self, points: Sequence[Point], color: str, opacity: float) -> None:
        self._pen.polygon(self._scaled(points), _with_opacity(color, opacity))

    def dot(self, at: Point, radius: float, color: str, opacity: float = 1.0) -> None:
        (x, y), r = self._scaled([at])[0], radius * self._unit
        self._pen.ellipse((x - r, y - r, x + r, y + r), _with_opacity(color, opacity))

    def text(
        self, at: Point, text: str, color: str = INK, anchor: str = "start", size: int = 13
    ) -> None:
        from PIL import ImageFont

        place = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        font = ImageFont.load_default(size * self._unit)
        self._pen.text(self._scaled([at])[0], printable(text), color, font, anchor=place)

    def _scaled(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self._unit, y * self._unit) for x, y in points]

    def bytes(self) -> bytes:
        """The file."""
        small = self._image.reduce(self._over)
        stream = io.BytesIO()
        small.save(stream, "PNG", optimize=True)
        return stream.getvalue()


def _joined(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _with_opacity(color: str, opacity: float) -> Any:
    return (*(int(color[i : i + 2], 16) for i in (1, 3, 5)), round(255 * opacity))


def svg(comparison: Comparison) -> bytes:
    """The picture as an SVG file."""
    canvas = SvgCanvas(WIDTH, height_of(comparison))
    draw(canvas, comparison)
    return canvas.bytes()


def png(comparison: Comparison) -> bytes:
    """The picture as a PNG file."""
    canvas = PngCanvas(WIDTH, height_of(comparison))
    draw(canvas, comparison)
    return canvas.bytes()


def height_of(comparison: Comparison) -> int:
    """Pixels from top to bottom: every group has a line in the legend."""
    return HEIGHT + _LINE * len(comparison.groups)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two values, at most so many."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def steps_text(value: float) -> str:
    """A number of steps, short: 250k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"


def draw(canvas: Canvas, comparison: Comparison) -> None:
    """Curves on the left, final scores on the right, and below them what the colors are."""
    groups = comparison.groups
    bands = [statistics.band(group.values) for group in groups]
    everything = np.concatenate([np.concatenate(each) for each in bands])
    scores = np.concatenate([group.final[:, 0] for group in groups])
    low, high = (min(everything.min(), scores.min()), max(everything.max(), scores.max()))
    if comparison.is_share:
        low, high = 0.0, 1.0
    room = 0.04 * ((high - low) or abs(high) or 1.0)
    low, high = low - room, high + room
    last = max(group.steps[-1] for group in groups)
    right, bottom = WIDTH - _SIDE - 24, HEIGHT - _BOTTOM

    def place(step: float, value: float) -> Point:
        x = _LEFT + (right - _LEFT) * step / (last or 1)
        return x, bottom - (bottom - _TOP) * (value - low) / (high - low)

    canvas.text((_LEFT, 20), comparison.metric, size=15)
    canvas.text((right + 24, 20), "final scores, IQM", size=15)
    for value in ticks(low, high):
        y = place(0, value)[1]
        canvas.line([(_LEFT, y), (right, y)], GRID)
        canvas.line([(right + 24, y), (WIDTH - 16, y)], GRID)
        label = f"{value:.0%}" if comparison.is_share else number(value)
        canvas.text((_LEFT - 8, y), label, FAINT, "end")
    for step in ticks(0, last):
        x = place(step, 0)[0]
        canvas.line([(x, bottom), (x, bottom + 4)], FAINT)
        canvas.text((x, bottom + 16), steps_text(step), FAINT, "middle")
    canvas.line([(_LEFT, bottom), (right, bottom)], FAINT)
    canvas.text(((_LEFT + right) / 2, bottom + 36), comparison.unit, FAINT, "middle")
    if comparison.success is not None and low < comparison.success < high:
        y = place(0, comparison.success)[1]
        for x in range(_LEFT, right, 8):
            canvas.line([(x, y), (x + 4, y)], FAINT)
    for index, (group, (middle, under, over)) in enumerate(zip(groups, bands, strict=True)):
        color = COLORS[index % len(COLORS)]
        there = [place(step, value) for step, value in zip(group.steps, over, strict=True)]
        back = [place(step, value) for step, value in zip(group.steps, under, strict=True)]
        if len(there) > 1 and len(group.runs) > 1:
            canvas.area([*there, *reversed(back)], color, 0.18)
        curve = [place(step, value) for step, value in zip(group.steps, middle, strict=True)]
        canvas.line(curve, color, 2.0) if len(curve) > 1 else canvas.dot(curve[0], 3, color)
        width = (WIDTH - 16 - right - 24) / len(groups)
        _final(canvas, group, right + 24 + width * (index + 0.5), place, color)
        y = HEIGHT + 4 + _LINE * index
        canvas.line([(_LEFT, y), (_LEFT + 22, y)], color, 3.0)
        many = f"{len(group.runs)} run{'s' if len(group.runs) > 1 else ''}"
        canvas.text((_LEFT + 30, y), f"{group.name}, {many}"[:110])


def _final(canvas: Canvas, group: Group, x: float, place: Any, color: str) -> None:
    """The score of each run, and the interquartile mean with its interval."""
    found = statistics.estimate(statistics.iqm, group.final, draws=10_000)
    low, high = place(0, found.low)[1], place(0, found.high)[1]
    if len(group.runs) > 1:
        canvas.line([(x, low), (x, high)], color, 2.0)
        for y in (low, high):
            canvas.line([(x - 4, y), (x + 4, y)], color, 2.0)
    for k, score in enumerate(group.final[:, 0]):
        side = 8.0 + 3.0 * (k % 3)
        canvas.dot((x + side, place(0, float(score))[1]), 2.5, color, 0.5)
    canvas.dot((x, place(0, found.value)[1]), 4.5, color)
    canvas.text((x, HEIGHT - _BOTTOM + 16), group.letter, color, "middle")
