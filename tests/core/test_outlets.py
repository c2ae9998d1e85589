"""Standard output that is gone, full or not read: nothing raises, nothing waits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from etude.core import output
from etude.core.output import Notices, OutputLost, OutputStream


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(output.notices, "add", sentences.append)
    return sentences


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    with open(write, "w", encoding="utf-8") as stream:
        yield read, stream
        with contextlib.suppress(OSError):
            os.close(read)


def test_what_is_read_comes_at_once_and_in_order(pipe: tuple[int, TextIO]) -> None:
    read, stream = pipe
    outlet = OutputStream(stream, "Standard output")
    print("one", "zwölf", file=outlet)
    assert os.read(read, 100) == "one zwölf\n".encode()
    print("half", end="", file=outlet)
    with pytest.raises(BlockingIOError):
        os.read(read, 100)
    print(" a line", file=outlet, flush=True)
    assert os.read(read, 100) == b"half a line\n"


def test_a_reader_that_went_away_is_told_once(pipe: tuple[int, TextIO], told: list[str]) -> None:
    read, stream = pipe
    outlet = OutputStream(stream, "Standard output")
    os.close(read)
    for _ in range(3):
        print("a row", file=outlet)
    outlet.end()
    assert told == [
        "Standard output cannot be written (Broken pipe): the command goes on without it."
    ]


def test_a_reader_that_stops_holds_up_nothing_and_misses_little(
    pipe: tuple[int, TextIO], told: list[str]
) -> None:
    read, stream = pipe
    outlet = OutputStream(stream, "Standard output")
    row, begin = "x" * 99, time.monotonic()
    rows = 30_000
    for _ in range(rows):
        print(row, file=outlet)
    assert time.monotonic() - begin < 10.0  # nobody reads: to wait would be for ever
    assert "is not being read" in told[0]
    seen = b""
    for _ in range(200):  # the reader goes on, and takes what has waited
        with contextlib.suppress(BlockingIOError):
            seen += os.read(read, 1 << 16)
        outlet.flush()
    lines = seen.decode().splitlines()
    kept, note = lines[:-1], lines[-1]
    assert set(kept) == {row}
    assert len(kept) * 100 > output.LARGEST
    assert note == f"... {rows - len(kept):,} lines are left out ..."
    assert len(told) == 1


def test_a_disk_that_has_room_again_gets_what_has_waited(tmp_path: Path, told: list[str]) -> None:
    with open(tmp_path / "out", "w") as stream:
        outlet = OutputStream(stream, "Standard output")
        good, full = os.dup(stream.fileno()), os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, stream.fileno())
        print("while it is full", file=outlet)
        print("and after", file=outlet)
        assert outlet.failed
        os.dup2(good, stream.fileno())
        print("with room", file=outlet)
        assert not outlet.failed
    assert (tmp_path / "out").read_text() == "while it is full\nand after\nwith room\n"
    assert told == [
        "Standard output cannot be written (No space left on device): the command goes on without "
        "it."
    ]


def test_a_child_leaves_what_waits_to_its_parent(pipe: tuple[int, TextIO]) -> None:
    read, stream = pipe
    outlet = OutputStream(stream, "Standard output")
    outlet.write("the parent's, ")
    outlet.forget()  # as after a fork
    print("the child's", file=outlet)
    assert os.read(read, 100) == b"the child's\n"


def test_a_result_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as stream:
        outlet = OutputStream(stream, "Standard output", strict=True)
        with pytest.raises(OutputLost, match="Standard output cannot be written: No space left"):
            print("a plan", file=outlet)


def test_notices_are_kept_where_the_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notices = Notices()
    notices.add("Before there was a folder.")
    notices.keep_in(tmp_path / "missing" / "reporting.log")
    notices.keep_in(tmp_path / "reporting.log")
    notices.add("After it.")
    kept = (tmp_path / "reporting.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in kept] == ["Before there was a folder.", "After it."]
    assert capsys.readouterr().err == "Before there was a folder.\nAfter it.\n"
    (tmp_path / "other.log").symlink_to(tmp_path / "elsewhere")
    notices.keep_in(tmp_path / "other.log")
    notices.add("Not through a link.")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("shell", "code", "error"),
    [
        ('"$@" list > /dev/full', 1, "Standard output cannot be written: No space left on device."),
        ('"$@" list >&-', 0, ""),
        ('exec 3>&1; { "$@" list; echo $? >&3; } | true', 141, ""),
    ],
)
def test_a_command_whose_output_is_lost(shell: str, code: int, error: str) -> None:
    command = ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "etude"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == error
    assert (int(done.stdout or done.returncode) if "exec" in shell else done.returncode) == code
