"""Run every gate at its smallest size: each must write a result with a figure.

    python -m gates.lib.smallest [--only exact_resume ranks] [--jobs 2] [--rotation commit]

The gates are those of `full.py`. Each runs in its own process, two at a time. It must pass; only
its timings, too short at this size, may be left unjudged. CI runs one part of ten at each commit,
as `tests/rotation.py` says.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import rotation
from gates.lib.command import started
from gates.lib.full import GATES
from gates.lib.report import GRACE, NOT_JUDGED, PASSED, SMALLEST_LIMIT

LONG = ("scale", "exact_resume", "ray_faults", "ranks", "train_episodic", "train_offline")
"""Gates that start first, because they take the longest."""


class Outcome(NamedTuple):
    gate: str
    fault: str
    """Why the gate counts as failed; "" if it does not."""
    verdict: str
    figures: str
    seconds: float
    output: str


def gates() -> list[str]:
    """The names of all gates, the long ones first."""
    return sorted(GATES, key=lambda name: (name not in LONG, name))


def rotated(names: list[str], parts: set[int]) -> list[str]:
    """The gates in these parts of the rotation."""
    assigned = rotation.Parts(rotation.load()["gates"])
    return [name for name in names if assigned[name] in parts]


def fault_of(code: int, result: dict[str, Any] | None) -> str:
    """The fault of a gate's exit code and JSON; "" without one."""
    if result is None:
        return f"no JSON, exit code {code}"
    figures = result["figures"].values()
    if not any(math.isfinite(f["value"]) for f in figures if f["value"] is not None):
        return "no finite figure"
    if not result["smallest"] or not result["counts"]:
        return "not of this size, or nothing counted"
    verdicts = {PASSED: "passed", NOT_JUDGED: "not judged"}
    if code not in verdicts or not result["verdict"].startswith(verdicts[code]):
        return f"exit code {code}, {result['verdict']}"
    if code == NOT_JUDGED and not any(f["timing"] for f in figures):
        return "only timings may be left unjudged"
    return ""


def run(gate: str, folder: Path) -> Outcome:
    """Run one gate in its own process."""
    file, begin = folder / f"{gate}.json", time.monotonic()
    entry = GATES[gate]
    command = [sys.executable, "-m", f"gates.{entry.module}", *entry.smallest]
    command += ["--smallest", "--json", str(file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    with started(command, env=env, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=SMALLEST_LIMIT + 2 * GRACE)
        except subprocess.TimeoutExpired:
            output = "it did not end"
    result = json.loads(file.read_text()) if file.exists() else None
    fault = fault_of(process.returncode, result)
    entries = {} if result is None else result["figures"]
    figures = ", ".join(f"{name} {entry['value']}" for name, entry in entries.items())
    verdict = "none" if result is None else result["verdict"]
    return Outcome(gate, fault, verdict, figures, time.monotonic() - begin, output)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=gates(), default=gates())
    parser.add_argument("--jobs", type=int, default=2, help="gates at a time")
    parser.add_argument("--rotation", default="all", help=rotation.HELP)
    parser.add_argument("--record", type=Path, help="file to which seconds are added")
    options = parser.parse_args(arguments)
    names = rotated(options.only, rotation.chosen(options.rotation))
    begin, bad = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda gate: run(gate, Path(scratch)), names):
            if options.record:
                rotation.add_gate(outcome.gate, outcome.seconds, options.record)
            if outcome.fault:
                bad.append(outcome.gate)
                print(f"{outcome.output[-4000:]}\n{outcome.gate} FAILED: {outcome.fault}")
            words = outcome.verdict.split(",")[0]
            print(
                f"{outcome.gate:<18} {words:<11} {outcome.seconds:6.1f} s  {outcome.figures[:120]}",
                flush=True,
            )
    print(f"{len(names)} gates at their smallest in {time.monotonic() - begin:.0f} s", end="")
    print(f": FAILED: {', '.join(bad)}" if bad else ": all ended with a figure")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
