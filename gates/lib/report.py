"""The result of a gate: figures with bounds, counts and a verdict, written as JSON.

    options = parse(parser, smallest={"kills": 5})
    with Gate("exact_resume", options, needs={"kills": options.kills}, rows=(1,)) as gate:
        gate.count("kills")
        gate.fail("run 3 differs from the untouched run")
        gate.figure("runs that differ", 0, at_most=0)
    return gate.code

A gate passes if its figures are finite and within their bounds, its counts reach `needs` and no
failure was added. A comparison of too few seeds ends as "not shown". An exception, a crash of the
measured program, a missing figure or more than `--limit` seconds fail it. Timings are not judged on
a busy machine. `--smallest` is the size at which CI runs a gate: its timings are too short to be
judged, and bounds on learning are left out, as the `smallest` options of each gate say. `--json
FILE` is the file of the result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from gates import ROOT
from gates.lib import beginnings

PASSED, FAILED, NOT_JUDGED, NOT_SHOWN = range(4)
RESULTS = ROOT / "gates" / "results"
"""Folder of results at full size; its subfolder `smallest/` is not in the repository."""
LIMIT, SMALLEST_LIMIT = 12 * 3600.0, 600.0
"""Seconds after which a gate fails: at full and at the smallest size."""
GRACE = 30.0
"""Further seconds after which a gate that does not react is ended."""


def parse(
    parser: argparse.ArgumentParser,
    smallest: Mapping[str, Any],
    arguments: list[str] | None = None,
) -> argparse.Namespace:
    """Parse a gate's options and --json, --limit and --smallest, which sets other defaults."""
    parser.add_argument("--smallest", action="store_true", help="the size at which CI runs this")
    parser.add_argument("--json", type=Path, help="file for the result; default gates/results/")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds until it must end")
    if parser.parse_known_args(arguments)[0].smallest:
        parser.set_defaults(**{"limit": SMALLEST_LIMIT, **smallest})
    return parser.parse_args(arguments)


class TookTooLong(BaseException):
    """The time limit is over. Not an `Exception`: the measured code must not catch it."""


class Gate:
    """The measurement of one promise.

    needs: the least counts, by name. rows: rows of docs/faults.md that this gate tests. variant:
    distinguishes results of one gate, for example by recipe.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        *,
        needs: Mapping[str, int],
        rows: tuple[int, ...] = (),
        variant: str = "",
    ) -> None:
        self.name = name
        self.variant = variant
        self.reference_speed: float | None = None
        self.needs = dict(needs)
        self.rows = rows
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.unshown: list[str] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.details: dict[str, Any] = {}
        self.code = FAILED
        self._begins: list[dict[str, Any]] = []
        self._earlier: dict[str, str] = {}
        self.limit: float = options.limit
        self.smallest: bool = options.smallest
        self._json: Path | None = options.json
        self._busy = "the smallest size is too short for a timing" if self.smallest else ""
        self._begin = time.monotonic()
        self._timers: list[threading.Timer] = []

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def fail(self, why: str) -> None:
        """Add a failure and print it."""
        self.failures.append(why)
        print(f"FAILED: {why}", flush=True)

    def not_shown(self, why: str) -> None:
        """Add why the measurement is too small for a verdict; at the smallest size it always is."""
        if not self.smallest:
            self.unshown.append(why)
            print(f"not shown: {why}", flush=True)

    def figure(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        timing: bool = False,
    ) -> None:
        """Add a measured value and its bounds; infinite ones are ignored."""
        bounds = {"at_least": at_least, "at_most": at_most}
        self.figures[name] = {"value": value, **bounds, "timing": timing}

    def of_earlier(self, part: dict[str, Any]) -> None:
        """Add an earlier part of the result: the fingerprints of the code that made it. The result
        has the date, commit and machine of its newest part."""
        begins = part.get("begins", {})
        if begins not in self._begins:
            self._begins.append(begins)
        if part["date"] >= self._earlier.get("date", ""):
            names = ("date", "commit", "version", "machine")
            self._earlier = {name: part[name] for name in names if name in part}

    def too_busy(self, why: str) -> None:
        """Do not judge timings that are out of bounds, for this reason."""
        self._busy = why

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return max(self.limit - (time.monotonic() - self._begin), 1.0)

    def __enter__(self) -> Gate:
        self._handler = signal.signal(signal.SIGUSR2, _raise_too_long)
        me = threading.get_ident()
        for seconds, act in (
            (self.limit, lambda: signal.pthread_kill(me, signal.SIGUSR2)),
            (self.limit + GRACE, self._give_up),
        ):
            timer = threading.Timer(seconds, act)
            timer.daemon = True
            timer.start()
            self._timers.append(timer)
        return self

    def _give_up(self) -> None:
        """End the process: the main thread has not reacted to the signal."""
        self.fail(f"no end within {self.limit:g} s, and no reaction for {GRACE:g} s more")
        self._end()
        sys.stdout.flush()
        os._exit(FAILED)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        for timer in self._timers:
            timer.cancel()
        signal.signal(signal.SIGUSR2, self._handler)
        if isinstance(error, TookTooLong):
            self.fail(f"no end within {self.limit:g} s")
        elif error is not None:
            traceback.print_exception(kind, error, trace)
            self.fail(f"the gate itself ended with {type(error).__name__}: {error}")
        self._end()
        return isinstance(error, Exception | SystemExit | TookTooLong)

    def _judge(self) -> bool:
        """Add a failure for every figure out of bounds; True if one is an unjudged timing."""
        unjudged = False
        for name, entry in self.figures.items():
            value, least, most = entry["value"], entry["at_least"], entry["at_most"]
            if _plain(value) is None:
                self.fail(f"{name} is {value}: nothing was measured")
                continue
            low, high = least is not None and value < least, most is not None and value > most
            if not (low or high):
                continue
            word, bound = ("least", least) if low else ("most", most)
            text = f"{name} is {value:.4g}, must be at {word} {bound:g}"
            if entry["timing"] and self._busy:
                unjudged = True
                print(f"not judged: {text}")
            else:
                self.fail(text)
        return unjudged

    def _end(self) -> None:
        if not self.figures:
            self.fail("no figure: nothing was measured")
        if not self.needs:
            self.fail("`needs` is empty")
        for what, least in self.needs.items():
            if least < 1:
                self.fail(f"{least:,} {what} needed: must be at least 1")
            if self.counts[what] < least:
                self.fail(f"{self.counts[what]:,} {what} counted, {least:,} needed")
        unjudged = self._judge()
        self.code = NOT_JUDGED if unjudged else PASSED
        if self.failures or self.unshown:
            self.code = FAILED if self.failures else NOT_SHOWN
        unshown = f"not shown: {'; '.join(self.unshown)}"
        verdict = ("passed", "FAILED", f"not judged, {self._busy}", unshown)[self.code]
        self._write(verdict)
        counted = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        measured = ", ".join(f"{name} {_text(f['value'])}" for name, f in self.figures.items())
        title = f"{self.name} {self.variant}".rstrip()
        print(
            f"{title}: {measured or 'no figure'}; {counted or 'nothing counted'}: {verdict}",
            flush=True,
        )

    def _write(self, verdict: str) -> None:
        folder = RESULTS / "smallest" if self.smallest else RESULTS
        path = self._json or folder / f"{beginnings.stem(self.name, self.variant)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.smallest and not self._begins:
            self._begins.append(beginnings.kept(self.name, self.variant))
        result = {
            "gate": self.name,
            "variant": self.variant,
            "verdict": verdict,
            "figures": {
                name: {
                    key: value if key == "timing" else _plain(value) for key, value in entry.items()
                }
                for name, entry in self.figures.items()
            },
            "counts": dict(self.counts),
            "needs": self.needs,
            "rows": list(self.rows),
            "failures": self.failures[:20],
            "details": _plain_tree(self.details),
            "smallest": self.smallest,
            "seconds": round(time.monotonic() - self._begin, 1),
            "processor_seconds": round(_processor_seconds(), 1),
            **(self._earlier or about_now()),
            "begins": self._begins,
            "reference_speed": self.reference_speed and round(self.reference_speed),
            "command": shlex.join([*_python(Path(sys.argv[0])), *_without_paths(sys.argv[1:])]),
        }
        path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def _raise_too_long(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


def _plain(value: float | None) -> float | None:
    """A float for JSON; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(value)


def _plain_tree(value: Any) -> Any:
    """Apply `_plain` to all floats in dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _plain_tree(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_tree(each) for each in value]
    return _plain(value) if isinstance(value, float) else value


def _text(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4g}"


def _processor_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    spent = [
        resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def _python(script: Path) -> list[str]:
    """The words that run a script: `python -m MODULE` in gates, else `python NAME`."""
    script = script.resolve()
    if not script.is_relative_to(ROOT / "gates"):
        return ["python", script.name]
    return ["python", "-m", ".".join(script.relative_to(ROOT).with_suffix("").parts)]


def _without_paths(words: list[str]) -> list[str]:
    """The words of a command without --json FILE, and paths without their folders."""
    at = words.index("--json") if "--json" in words else len(words)
    rest = words[:at] + words[at + 2 :]
    return [Path(word).name if word.startswith("/") else word for word in rest]


def about_now() -> dict[str, str]:
    """Date, commit, version and machine of a measurement made now."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "version": version("etude"),
        "machine": machine(),
    }


def commit() -> str:
    """The commit of this checkout, marked if files other than results have changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!gates/results")
    return f"{found}{' with changes' if changed else ''}" if found else "unknown"


def machine() -> str:
    """Processor, cores, load and system, in one line."""
    # Imported here: a gate decides how the package is first imported.
    from etude.runs.manifest import cpu_name

    load = os.getloadavg()[0]
    return f"{cpu_name()}, {os.cpu_count()} cores, load {load:.2f}, {platform.system()}"
