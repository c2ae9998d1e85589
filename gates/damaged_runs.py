"""Damage one file of a run; it must go on to the same bits, or say what is lost.

    python gates/damaged_runs.py --cases 5000 --by-command-line 50

Trains three short runs (PPO; SAC with a learned reward and its replay on disk; TD3 on a dataset),
takes their last checkpoint away as a kill would have, and for each case damages one file of a fresh
copy: most often one byte is changed, else the file is cut or missing. `etude fsck` must notice it,
and a resume must end in the fingerprint of the untouched run, or in the same weights and training
state with the lost rows of the log named, or in a sentence that names the file. Anything else, a
traceback or a different result without a word, is a miss. Exits 1 on any.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import traceback
from pathlib import Path

from etude.runs import files
from report import Gate, parse

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lib"))
from damage_cases import RECIPES, DamagedRuns, by_command_line, in_process

KINDS = ("byte",) * 7 + ("cut", "cut", "missing")
SHOWN = 500
"""Cases between two lines on the screen."""


class NoFlush(files.Disk):
    """Thousands of real flushes would test the disk, not the code."""

    def fsync(self, fd: int) -> None:
        """Nothing."""


def case(gate: Gate, runs: DamagedRuns, name: str, number: int, seed: int, typed: bool) -> None:
    """One damaged file, chosen by the number of the case."""
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
        gate.figure("cases neither equal nor told", gate.counts["missed"], at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
