"""Try the faults of tests/faults many times: each module has one fault with numbered cases.

    python -m gates.faults.fault_cases --fault foreign_folders --cases 1000
    python -m gates.faults.fault_cases --list
    python -m gates.faults.fault_cases

A module of tests/faults has

    ROW = 25                       # the row of docs/faults.md
    UNIT = "foreign folders"       # what is counted
    FULL, IN_CI = 1000, 20         # cases at full size, and in the tests
    SECONDS = 60.0                 # within which each case must end
    def case(number: int, seed: int, folder: Path) -> int | None

`case` runs case `number` in its own folder and raises AssertionError if the promise is broken. If
one call tries several cases, it returns their number. `tests/test_fault_cases.py` tries the first
IN_CI cases of each module in CI, and this gate with --smallest one. Without --fault it tries all
cases of all modules.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType

from gates import TESTS
from gates.lib.report import Gate, parse


def faults() -> list[str]:
    """The names of all faults with numbered cases."""
    return sorted(path.stem for path in (TESTS / "faults").glob("[!_]*.py"))


def load(fault: str) -> ModuleType:
    return importlib.import_module(f"faults.{fault}")


def tried(gate: Gate, module: ModuleType, fault: str, cases: int, seed: int) -> float:
    """Try the cases; return the seconds of the slowest. Broken promises fail the gate."""
    slowest, number, counted = 0.0, 0, 0
    while counted < cases:
        begin = time.monotonic()
        many = None
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                many = module.case(number, seed, Path(folder))
        except Exception:
            gate.fail(f"{fault}, case {number} of seed {seed}: {traceback.format_exc()}")
        seconds = time.monotonic() - begin
        if seconds > module.SECONDS:
            gate.fail(f"{fault}, case {number} of seed {seed}: took {seconds:.1f} s")
        slowest, number, counted = max(slowest, seconds), number + 1, counted + (many or 1)
        gate.count(module.UNIT, many or 1)
    return slowest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", default="", help="a module of tests/faults; default all")
    parser.add_argument("--cases", type=int, help="cases of each fault; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    options = parse(parser, {}, arguments)
    if options.list:
        print("\n".join(f"{name:<24}{load(name).FULL:>7,} {load(name).UNIT}" for name in faults()))
        return 0
    names = [options.fault] if options.fault else faults()
    # One result for all faults at the smallest size, otherwise one for each.
    together = [names] if options.smallest or not names else [[name] for name in names]
    return max(measured(each, options) for each in together)


def measured(names: list[str], options: argparse.Namespace) -> int:
    """Run the gate for some faults and return its exit code; one case of each with --smallest."""
    modules = {name: load(name) for name in names}
    size = {
        name: options.cases or (1 if options.smallest else module.FULL)
        for name, module in modules.items()
    }
    needs = {modules[name].UNIT: size[name] for name in names}
    rows = tuple(sorted({module.ROW for module in modules.values()}))
    variant = "" if options.smallest else "-".join(names)
    with Gate("fault_cases", options, needs=needs, rows=rows, variant=variant) as gate:
        for name, module in modules.items():
            slowest = tried(gate, module, name, size[name], options.seed)
            gate.figure(f"slowest case of {name} in seconds", slowest, at_most=module.SECONDS)
        gate.figure("promises broken", len(gate.failures), at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
