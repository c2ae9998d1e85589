"""Damage one file of a run; the resume must be exact, or report the loss.

    python -m gates.faults.damaged_runs --cases 5000 --by-command-line 50

Trains three short runs (PPO; SAC with a learned reward and its replay on disk; TD3 on a dataset),
removes their last checkpoint as after a kill, and for each case damages one file of a fresh copy:
mostly one changed byte, else the file is truncated or missing. `etude fsck` must notice it, and a
resume must end with the fingerprint of the untouched run, or with the same weights and training
state and a message about the lost rows of the log, or with a sentence that names the file. Anything
else, a traceback or a different result without a message, is a miss. Exits 1 on any.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from pathlib import Path

from damage_cases import RECIPES, DamagedRuns, by_command_line, in_process
from etude.runs import files
from gates.lib.report import Gate, parse

KINDS = ("byte",) * 7 + ("cut", "cut", "missing")
SHOWN = 500
"""Cases between two lines of output."""


class NoFlush(files.Disk):
    """A disk without flushes: thousands of real ones would only test the disk."""

    def fsync(self, fd: int) -> None:
        """Do nothing."""


def case(gate: Gate, runs: DamagedRuns, name: str, number: int, seed: int, typed: bool) -> None:
    """Damage one file, chosen by the number of the case, and judge the resume."""
    chance = random.Random(f"{seed}-{number}")
    file, kind = chance.choice(runs.files), chance.choice(KINDS)
    runs.damage(file, kind, chance)
    try:
        outcome = runs.judge(file, by_command_line if typed else in_process)
    except Exception:
        gate.count("missed")
        gate.fail(f"case {number}, {name}, {kind}, {file}: {traceback.format_exc(limit=3)}")
        return
    gate.count("cases")
    gate.count(outcome)
    gate.count("by command line", typed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000)
    parser.add_argument("--by-command-line", type=int, default=50, help="of the cases")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, smallest={"cases": 12, "by_command_line": 1}, arguments=arguments)
    needs = {"cases": options.cases, "by command line": options.by_command_line}
    with (
        tempfile.TemporaryDirectory() as scratch,
        files.using(NoFlush()),
        Gate("damaged_runs", options, needs=needs, rows=(22,)) as gate,
    ):
        runs = {name: DamagedRuns(Path(scratch) / name, recipe) for name, recipe in RECIPES.items()}
        for number in range(options.cases):
            name = list(runs)[number % len(runs)]
            case(gate, runs[name], name, number, options.seed, number < options.by_command_line)
            if (number + 1) % SHOWN == 0:
                print(f"{number + 1:,} cases: {dict(gate.counts)}", flush=True)
        gate.details["files"] = {name: len(run.files) for name, run in runs.items()}
        gate.figure("cases neither equal nor reported", gate.counts["missed"], at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
