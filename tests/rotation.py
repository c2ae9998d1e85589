"""The rotation of long checks: one run of CI does one part of ten, and ten runs do them all.

    pytest --rotation=commit          # of the tests marked `rotated`, the part of HEAD
    pytest --rotation=3               # part 3
    pytest --rotation=since:d41d8cd   # the parts of all commits after this one
    pytest --at-most=1                # none that the record says takes longer than 1 s
    pytest --record=build/seconds.json         # keep how long each test took
    python tests/rotation.py build/seconds.json    # print minutes by part, and balance the parts

Tests rotate one by one, or with all others of their file that are marked `rotated(together=True)`:
those that share what takes long to make.

A part is chosen by the number of commits on the first-parent line that ends at HEAD, modulo 10: any
ten successive commits of a branch are in ten different parts. Where several commits arrive at once,
`since:` does the parts of all of them, so that none is left out. `make nightly` runs all parts.

`tests/seconds.json` says how long each test took; the parts are balanced by it. A name that is not
in it is assigned by its hash. Assignments change only when that file does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS = 10
RECORD = Path(__file__).with_name("seconds.json")
SHORTEST = 0.2
"""Seconds below which a test is not recorded."""
UNIT = "rotates as"
"""The property of a test that names what it rotates as."""
HELP = "parts of what rotates: all, commit, since:COMMIT or a number"
GROUPS = ("always", "rotated", "gates")
"""Tests of every run of CI, tests that rotate, and gates at their smallest size, which rotate."""


def chosen(rotation: str, folder: Path = RECORD.parent) -> set[int]:
    """The parts that `all`, `commit`, `since:COMMIT` or a number stand for.

    Of a checkout without its history, `commit` is the part of today.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
        return done.stdout.strip()

    def commits(which: str) -> int:
        return int(git("rev-list", "--count", "--first-parent", which) or 0)

    if rotation == "all":
        return set(range(PARTS))
    if rotation.isdecimal():
        return {int(rotation) % PARTS}
    if git("rev-parse", "--is-shallow-repository") != "false":
        return {int(time.time() // 86_400) % PARTS}
    newest, since = commits("HEAD"), rotation.removeprefix("since:")
    new = 1 if rotation == "commit" else commits(f"{since}..HEAD")
    return {number % PARTS for number in range(newest, newest - max(new, 1), -1)}


def load(file: Path | None = None) -> dict[str, dict[str, float]]:
    """{group: {name: seconds}} of a record, by default the kept one; empty where there is none."""
    file = file or RECORD
    found = json.loads(file.read_text()) if file.is_file() else {}
    return {group: found.get(group, {}) for group in GROUPS}


class Parts:
    """Which part each name is in: recorded ones such that all parts take equally long."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.minutes = [0.0] * PARTS
        self._known: dict[str, int] = {}
        for name, taken in sorted(seconds.items(), key=lambda item: (-item[1], item[0])):
            part = min(range(PARTS), key=lambda number: (self.minutes[number], number))
            self._known[name] = part
            self.minutes[part] += taken / 60.0

    def __getitem__(self, name: str) -> int:
        hashed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % PARTS
        return self._known.get(name, hashed)


def short_name(nodeid: str) -> str:
    """A test's name without its folder: names of test files are unique."""
    path, _, test = nodeid.partition("::")
    return f"{Path(path).name}::{test}"


def rotating(item: Any) -> str | None:
    """The name by which a test rotates, that of its file where its tests share what takes long."""
    marker = item.get_closest_marker("rotated")
    if marker is None:
        return None
    name = short_name(item.nodeid)
    return name.partition("::")[0] if marker.kwargs.get("together") else name


def add_options(parser: Any) -> None:
    group = parser.getgroup("rotation")
    group.addoption("--rotation", default="all", help=HELP)
    group.addoption("--at-most", type=float, help="leave out tests recorded as taking more seconds")
    group.addoption("--record", type=Path, help="file to which the seconds of each test are added")


class Plugin:
    """Leaves out the rotated tests of other parts, and records how long tests take."""

    def __init__(self, config: Any) -> None:
        self._rotation: str = config.getoption("rotation")
        self._record: Path | None = config.getoption("record")
        self._at_most: float | None = config.getoption("at_most")
        self._config = config
        self._begun: set[str] = set()
        self._taken = load(self._record or Path(os.devnull))

    def pytest_report_header(self) -> str:
        return f"rotation: {self._rotation}, parts {sorted(chosen(self._rotation))}"

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what rotates and is in another part, and what takes longer than asked for."""
        known, wanted = load(), chosen(self._rotation)
        parts, longest = Parts(known["rotated"]), self._at_most or math.inf
        left_out: dict[Any, None] = {}
        for item in items:
            if (unit := rotating(item)) is not None:
                item.user_properties.append((UNIT, unit))
                if parts[unit] not in wanted:
                    left_out[item] = None
            elif known["always"].get(short_name(item.nodeid), 0.0) > longest:
                left_out[item] = None
        self._config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

    def pytest_runtest_logreport(self, report: Any) -> None:
        unit = dict(report.user_properties).get(UNIT)
        group = self._taken["always" if unit is None else "rotated"]
        name = unit or short_name(report.nodeid)
        group[name] = report.duration + (group.get(name, 0.0) if name in self._begun else 0.0)
        self._begun.add(name)

    def pytest_sessionfinish(self) -> None:
        if self._record is not None and not hasattr(self._config, "workerinput"):
            save(self._taken, self._record)


def save(taken: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """Write what took longer than `SHORTEST`."""
    rounded = {
        group: {
            name: round(seconds, 1)
            for name, seconds in sorted(taken[group].items())
            if seconds >= SHORTEST
        }
        for group in GROUPS
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rounded, indent=1) + "\n")


def add_gate(name: str, seconds: float, file: Path) -> None:
    """Add to a record how long a gate took at its smallest size."""
    taken = load(file)
    taken["gates"][name] = seconds
    save(taken, file)


def table(taken: Mapping[str, Mapping[str, float]]) -> str:
    """Minutes of one process by part, and the files that take longest."""
    tests, gates = Parts(taken["rotated"]).minutes, Parts(taken["gates"]).minutes
    lines = [f"every run   tests {sum(taken['always'].values()) / 60:5.1f} min"]
    for part in range(PARTS):
        lines.append(f"part {part}      tests {tests[part]:5.1f} min, gates {gates[part]:4.1f} min")
    files: dict[str, float] = {}
    for name, seconds in [*taken["always"].items(), *taken["rotated"].items()]:
        file = name.partition("::")[0]
        files[file] = files.get(file, 0.0) + seconds / 60
    longest = sorted(files.items(), key=lambda item: -item[1])[:20]
    return "\n".join([*lines, *(f"{file:<32} {minutes:5.1f} min" for file, minutes in longest)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="of a run of all tests and gates")
    taken = load(parser.parse_args(arguments).record)
    if not all(taken.values()):
        sys.exit("this record is not of all tests and gates")
    print(table(taken))
    save(taken, RECORD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
