"""List the results that must be measured again, and why.

    python -m gates.lib.fresh                   # repeat everything and write gates/now.json
    python -m gates.lib.fresh --only walk-go1 fuzz
    python -m gates.lib.fresh --check --part commit     # CI: a tenth of the beginnings

Trains the first iterations of the trainings of all results (`beginnings.py`), runs the other gates
at their smallest size, and prints the results that are not valid for today's code, with the first
array, column or call that differs. `--check` writes nothing and fails on differences from
gates/now.json; it leaves out the gates at their smallest size, which CI runs by `smallest.py`. On a
machine that rounds differently than those of the results, it compares nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rotation
from gates import ROOT
from gates.lib import beginnings, smallest
from gates.lib.beginnings import (
    NOW,
    REPEATED,
    begins_of,
    can_begin,
    computation,
    difference,
    doubt,
    now,
    slower,
)
from gates.pages.faults_table import load

BENCHMARKS = ROOT / "benchmarks" / "results.json"


def benchmarks() -> list[dict[str, Any]]:
    """Etude's runs in benchmarks/results.json."""
    known = json.loads(BENCHMARKS.read_text())
    ours = [run for run in known["runs"] if run["peer"].startswith("etude")]
    return [run | about(run["peer"], run["task"]) for run in ours]


def about(peer: str, task: str) -> dict[str, str]:
    """Gate and variant of a run in benchmarks."""
    return {"gate": "benchmarks" if peer == "etude" else peer, "variant": task}


def repeat(names: list[str], gates: list[str], check: bool) -> dict[str, Any]:
    """Make the contents of now.json anew; check: count calls only where now.json has them."""
    begun: dict[str, Any] = {}
    for name in names:
        start = time.monotonic()
        begun[name] = beginnings.begin(name, not check or "calls" in known(name))
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = [smallest.run(gate, Path(scratch)) for gate in gates]
    return {computation(): begun, "gates": {each.gate: each.fault for each in outcomes}}


def known(name: str) -> beginnings.Fingerprint:
    """The fingerprint of a beginning in now.json for a machine like this; empty if missing."""
    found: beginnings.Fingerprint = now().get(computation(), {}).get(name, {})
    return found


def changed(found: dict[str, Any]) -> list[str]:
    """A line for each beginning that differs from now.json."""
    lines = []
    for name, today in found[computation()].items():
        if before := known(name):
            why = difference(before, today) or ("calls" in before and slower(before, today))
            lines += [f"{name}: {why}"] if why else []
    return lines


def write(found: dict[str, Any]) -> None:
    """Add new fingerprints and faults to now.json."""
    merged = {key: now().get(key, {}) | entries for key, entries in found.items()}
    NOW.write_text(json.dumps(now() | merged, indent=1, sort_keys=True) + "\n")
    now.cache_clear()


def stale(results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """A line for each result whose figures or timings are not valid for today's code."""
    lines = []
    for result in [*results.values(), *benchmarks()]:
        name = beginnings.stem(result["gate"], result["variant"])
        learned, timed = doubt(result)
        timings = [entry for entry in result.get("figures", {}).values() if entry.get("timing")]
        if learned or (timed and (timings or "figures" not in result)):
            why = learned or f"timings: {timed}"
            lines.append(f"{name}, measured at {result['commit'].split()[0]}: {why}")
    return sorted(set(lines))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="beginnings and gates")
    parser.add_argument("--part", default="all", help=rotation.HELP)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    results = load()
    kinds = [(r["gate"], r["variant"]) for r in [*results.values(), *benchmarks()]]
    begun = {name for kind in kinds for name in begins_of(*kind) if can_begin(name)}
    rest = {gate for gate, variant in kinds if not begins_of(gate, variant)} | REPEATED
    parts, wanted = rotation.chosen(options.part), rotation.Parts({})
    names, gates = (
        [
            name
            for name in sorted(found)
            if (not options.only or name in options.only) and wanted[name] in parts
        ]
        for found in (begun, rest)
    )
    if options.check:
        names, gates = list(filter(known, names)), []
    if options.check and computation() not in now():
        print(f"not comparable: this machine rounds differently than those of gates/{NOW.name}")
        return 0
    begin = time.monotonic()
    found = repeat(names, gates, options.check)
    differences = changed(found)
    if not options.check:
        write(found)
    print("\n".join(["Changed:", *differences, "To be measured again:", *stale(results)]))
    print(f"{len(names)} beginnings in {time.monotonic() - begin:.0f} s")
    return 1 if options.check and differences else 0


if __name__ == "__main__":
    sys.exit(main())
