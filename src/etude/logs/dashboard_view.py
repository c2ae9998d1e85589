"""How the dashboard looks: plain data in, lines of styled text out. Knows no terminal and no time.

Two layouts: panels side by side where there is room, otherwise one column from which the least
important blocks are left out until it fits.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size

from etude.logs.curves import bar, duration, number, spark, split

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
    phase: str = ""
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


def _curves(curves: Sequence[Shown], width: int, height: int) -> list[Line]:
    """As many curves as there are lines for, each as tall as they allow."""
    shown = list(curves[: max(height, 0)])
    if not shown:
        return []
    terms = sum(curve.is_term for curve in shown)
    main = len(shown) - terms
    tall = max(1, min(6, (height - terms) // main)) if main else 1
    gap = int(tall >= 3)  # a curve that touches the next one cannot be read
    names = min(max(cell_len(curve.label) for curve in shown) + 1, max(width // 3, 6))
    values = max(len(curve.value) for curve in shown)
    lines: list[Line] = []
    for curve in shown:
        rows = 1 if curve.is_term else tall - gap
        lines += _curve(curve, names, max(width - names - values - 1, 1), values, rows)
        if gap and not curve.is_term:
            lines.append([])
    return lines


def _curve(curve: Shown, names: int, width: int, values: int, rows: int) -> list[Line]:
    """One curve between its name and its value; a tall one shows its range too."""
    beside = [(curve.label, "")] + [("", "")] * (rows - 1)
    known = [point for point in curve.points if not math.isnan(point)]
    if rows >= 3 and known:
        beside[-2:] = [(f" ↑ {number(max(known))}", "dim"), (f" ↓ {number(min(known))}", "dim")]
    lines: list[Line] = []
    for i, text in enumerate(spark(curve.points, curve.span, width, rows, curve.bounds)):
        value = curve.value if i == 0 else ""
        name = fit([beside[i]], names - 1)
        lines.append([*name, (" ", ""), (text, curve.style), (f" {value:>{values}}", "bold")])
    return lines


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
    lines: list[Line] = [[("phase  ", "dim"), (view.phase or "no rows yet", "bold")]]
    if not view.warnings and view.phase:
        lines.append([("✓ no warnings", "green")])
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
    lines: list[Line] = []
    for message in view.messages:
        lines += [[(text, "yellow")] for text in textwrap.wrap(message, max(width, 10))]
    return lines[-count:]


def _rule(title: str, width: int) -> Line:
    return [("── ", "dim"), (title, "bold"), (" " + "─" * max(width - len(title) - 4, 0), "dim")]


def _narrow(view: View, width: int, height: int) -> list[Line]:
    """One column; blocks in the order of the screen, the number says who goes first."""
    header, system = _header(view, width), " · ".join(view.system)
    blocks: list[tuple[int, list[Line]]] = [
        (0, header[:1]),
        (5, header[1:]),
        (6, [_rule(" · ".join(filter(None, ("progress", view.progress))), width)]),
        (1, _bars(view, width)),
        (2, []),
        (4, [_rule("where the time goes", width), *_time(view, width, rows=False)]),
        (3, [_rule("health", width), *_health(view, width, 4)]),
        (7, [[(system, "dim")]] if system else []),
        (3, _messages(view, width, 2)),
    ]
    wanted = min(len(view.curves), 3)
    for least in range(7, 0, -1):
        used = sum(len(lines) for _, lines in blocks)
        if used + (1 + wanted if wanted else 0) <= height:
            break
        if least == 2:
            break  # curves take what is left, also when that is nothing
        blocks = [(n, [] if n == least else lines) for n, lines in blocks]
    room = height - sum(len(lines) for _, lines in blocks)
    if view.curves and room >= 2:
        curves = [_rule("curves", width), *_curves(view.curves, width, room - 1)]
        blocks = [(n, curves if n == 2 else lines) for n, lines in blocks]
    return [line for _, lines in blocks for line in lines]


def _box(title: str, lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Lines in a frame of exactly this size."""
    rule = "─" * max(width - cell_len(title) - 5, 0)
    framed: list[Line] = [[("╭─ ", "dim"), (title, "bold"), (f" {rule}╮", "dim")]]
    inside: list[Line] = [*lines, *[[] for _ in range(height)]]
    for line in inside[: height - 2]:
        framed.append([("│ ", "dim"), *fit(line, width - 4), (" │", "dim")])
    return [*framed, [(f"╰{'─' * (width - 2)}╯", "dim")]]


def _wide(view: View, width: int, height: int) -> list[Line]:
    """Two columns: how far and how well on the left, the curves on the right."""
    left = width * 9 // 20
    right, inner, body = width - left - 1, left - 4, height - 2
    time = _time(view, inner, rows=True)
    rate = [[], [(view.progress, "")]]
    panels = [
        ("progress", [*_bars(view, inner), *rate], len(view.levels) + 4),
        ("where the time goes", time, len(time) + 2),
        ("machine", [[(text, "")] for text in view.system], len(view.system) + 2),
    ]
    messages = _messages(view, inner, 4)
    if messages:
        panels.append(("messages", messages, len(messages) + 2))
    rest = body - sum(size for *_, size in panels)
    if rest < 4:
        panels, rest = panels[:2], body - sum(size for *_, size in panels[:2])
    panels.insert(2, ("health", _health(view, inner, rest - 2), rest))
    column = [line for title, lines, size in panels for line in _box(title, lines, left, size)]
    curves = _curves(view.curves, right - 4, body - 2)
    beside = _box("curves", curves, right, body)
    pairs = zip(column, beside, strict=True)
    return [*_header(view, width), *[[*fit(a, left), (" ", ""), *b] for a, b in pairs]]
