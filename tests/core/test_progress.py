"""Waits are shown once they are long, with how far they are, and leave nothing behind."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest

from etude.core import output
from etude.core.output import current, show_on, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(output, "SLOW", 0.1)
    before = show_on(None)
    yield
    show_on(before)


def wait_for(stream: io.StringIO, text: str) -> None:
    patience = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < patience, stream.getvalue()
        time.sleep(0.02)


def test_a_terminal_shows_a_long_wait_until_it_ends() -> None:
    stream = Terminal()
    show_on(stream)
    with waiting("building"), waiting("evaluating", 20, "episodes") as evaluating:
        evaluating.done = 12
        with waiting("a detail of it"):
            wait_for(stream, "evaluating: 12 of 20 episodes, ")
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()
    assert current() is None


def test_elsewhere_it_is_a_line_of_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    show_on(stream)
    with waiting("not long enough for a log"):
        time.sleep(0.5)
    assert stream.getvalue() == ""
    monkeypatch.setattr(output, "INTERVAL", 0.6)
    with waiting("probing 'CartPole-v1'"):
        wait_for(stream, "probing")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith(" s ...\n")


def test_short_waits_and_python_are_silent() -> None:
    stream = Terminal()
    show_on(stream)
    with waiting("short"):
        pass
    show_on(None)
    with waiting("long, and nobody asked"):
        time.sleep(0.4)
    assert stream.getvalue() == ""


def test_it_names_a_function_and_survives_its_errors() -> None:
    @waiting("failing")
    def fail() -> None:
        wait = current()
        assert wait is not None
        assert wait.text == "failing"
        raise ValueError("as it must")

    for _ in range(2):
        with pytest.raises(ValueError, match="as it must"):
            fail()
    assert current() is None
