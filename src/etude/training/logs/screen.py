"""A picture at the bottom of a terminal that is changed in place, and prints that go above it.

Only lines that changed are written, over the old ones, so nothing flickers. The cursor stays
visible and the screen the ordinary one: a process that is killed leaves a terminal that works.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TextIO

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

from etude.training.logs.dashboard_view import Line

ERASE_REST, ERASE_BELOW = "\x1b[K", "\x1b[J"
"""Of the line, and of the screen. Always after writing: some terminals keep a copy of a screen
that is erased from its top, and it would show up in what one scrolls back to."""


class Screen:
    """The lines of a terminal above the cursor, which waits at the start of an empty one."""

    def __init__(self, console: Console) -> None:
        self._stream = console.file
        self._colors = COLOR_SYSTEMS.get(console.color_system or "")
        self._no_color = console.no_color
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._width = console.width

    def show(self, lines: Sequence[Line], width: int) -> None:
        """Put these lines where the last ones are."""
        new = [self._text(line, width) for line in lines]
        with self._lock:
            self._width = width
            old, self._lines = self._lines, new
            if len(old) != len(new):
                self._paint(len(old), new)
                return
            changed = ""
            for i, (before, after) in enumerate(zip(old, new, strict=True)):
                if before != after:
                    up = len(new) - i
                    changed += f"{_up(up)}{after}\r\x1b[{up}B"
            self._write(changed)

    def print_above(self, text: str) -> None:
        """Whole lines of ordinary output; the picture moves down or they scroll away."""
        with self._lock:
            above = [
                line if line and cell_len(line) % self._width == 0 else line + ERASE_REST
                for line in text.splitlines()
            ]
            self._paint(len(self._lines), [*above, *self._lines])

    def restart(self) -> None:
        """Draw from the top: after a change of size the place of the lines is unknown."""
        with self._lock:
            self._lines = []
            self._write("\x1b[H")

    def end(self, lines: Sequence[Line], width: int) -> None:
        """Leave these lines as ordinary output."""
        with self._lock:
            self._paint(len(self._lines), [self._text(line, width) for line in lines])
            self._lines = []

    def _paint(self, old: int, lines: Sequence[str]) -> None:
        """Lines over the `old` ones above the cursor."""
        self._write(_up(old) + "".join(f"{line}\n" for line in lines) + ERASE_BELOW)

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _text(self, line: Line, width: int) -> str:
        """A line in escape sequences. What is left of the old one is erased only where the line
        ends before the margin: at the margin, terminals would erase its last character.
        """
        while line and not line[-1][0].strip() and not line[-1][1]:
            line = line[:-1]
        text = ""
        for piece, style in line:
            before, after = _codes(style, self._colors, self._no_color)
            text += f"{before}{piece}{after}"
        used = sum(cell_len(piece) for piece, _ in line)
        return text if used >= width else text + ERASE_REST


def _up(lines: int) -> str:
    """To the start of the line so many lines above."""
    return f"\r\x1b[{lines}A" if lines else "\r"


@cache
def _codes(style: str, colors: ColorSystem | None, no_color: bool) -> tuple[str, str]:
    """The escape sequences around a text in a style."""
    if not style or colors is None:
        return "", ""
    parsed = Style.parse(style)
    if no_color:
        parsed = parsed.without_color
    before, _, after = parsed.render("|", color_system=colors).partition("|")
    return before, after


Note = Callable[[str], None]


def _forget(text: str) -> None:
    """Nobody else needs it."""


class Above:
    """Stands in for standard output or error: prints whole lines above the picture."""

    def __init__(self, screen: Screen, stream: TextIO, note: Note) -> None:
        self._screen, self._stream, self._note, self._rest = screen, stream, note, ""

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._screen.print_above(lines + newline)
            self._note(lines)
        return len(text)

    def flush(self) -> None:
        """Half a line waits for its end."""

    def finish(self) -> None:
        """Print what never got an end."""
        if self._rest:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Redirect:
    """Sends what is printed to a terminal above the picture, until `end`."""

    def __init__(self, screen: Screen, note: Note = lambda text: None) -> None:
        """`note`: is told what goes to standard error, which may be out of sight at once."""
        self._before: dict[str, TextIO] = {}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._before[name] = stream
                setattr(sys, name, Above(screen, stream, note if name == "stderr" else _forget))

    def end(self) -> None:
        for name, stream in self._before.items():
            proxy = getattr(sys, name)
            if isinstance(proxy, Above):
                proxy.finish()
                setattr(sys, name, stream)
        self._before = {}
