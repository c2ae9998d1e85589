"""What a person sees on the terminal, and what stays when one scrolls back."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Group
from rich.text import Text
from terminal import Terminal

from etude.training.logs.dashboard import LiveDrawing, TerminalConsole


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


class Picture:
    """A live drawing of a few lines on a terminal that is standard output."""

    def __init__(self, width: int, height: int, patch: pytest.MonkeyPatch) -> None:
        self.terminal = Terminal(width, height)
        self.tty, self.lines = Tty(self.terminal), list[str]()
        self.console = TerminalConsole(
            file=self.tty, force_terminal=True, width=width, height=height, no_color=True
        )
        patch.setattr(sys, "stdout", self.tty)
        patch.setattr(sys, "stderr", io.StringIO())  # a file: left alone
        self.noted = list[str]()
        self.live = LiveDrawing(self.console, self.group, self.noted.append)
        self.live.auto_refresh = False

    def group(self) -> Group:
        return Group(*(Text(line, "bold", no_wrap=True) for line in self.lines))

    def show(self, *lines: str) -> None:
        self.lines = list(lines)
        if not self.live.is_started:
            self.live.start(refresh=True)
        else:
            self.live.refresh()


def test_a_picture_changes_in_place_and_prints_go_above(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture(10, 4, monkeypatch)
    terminal = picture.terminal
    print("before")
    picture.show("one", "two")
    assert terminal.lines == ["before", "one", "two", ""]
    picture.show("one", "0123456789")
    assert terminal.lines == ["before", "one", "0123456789", ""]
    picture.show("one", "2")
    assert terminal.lines == ["before", "one", "2", ""]
    print("said\nand more than a line")
    assert terminal.lines == ["and more t", "han a line", "one", "2"]
    assert terminal.above == ["before", "said"]
    picture.show("only")
    assert terminal.lines == ["and more t", "han a line", "only", ""]
    picture.lines = ["the", "end"]
    picture.live.stop()
    print("after")
    assert terminal.lines == ["the", "end", "after", ""]
    assert "one" not in terminal.above  # no copies of old pictures when scrolling back
    assert not terminal.unknown


def test_a_line_that_fills_the_width_keeps_its_last_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = Picture(10, 4, monkeypatch)
    picture.show("x")
    print("0123456789")
    assert picture.terminal.lines == ["0123456789", "x", "", ""]


def test_after_another_size_it_is_drawn_from_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture(10, 4, monkeypatch)
    print("junk\njunk")
    picture.show("one")
    picture.console.width = 9
    picture.show("two")
    assert picture.terminal.lines == ["two", "", "", ""]


def test_what_is_printed_goes_above_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture(20, 5, monkeypatch)
    terminal, kept = picture.terminal, sys.stderr
    picture.show("picture")
    assert sys.stderr is kept
    print("half", end="", flush=True)
    assert terminal.lines == ["picture", "", "", "", ""]
    print(" and [whole]")
    assert sys.stdout.isatty()
    assert terminal.lines == ["half and [whole]", "picture", "", "", ""]
    print("no end", end="")
    picture.live.stop()
    assert sys.stdout is picture.tty
    assert terminal.lines == ["half and [whole]", "no end", "picture", "", ""]
    assert not picture.noted


def test_a_terminal_that_is_gone_is_drawn_on_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture(20, 5, monkeypatch)
    picture.show("picture")
    calls = 0

    def gone(text: str) -> int:
        nonlocal calls
        calls += 1
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(picture.tty, "write", gone)
    for _ in range(3):
        picture.live.refresh()
    picture.live.stop()
    assert calls == 1
    assert not picture.console._buffer  # what was not written is not kept
