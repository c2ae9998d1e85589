"""What a person sees on the terminal, and what stays when one scrolls back."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from terminal import Terminal

from etude.training.logs.dashboard_view import Line, fit
from etude.training.logs.screen import Redirect, Screen


class Tty(io.StringIO):
    """Output that ends up on the terminal."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def write(self, text: str) -> int:
        self.terminal.feed(text)
        return len(text)

    def isatty(self) -> bool:
        return True


def screen_on(terminal: Terminal) -> tuple[Screen, Tty]:
    tty = Tty(terminal)
    console = Console(
        file=tty, force_terminal=True, width=terminal.width, height=terminal.height, no_color=True
    )
    return Screen(console), tty


def picture(*texts: str) -> list[Line]:
    return [fit([(text, "bold")], 10) for text in texts]


def test_a_picture_changes_in_place_and_prints_go_above() -> None:
    terminal = Terminal(10, 4)
    screen, tty = screen_on(terminal)
    tty.write("before\n")
    screen.show(picture("one", "two"), 10)
    assert terminal.lines == ["before", "one", "two", ""]
    screen.show(picture("one", "0123456789"), 10)
    assert terminal.lines == ["before", "one", "0123456789", ""]
    screen.show(picture("one", "2"), 10)
    assert terminal.lines == ["before", "one", "2", ""]
    screen.print_above("said\nand more than a line\n")
    assert terminal.lines == ["han a line", "one", "2", ""]
    assert terminal.above == ["before", "said", "and more t"]
    screen.show(picture("only"), 10)
    assert terminal.lines == ["han a line", "only", "", ""]
    screen.end(picture("the", "end"), 10)
    tty.write("after\n")
    assert terminal.lines == ["the", "end", "after", ""]
    assert "one" not in terminal.above  # no copies of old pictures when scrolling back
    assert not terminal.unknown


def test_a_line_that_fills_the_width_keeps_its_last_character() -> None:
    terminal = Terminal(10, 4)
    screen, _ = screen_on(terminal)
    screen.show(picture("x"), 10)
    screen.print_above("0123456789\n")
    assert terminal.lines == ["0123456789", "x", "", ""]


def test_after_another_size_it_is_drawn_from_the_top() -> None:
    terminal = Terminal(10, 4)
    screen, tty = screen_on(terminal)
    tty.write("junk\njunk\n")
    screen.show(picture("one"), 10)
    screen.restart()
    screen.show(picture("two"), 10)
    assert terminal.lines == ["two", "", "", ""]


def test_what_is_printed_goes_above_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(20, 5)
    screen, tty = screen_on(terminal)
    monkeypatch.setattr(sys, "stdout", tty)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a file: left alone
    kept = sys.stderr
    screen.show(picture("picture"), 20)
    redirect = Redirect(screen)
    assert sys.stderr is kept
    print("half", end="")
    assert terminal.lines == ["picture", "", "", "", ""]
    print(" and whole")
    assert sys.stdout.isatty()
    assert terminal.lines == ["half and whole", "picture", "", "", ""]
    print("no end", end="")
    redirect.end()
    assert sys.stdout is tty
    assert terminal.lines == ["half and whole", "no end", "picture", "", ""]
