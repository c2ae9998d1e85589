"""What every gate ends with: a figure, what it counted, a verdict, and all of it as JSON.

    options = parse(parser, smallest={"kills": 5})
    with Gate("exact_resume", options, needs={"kills": options.kills}, rows=(1,)) as gate:
        gate.count("kills")
        gate.fail("run 3 differs from the untouched run")
        gate.figure("runs that differ", 0, at_most=0)
    return gate.code

A gate passes when it has a finite figure within its bounds, has counted at least what it needs
and has noted no failure. An exception, a crash of what it measures or nothing measured fails it.
`--smallest` is the size at which CI runs a gate; `--json FILE` says where the result is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

PASSED, FAILED, NOT_JUDGED = 0, 1, 2
RESULTS = Path(__file__).parent / "results"
"""Results at full size stand here; `smallest/` below it is not kept in the repository."""


def parse(
    parser: argparse.ArgumentParser,
    smallest: Mapping[str, Any],
    arguments: list[str] | None = None,
) -> argparse.Namespace:
    """A gate's options with --smallest, which changes defaults, and --json."""
    parser.add_argument("--smallest", action="store_true", help="the size at which CI runs this")
    parser.add_argument("--json", type=Path, help="file for the result; default gates/results/")
    if parser.parse_known_args(arguments)[0].smallest:
        parser.set_defaults(**smallest)
    return parser.parse_args(arguments)


class Gate:
    """One promise being measured.

    needs: what must have been counted at least, by name. rows: the faults of docs/faults.md that
    this gate stands for. variant: what tells two results of one gate apart, such as a recipe.
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
        self.needs = dict(needs)
        self.rows = rows
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.figures: dict[str, dict[str, float | None]] = {}
        self.details: dict[str, Any] = {}
        self.code = FAILED
        self._busy = ""
        self._smallest = bool(getattr(options, "smallest", False))
        self._json: Path | None = getattr(options, "json", None)
        self._begin = time.monotonic()

    def count(self, what: str, many: int = 1) -> None:
        self.counts[what] += many

    def fail(self, why: str) -> None:
        """Note a failure, and say it at once."""
        self.failures.append(why)
        print(f"FAILED: {why}", flush=True)

    def figure(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """A measured number and the bounds it must keep."""
        self.figures[name] = {"value": value, "at_least": at_least, "at_most": at_most}

    def too_busy(self, why: str) -> None:
        """Other work disturbed a timing: figures out of bounds are then not judged."""
        self._busy = why

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            traceback.print_exception(kind, error, trace)
            self.fail(f"the gate itself ended with {type(error).__name__}: {error}")
        self._end()
        return isinstance(error, Exception)

    def _out_of_bounds(self) -> list[str]:
        found = []
        for name, entry in self.figures.items():
            value, least, most = entry["value"], entry["at_least"], entry["at_most"]
            if value is None or not math.isfinite(value):
                self.fail(f"{name} is {value}: nothing was measured")
            elif least is not None and value < least:
                found.append(f"{name} is {value:.4g}, must be at least {least:g}")
            elif most is not None and value > most:
                found.append(f"{name} is {value:.4g}, must be at most {most:g}")
        return found

    def _end(self) -> None:
        if not self.figures:
            self.fail("no figure: nothing was measured")
        for what, least in self.needs.items():
            if self.counts[what] < least:
                self.fail(f"{self.counts[what]:,} {what} counted, {least:,} needed")
        outside = self._out_of_bounds()
        for text in [] if self._busy else outside:
            self.fail(text)
        self.code = FAILED if self.failures else NOT_JUDGED if outside else PASSED
        verdict = ("passed", "FAILED", f"not judged, {self._busy}")[self.code]
        self._write(verdict)
        counted = ", ".join(f"{many:,} {what}" for what, many in self.counts.items())
        measured = ", ".join(f"{name} {f['value']:.4g}" for name, f in self.figures.items())
        title = f"{self.name} {self.variant}".rstrip()
        print(f"{title}: {measured or 'no figure'}; {counted or 'nothing counted'}: {verdict}")

    def _write(self, verdict: str) -> None:
        folder = RESULTS / "smallest" if self._smallest else RESULTS
        stem = "-".join(part for part in (self.name, self.variant.replace(" ", "-")) if part)
        path = self._json or folder / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "gate": self.name,
            "variant": self.variant,
            "verdict": verdict,
            "figures": {
                name: {key: _plain(value) for key, value in entry.items()}
                for name, entry in self.figures.items()
            },
            "counts": dict(self.counts),
            "needs": self.needs,
            "rows": list(self.rows),
            "failures": self.failures[:20],
            "details": self.details,
            "smallest": self._smallest,
            "seconds": round(time.monotonic() - self._begin, 1),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "command": shlex.join(["python", _shown(Path(sys.argv[0])), *sys.argv[1:]]),
        }
        path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def _plain(value: float | None) -> float | None:
    """A number JSON can hold: numpy's scalars are taken, what is not finite is nothing."""
    return None if value is None or not math.isfinite(value) else float(value)


def _shown(script: Path) -> str:
    return f"gates/{script.name}" if script.parent.name == "gates" else script.name


def commit() -> str:
    """The commit of this checkout, marked where files were changed since."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{found}{' with changes' if changed else ''}" if found else "unknown"


def machine() -> str:
    """Processor, cores, load and system, in one line."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as stream:
            names = [line.split(":", 1)[1].strip() for line in stream if "model name" in line]
        model = names[0] if names else model
    except OSError:
        pass
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, load {load:.2f}, {platform.system()}"
