"""The layout of the dashboard: plain data in, lines of styled text out.

Two layouts: panels side by side where there is room, otherwise one column from which the least
important blocks are left out until it fits.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from etude.training.logs.curves import bar, duration, number, spark, split

Line = list[Segment]
WIDE, TALL = 110, 30
"""From this size on there is room for two columns."""

PARTS = (
    ("physics", "█", "blue"),
    ("inference", "▓", "cyan"),
    ("environment", "▒", "green"),
    ("transport", "▚", "yellow"),
    ("collecting", "█", "blue"),
    ("learning", "▞", "magenta"),
    ("evaluation", "░", "yellow"),
    ("saving", "▤", "red"),
    ("other", "·", "white"),
)
"""Names of what takes time, each with a character (for terminals without colour) and a style."""


@dataclass(frozen=True)
class Level:
    """One level of the clock: its count, its total, and its share including the levels inside."""

    name: str
    done: int
    total: int
    share: float


@dataclass(frozen=True)
class Shown:
    """A curve with its last value, ready to draw."""

    label: str
    points: tuple[float, ...]
    value: str
    style: str
    span: int = 1
    """Number of points that fill the width of the drawing."""
    bounds: tuple[float | None, float | None] = (None, None)
    is_term: bool = False


@dataclass(frozen=True)
class View:
    """The content of the dashboard."""

    name: str
    folder: str
    state: str
    """Current activity, or how the run ended."""
    progress: str
    """Steps done and in total."""
    elapsed: float
    left: float | None
    levels: Sequence[Level]
    trend: str = ""
    """Last training result, and whether it still rises."""
    evaluated: str = ""
    """Last evaluation beside the best."""
    rows: Sequence[str] = ()
    """Heading and lines of the table of the last log rows."""
    facts: Sequence[tuple[str, str]] = ()
    """Names and values that describe the run."""
    scale: str = ""
    """The value at the right end of the curves: "40,960 steps"."""
    warnings: Sequence[tuple[str, str]] = ()
    curves: Sequence[Shown] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent lately, by the names in PARTS."""
    system: Sequence[str] = ()
    messages: Sequence[str] = ()


def draw(view: View, width: int, height: int) -> list[Line]:
    """At most `height` lines of exactly `width` cells."""
    roomy = width >= WIDE and height >= TALL
    lines = _wide(view, width, height) if roomy else _narrow(view, width, height)
    return [_fit(line, width) for line in lines[: max(height, 0)]]


def table_width(width: int) -> int:
    """Characters of a table in the left column of a terminal of this width."""
    return _left(width) - 4


def _left(width: int) -> int:
    """The width of the left one of two columns."""
    return width * 9 // 20


def _line(*pieces: str | tuple[str, str] | Line) -> Line:
    """A line of texts, texts with a style, and other lines."""
    line: Line = []
    for piece in pieces:
        if isinstance(piece, list):
            line += piece
        else:
            text, style = (piece, "") if isinstance(piece, str) else piece
            line.append(Segment(text, Style.parse(style)))
    return line


_length = Segment.get_line_length


def _fit(line: Line, width: int) -> Line:
    """Shorten (with …) or fill a line to `width` cells."""
    if width > 0 and _length(line) > width:
        cut = Segment.adjust_line_length(line, width - 1)
        return [*cut, Segment("…", cut[-1].style if cut else None)]
    return Segment.adjust_line_length(line, max(width, 0))


def _ends(left: Line, right: Line, width: int) -> Line:
    """Left and right ends of a line; the left one is cut where both do not fit."""
    room = width - _length(right) - 1
    return _fit(left, width) if room < 8 else _line(_fit(left, room), " ", right)


def _header(view: View, width: int) -> list[Line]:
    times = f"{duration(view.elapsed)} elapsed"
    if view.left is not None:
        times += f" · {duration(view.left)} left"
    state = _line((view.state, "bold green"), f" · {times} ")
    if _length(state) > width - 20:
        state = _line((view.state + " ", "bold green"))
    name = _line((" etude ", "reverse bold"), (" " + view.name, "bold"))
    folder = view.folder
    if cell_len(folder) > width - 1:  # cut at its start: the end says which run it is
        folder = "…" + folder[len(folder) - max(width - 2, 0) :]
    return [_ends(name, state, width), _line((" " + folder, "dim"))]


def _levels(view: View, width: int) -> list[Line]:
    figures = max((len(f"{v.done:,}/{v.total:,}") for v in view.levels), default=0)
    names = 10 if width >= 30 else 5
    lines = []
    for level in view.levels:
        name = f"{level.name[: names - 1]:<{names}}"
        count = f"{level.done:,}/{level.total:,}".rjust(figures)
        done, rest = bar(level.share, max(width - names - figures - 2, 1))
        lines.append(_line(name, (done, "bold cyan"), (rest, "dim"), f"  {count}"))
    return lines


def _curves(curves: Sequence[Shown], width: int, height: int, scale: str) -> list[Line]:
    """One line for each curve that fits; spare lines make the first curves taller.

    A tall curve has a heading, an axis and at least three lines. `scale`: the x axis.
    """
    shown = list(curves[: max(height, 0)])
    if not shown:
        return []
    main = sum(not curve.is_term for curve in shown)
    left = height - len(shown) - 1  # the x axis
    tall = max(min(main, left // 2), 0)
    sizes = [3 + (left - 2 * tall) // tall] * tall if tall else []
    sizes = [size + (i < (left - 2 * tall) % tall) for i, size in enumerate(sizes)]
    names = min(max(cell_len(curve.label) for curve in shown) + 1, max(width // 3, 6))
    values = max(len(curve.value) for curve in shown)
    lines: list[Line] = []
    for curve in shown:
        if curve.is_term or not sizes:
            lines.append(_flat(curve, names, max(width - names - values - 1, 1), values))
        else:
            lines += _tall(curve, width, min(9, sizes.pop(0)))
    if tall and scale:  # the x axis, from 0
        rule = "─" * max(width - AXIS - len(scale) - 2, 0)
        lines.append(_line((f"{'0':>{AXIS}}└{rule} {scale}", "dim")))
    return lines


def _flat(curve: Shown, names: int, width: int, values: int) -> Line:
    """A curve in one line, between its name and its value."""
    (text,), _ = spark(curve.points, curve.span, width, 1, curve.bounds)
    name = _fit(_line(curve.label), names - 1)
    return _line(name, " ", (text, curve.style), (f" {curve.value:>{values}}", "bold"))


AXIS = 9
"""Width of the numbers at a curve's axis."""


def _tall(curve: Shown, width: int, height: int) -> list[Line]:
    """A curve below its name and value, with the ends of its axis at its left."""
    rows = height - 1
    drawn, axis = spark(curve.points, curve.span, max(width - AXIS - 1, 1), rows, curve.bounds)
    marks = [number(axis.high), *[""] * (rows - 2), number(axis.low)]
    name = _line((curve.label, "bold"), (" (log)" if axis.is_log else "", "dim"))
    lines = [_ends(name, _line((curve.value, "bold")), width)]
    for mark, text in zip(marks, drawn, strict=True):
        left = f"{mark:>{AXIS}}{'┤' if mark else '│'}"
        lines.append(_line((left, "dim"), (text, curve.style)))
    return lines


def _time(view: View, width: int, rows: bool) -> list[Line]:
    """Where the time goes: one bar, and its parts in rows of their own or in one line."""
    total = sum(view.seconds.values())
    spent = [(n, c, s, view.seconds.get(n, 0.0)) for n, c, s in PARTS]
    known = [part for part in spent if part[-1] > 0.005 * total]
    if not known:
        return [_line(("nothing measured yet", "dim"))]
    sizes = split([seconds for *_, seconds in known], width)
    whole = _line(*[(c * size, s) for (_, c, s, _), size in zip(known, sizes, strict=True)])
    if rows:
        lines = [whole]
        for name, char, style, seconds in known:
            drawn = char * max(round((width - 20) * seconds / total), 1)
            share = f"{f'{seconds / total:.1%}':>6}  "
            lines.append(_line(f"{name:<12}", (share, "bold"), (drawn, style)))
        return lines
    lines = []
    for name, char, style, seconds in known:
        item = _line((char, style), f" {name} {seconds / total:.0%}")
        if lines and _length(lines[-1]) + 3 + _length(item) <= width:
            lines[-1] = _line(lines[-1], "   ", item)
        else:
            lines.append(item)
    return [whole, *lines]


def _health(view: View, width: int, height: int) -> list[Line]:
    first = _line((view.trend, "bold") if view.trend else ("too early to say", "dim"))
    if not view.warnings and view.trend:
        first = _line(first, ("   ✓ no warnings", "green"))
    wrapped = []
    for name, text in view.warnings:
        for i, piece in enumerate(textwrap.wrap(f"{name}: {text}", max(width - 2, 10))):
            wrapped.append(_line(("  " if i else "! ", "bold yellow"), (piece, "yellow")))
    names = [name for name, _ in view.warnings]
    room = max(height - 1, 0)
    if len(wrapped) > room:  # without the advice; one line for all where that is too long too
        names = names if len(names) <= room else [", ".join(names)]
        wrapped = [_line(("! ", "bold yellow"), (name, "yellow")) for name in names]
    return [first, *wrapped[:room]]


def _messages(view: View, width: int, count: int) -> list[Line]:
    """The last lines of the messages, at most `count`."""
    pieces = [
        piece
        for message in view.messages
        for piece in textwrap.wrap(message, max(width, 10), subsequent_indent="  ")
    ]
    return [_line((piece, "yellow")) for piece in pieces[-count:]]


def _facts(view: View, width: int, height: int) -> list[Line]:
    """Names and values that describe the run; long values are wrapped."""
    names = max((cell_len(name) for name, _ in view.facts), default=0) + 2
    lines = []
    for name, value in view.facts:
        for i, piece in enumerate(textwrap.wrap(value, max(width - names, 10)) or [""]):
            lines.append(_line((("" if i else name).ljust(names), "dim"), piece))
    if len(lines) > height > 0:
        lines[height - 1 :] = [_line((" " * names + "…", "dim"))]
    return lines[: max(height, 0)]


def _narrow(view: View, width: int, height: int) -> list[Line]:
    """One column; blocks in the order of the screen, the highest number is left out first."""

    def rule(title: str) -> Line:
        rest = "─" * max(width - len(title) - 4, 0)
        return _line(("── ", "dim"), (title, "bold"), (f" {rest}", "dim"))

    header, system = _header(view, width), " · ".join(view.system)
    facts = " · ".join(f"{name} {value}" for name, value in view.facts)
    health, evaluated = _health(view, width, 4), _line(view.evaluated)
    if view.evaluated and _length(evaluated) + _length(health[0]) + 3 <= width:
        health[0] = _ends(health[0], evaluated, width)
    elif view.evaluated:
        health.insert(1, evaluated)
    blocks: list[tuple[int, list[Line]]] = [
        (0, header[:1]),
        (5, header[1:]),
        (8, [_line((facts, "dim"))] if facts else []),
        (6, [rule(" · ".join(filter(None, ("progress", view.progress))))]),
        (1, _levels(view, width)),
        (2, []),
        (4, [rule("where the time goes"), *_time(view, width, rows=False)]),
        (3, [rule("health"), *health]),
        (7, [_line((system, "dim"))] if system else []),
        (3, _messages(view, width, 2)),
    ]
    wanted = min(len(view.curves), 4)
    for least in range(8, 0, -1):
        used = sum(len(lines) for _, lines in blocks)
        # Curves, block 2, take the lines that are left, even none.
        if used + (1 + wanted if wanted else 0) <= height or least == 2:
            break
        blocks = [(n, [] if n == least else lines) for n, lines in blocks]
    room = height - sum(len(lines) for _, lines in blocks)
    if view.curves and room >= 2:
        drawn = _curves(view.curves, width, room - 1, view.scale)
        blocks = [(n, [rule("curves"), *drawn] if n == 2 else lines) for n, lines in blocks]
    return [line for _, lines in blocks for line in lines]


def _box(title: str, lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Lines in a frame of exactly this size."""
    rule = "─" * max(width - cell_len(title) - 5, 0)
    framed = [_line(("╭─ ", "dim"), (title, "bold"), (f" {rule}╮", "dim"))]
    inside = [*lines[: height - 2], *(_line() for _ in range(height - 2 - len(lines)))]
    framed += [_line(("│ ", "dim"), _fit(line, width - 4), (" │", "dim")) for line in inside]
    return [*framed, _line((f"╰{'─' * (width - 2)}╯", "dim"))]


def _wide(view: View, width: int, height: int) -> list[Line]:
    """Two columns: progress and health of the run on the left, its curves on the right."""
    left = _left(width)
    right, inner, body = width - left - 1, table_width(width), height - 2
    evaluated = [_line(view.evaluated)] if view.evaluated else []
    panels = {
        "progress": [*_levels(view, inner), _line(), _line(view.progress)],
        "health": [*evaluated, *_health(view, inner, max(8, body // 3))],
        "where the time goes": _time(view, inner, rows=True),
        "messages": _messages(view, inner, 6) or [_line(("none", "dim"))],
        "machine": [_line(text) for text in view.system],
    }
    while sum(len(lines) + 2 for lines in panels.values()) > body - 4 and len(panels) > 2:
        panels.popitem()
    rest = body - sum(len(lines) + 2 for lines in panels.values())
    facts = _facts(view, inner, min(rest - 2, 6) if len(view.rows) > 1 and rest >= 10 else rest - 2)
    sizes = [(title, lines, len(lines) + 2) for title, lines in panels.items()]
    size = rest if rest < len(facts) + 6 else len(facts) + 2
    sizes.insert(1, ("run", facts, size))
    if size < rest:
        heading, *rows = view.rows or [""]
        table = [_line((heading, "dim")), *(_line(row) for row in rows[-max(rest - size - 3, 0) :])]
        sizes.insert(3, ("last rows", table, rest - size))
    column = [line for title, lines, size in sizes for line in _box(title, lines, left, size)]
    beside = _box("curves", _curves(view.curves, right - 4, body - 2, view.scale), right, body)
    pairs = zip(column, beside, strict=True)
    return [*_header(view, width), *(_line(_fit(a, left), " ", b) for a, b in pairs)]
