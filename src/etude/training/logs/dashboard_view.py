"""How the dashboard looks: plain data in, lines of styled text out. Knows no terminal and no time.

Two layouts: panels side by side where there is room, otherwise one column from which the least
important blocks are left out until it fits.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size

from etude.training.logs.curves import bar, duration, number, spark, split

Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""

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
"""What the time goes to, with a character (for terminals without colour) and a style."""


@dataclass(frozen=True)
class Level:
    """One level of the clock: how many of how many, and the share with the levels inside."""

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
    """How many points the width of the drawing stands for."""
    bounds: tuple[float | None, float | None] = (None, None)
    is_term: bool = False


@dataclass(frozen=True)
class View:
    """All that is on the dashboard."""

    name: str
    folder: str
    state: str
    """What it does now, or how it ended."""
    progress: str
    """Steps of how many."""
    elapsed: float
    left: float | None
    levels: Sequence[Level]
    trend: str = ""
    """What is reached in training, and whether it still rises."""
    evaluated: str = ""
    """The last evaluation beside the best."""
    rows: Sequence[str] = ()
    """The last log rows as lines of a table, below its heading."""
    facts: Sequence[tuple[str, str]] = ()
    """What the run is: names and values."""
    scale: str = ""
    """What the right end of the curves stands for, such as "40,960 steps"."""
    warnings: Sequence[tuple[str, str]] = ()
    curves: Sequence[Shown] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went lately, by the names in PARTS."""
    system: Sequence[str] = ()
    messages: Sequence[str] = ()


def draw(view: View, width: int, height: int) -> list[Line]:
    """At most `height` lines of exactly `width` cells."""
    roomy = width >= WIDE and height >= TALL
    lines = _wide(view, width, height) if roomy else _narrow(view, width, height)
    return [fit(line, width) for line in lines[: max(height, 0)]]


def fit(line: Line, width: int) -> Line:
    """Shortened (with …) or filled up to `width` cells."""
    fitted: Line = []
    left = width
    for text, style in line:
        length = cell_len(text)
        if length > left:
            cut = set_cell_size(text, left - 1) + "…" if left > 0 else ""
            return [*fitted, (cut, style)]
        fitted.append((text, style))
        left -= length
    return [*fitted, (" " * left, "")] if left else fitted


def length_of(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def _ends(left: Line, right: Line, width: int) -> Line:
    """Left and right ends of a line; the left one is cut where both do not fit."""
    room = width - length_of(right) - 1
    if room < 8:
        return fit(left, width)
    return [*fit(left, room), (" ", ""), *right]


def _path(text: str, width: int) -> str:
    """A path, cut at its start: the end says which run it is."""
    return text if cell_len(text) <= width else "…" + text[len(text) - max(width - 1, 0) :]


def _header(view: View, width: int) -> list[Line]:
    times = f"{duration(view.elapsed)} elapsed"
    if view.left is not None:
        times += f" · {duration(view.left)} left"
    name: Line = [(" etude ", "reverse bold"), (" " + view.name, "bold")]
    state: Line = [(view.state, "bold green"), (f" · {times} ", "")]
    if length_of(state) > width - 20:
        state = [(view.state + " ", "bold green")]
    return [_ends(name, state, width), [(" " + _path(view.folder, width - 1), "dim")]]


def _bars(view: View, width: int) -> list[Line]:
    lines: list[Line] = []
    figures = max((len(f"{v.done:,}/{v.total:,}") for v in view.levels), default=0)
    names = 10 if width >= 30 else 5
    for level in view.levels:
        name = f"{level.name[: names - 1]:<{names}}"
        count = f"{level.done:,}/{level.total:,}".rjust(figures)
        done, rest = bar(level.share, max(width - names - figures - 2, 1))
        lines.append([(name, ""), (done, "bold cyan"), (rest, "dim"), (f"  {count}", "")])
    return lines


def _curves(curves: Sequence[Shown], width: int, height: int, scale: str) -> list[Line]:
    """As many curves as there are lines for; `scale`: the x axis.

    A curve needs a line, between its name and its value. Lines that are left make the first ones
    taller: these have a heading and an axis, and three lines at least.
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
    return [*lines, *_x_axis(scale, width)] if tall else lines


def _flat(curve: Shown, names: int, width: int, values: int) -> Line:
    """A curve in one line, between its name and its value."""
    (text,), _ = spark(curve.points, curve.span, width, 1, curve.bounds)
    name = fit([(curve.label, "")], names - 1)
    return [*name, (" ", ""), (text, curve.style), (f" {curve.value:>{values}}", "bold")]


AXIS = 9
"""Width of the numbers at a curve's axis."""


def _tall(curve: Shown, width: int, height: int) -> list[Line]:
    """A curve below its name and value, with the ends of its axis at its left."""
    rows = height - 1
    drawn, axis = spark(curve.points, curve.span, max(width - AXIS - 1, 1), rows, curve.bounds)
    marks = [number(axis.high), *[""] * (rows - 2), number(axis.low)]
    name: Line = [(curve.label, "bold"), (" (log)" if axis.is_log else "", "dim")]
    lines = [_ends(name, [(curve.value, "bold")], width)]
    for mark, text in zip(marks, drawn, strict=True):
        left = f"{mark:>{AXIS}}{'┤' if mark else '│'}"
        lines.append([(left, "dim"), (text, curve.style)])
    return lines


def _x_axis(scale: str, width: int) -> list[Line]:
    """From 0 to what the right end stands for."""
    rule = "─" * max(width - AXIS - len(scale) - 2, 0)
    return [[(f"{'0':>{AXIS}}└", "dim"), (f"{rule} {scale}", "dim")]] if scale else []


def _time(view: View, width: int, rows: bool) -> list[Line]:
    """Where the time goes: one bar, and what its parts are, in rows of their own or in a line."""
    total = sum(view.seconds.values())
    spent = [(n, c, s, view.seconds.get(n, 0.0)) for n, c, s in PARTS]
    known = [part for part in spent if part[-1] > 0.005 * total]
    if not known:
        return [[("nothing measured yet", "dim")]]
    sizes = split([seconds for *_, seconds in known], width)
    whole: Line = [(c * size, s) for (_, c, s, _), size in zip(known, sizes, strict=True)]
    if not rows:
        items: list[Line] = [[(c, s), (f" {n} {t / total:.0%}", "")] for n, c, s, t in known]
        return [whole, *_flow(items, width)]
    lines = [whole]
    for name, char, style, seconds in known:
        size = round((width - 20) * seconds / total)
        share = f"{seconds / total:>5.1%}"
        text = char * max(size, 1)
        lines.append([(f"{name:<12}", ""), (f"{share:>6}  ", "bold"), (text, style)])
    return lines


def _flow(items: Sequence[Line], width: int) -> list[Line]:
    """Items one after the other, in as many lines as they need; none is split."""
    lines: list[Line] = []
    for item in items:
        if lines and length_of(lines[-1]) + 3 + length_of(item) <= width:
            lines[-1] += [("   ", ""), *item]
        else:
            lines.append(list(item))
    return lines


def _health(view: View, width: int, height: int) -> list[Line]:
    lines: list[Line] = [[(view.trend or "too early to say", "bold" if view.trend else "dim")]]
    if not view.warnings and view.trend:
        lines[0] += [("   ✓ no warnings", "green")]
    wrapped: list[Line] = []
    for name, text in view.warnings:
        wrapped += [
            [("! " if i == 0 else "  ", "bold yellow"), (piece, "yellow")]
            for i, piece in enumerate(textwrap.wrap(f"{name}: {text}", max(width - 2, 10)))
        ]
    room = max(height - len(lines), 0)
    if len(wrapped) > room:  # not all of the advice fits: at least say what is wrong
        wrapped = [[("! ", "bold yellow"), (name, "yellow")] for name, _ in view.warnings]
    if len(wrapped) > room:
        names = ", ".join(name for name, _ in view.warnings)
        wrapped = [[("! ", "bold yellow"), (names, "yellow")]]
    return [*lines, *wrapped[:room]]


def _messages(view: View, width: int, count: int) -> list[Line]:
    """The last ones, as many lines as there is room for."""
    lines: list[Line] = []
    for message in view.messages:
        pieces = textwrap.wrap(message, max(width, 10), subsequent_indent="  ")
        lines += [[(text, "yellow")] for text in pieces]
    return lines[-count:] if count > 0 else []


def _facts(view: View, width: int, height: int) -> list[Line]:
    """What the run is, a line each; the last may take what lines are left."""
    names = max((cell_len(name) for name, _ in view.facts), default=0) + 2
    lines: list[Line] = []
    for name, value in view.facts:
        pieces = textwrap.wrap(value, max(width - names, 10)) or [""]
        titles = [name, *[""] * (len(pieces) - 1)]
        pairs = zip(titles, pieces, strict=True)
        lines += [[(title.ljust(names), "dim"), (text, "")] for title, text in pairs]
    if len(lines) > height > 0:
        lines = [*lines[: height - 1], [("".ljust(names) + "…", "dim")]]
    return lines[: max(height, 0)]


def _rows(view: View, height: int) -> list[Line]:
    """The heading and the last rows."""
    heading, *rows = view.rows or [""]
    return [[(heading, "dim")], *[[(row, "")] for row in rows[-max(height - 1, 0) :]]]


def _rule(title: str, width: int) -> Line:
    return [("── ", "dim"), (title, "bold"), (" " + "─" * max(width - len(title) - 4, 0), "dim")]


def _narrow(view: View, width: int, height: int) -> list[Line]:
    """One column; blocks in the order of the screen, the number says who goes first."""
    header, system = _header(view, width), " · ".join(view.system)
    facts = " · ".join(f"{name} {value}" for name, value in view.facts)
    health = _health(view, width, 4)
    if view.evaluated and len(view.evaluated) + length_of(health[0]) + 3 <= width:
        health[0] = _ends(health[0], [(view.evaluated, "")], width)
    elif view.evaluated:
        health.insert(1, [(view.evaluated, "")])
    blocks: list[tuple[int, list[Line]]] = [
        (0, header[:1]),
        (5, header[1:]),
        (8, [[(facts, "dim")]] if facts else []),
        (6, [_rule(" · ".join(filter(None, ("progress", view.progress))), width)]),
        (1, _bars(view, width)),
        (2, []),
        (4, [_rule("where the time goes", width), *_time(view, width, rows=False)]),
        (3, [_rule("health", width), *health]),
        (7, [[(system, "dim")]] if system else []),
        (3, _messages(view, width, 2)),
    ]
    wanted = min(len(view.curves), 4)
    for least in range(8, 0, -1):
        used = sum(len(lines) for _, lines in blocks)
        if used + (1 + wanted if wanted else 0) <= height:
            break
        if least == 2:
            break  # curves take what is left, also when that is nothing
        blocks = [(n, [] if n == least else lines) for n, lines in blocks]
    room = height - sum(len(lines) for _, lines in blocks)
    if view.curves and room >= 2:
        drawn = _curves(view.curves, width, room - 1, view.scale)
        blocks = [(n, [_rule("curves", width), *drawn] if n == 2 else lines) for n, lines in blocks]
    return [line for _, lines in blocks for line in lines]


def _box(title: str, lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Lines in a frame of exactly this size."""
    rule = "─" * max(width - cell_len(title) - 5, 0)
    framed: list[Line] = [[("╭─ ", "dim"), (title, "bold"), (f" {rule}╮", "dim")]]
    inside: list[Line] = [*lines, *[[] for _ in range(height)]]
    for line in inside[: height - 2]:
        framed.append([("│ ", "dim"), *fit(line, width - 4), (" │", "dim")])
    return [*framed, [(f"╰{'─' * (width - 2)}╯", "dim")]]


def _left(width: int) -> int:
    """The width of the left one of two columns."""
    return width * 9 // 20


def table_width(width: int) -> int:
    """Characters that a table has in the left column of a terminal of that width."""
    return _left(width) - 4


def _wide(view: View, width: int, height: int) -> list[Line]:
    """Two columns: the run and how it fares on the left, its curves on the right."""
    left = _left(width)
    right, inner, body = width - left - 1, table_width(width), height - 2
    time, messages = _time(view, inner, rows=True), _messages(view, inner, 6)
    progress = [*_bars(view, inner), [], [(view.progress, "")]]
    evaluated: list[Line] = [[(view.evaluated, "")]] if view.evaluated else []
    health = [*evaluated, *_health(view, inner, max(8, body // 3))]
    sizes = {
        "progress": progress,
        "health": health,
        "where the time goes": time,
        "messages": messages or [[("none", "dim")]],
        "machine": [[(text, "")] for text in view.system],
    }
    while sum(len(lines) + 2 for lines in sizes.values()) > body - 4 and len(sizes) > 2:
        sizes.popitem()
    rest = body - sum(len(lines) + 2 for lines in sizes.values())
    facts = _facts(view, inner, min(rest - 2, 6) if len(view.rows) > 1 and rest >= 10 else rest - 2)
    panels = [(title, lines, len(lines) + 2) for title, lines in sizes.items()]
    size = rest if rest < len(facts) + 6 else len(facts) + 2
    panels.insert(1, ("run", facts, size))
    if size < rest:
        panels.insert(3, ("last rows", _rows(view, rest - size - 2), rest - size))
    column = [line for title, lines, size in panels for line in _box(title, lines, left, size)]
    beside = _box("curves", _curves(view.curves, right - 4, body - 2, view.scale), right, body)
    pairs = zip(column, beside, strict=True)
    return [*_header(view, width), *[[*fit(a, left), (" ", ""), *b] for a, b in pairs]]
