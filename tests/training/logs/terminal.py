"""A terminal that knows just what the dashboard uses, to see what a person would see."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|(\r\n|\r|\n)|([^\x1b\r\n])")


class Terminal:
    """Text with cursor movement, erasing, wrapping at the margin and scrolling."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.above: list[str] = []
        """Lines that have scrolled away."""
        self.unknown: set[str] = set()
        self._rows = [[" "] * width for _ in range(height)]
        self._x = self._y = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def feed(self, text: str) -> None:
        for match in TOKEN.finditer(text):
            argument, command, move, char = match.groups()
            if command is not None:
                self._control(argument, command)
            elif move is not None:
                self._x = 0
                if "\n" in move:
                    self._down()
            else:
                self._put(char)

    def _put(self, char: str) -> None:
        if self._x == self.width:
            self._x = 0
            self._down()
        self._rows[self._y][self._x] = char
        self._x += 1

    def _down(self) -> None:
        if self._y < self.height - 1:
            self._y += 1
            return
        self.above.append("".join(self._rows.pop(0)).rstrip())
        self._rows.append([" "] * self.width)

    def _control(self, argument: str, command: str) -> None:
        count = int(argument) if argument.isdigit() else 1
        if command == "A":
            self._y = max(self._y - count, 0)
        elif command == "B":
            self._y = min(self._y + count, self.height - 1)
        elif command == "H":
            self._x = self._y = 0
        elif command in "KJ":
            # At the margin the cursor still stands on the last character, and erases it.
            start = 0 if argument == "2" else min(self._x, self.width - 1)
            self._rows[self._y][start:] = [" "] * (self.width - start)
            if command == "J":
                for row in self._rows[0 if argument == "2" else self._y + 1 :]:
                    row[:] = [" "] * self.width
        elif command != "m":
            self.unknown.add(f"{argument}{command}")
