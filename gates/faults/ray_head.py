"""Kill or freeze the head of a run's Ray cluster: the run must report it and resume exactly.

    python -m gates.faults.ray_head [--strikes 20] [--patience 0]

Trains a short preset on a Ray cluster of its own on 127.0.0.1; in the middle of it the head, or
Ray's process beside the run, is ended with SIGKILL or frozen with SIGSTOP. The run must name the
missing process within two minutes, write a report and exit with 1; resumed on local threads it must
equal an undisturbed run. `--patience 0` keeps the run's own timeout.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import etude
from etude.planning import recipes
from etude.rollout.placement import Placement
from gates import TESTS
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse
from short_recipes import reach_at_scale_short

DRIVER = TESTS / "lib" / "head_driver.py"
WITHIN = 120.0


def placed(**collector: object) -> recipes.Recipe:
    changes = {f"collector__{name}": value for name, value in collector.items()}
    return reach_at_scale_short().replace(**changes)


def strike(folder: Path, what: str, number: int, patience: float) -> tuple[int, str, float]:
    """Strike a run; return (exit code, output, seconds from the strike to the end)."""
    (folder / "recipe.yaml").write_text(recipes.dump(placed(kind="ray", threads=1, actors=1)))
    arguments = (folder / "recipe.yaml", folder / "run", what, int(number), patience)
    done = subprocess.run(
        [sys.executable, "-u", str(DRIVER), *map(str, arguments)],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    end = time.monotonic()
    times = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if "struck at" in line]
    return done.returncode, done.stdout, end - float(times[0]) if times else float("nan")


def judge(gate: Gate, options: argparse.Namespace, scratch: Path) -> None:
    reference = fingerprint(etude.train(placed(threads=1), scratch / "untouched").path)
    cases = list(product(("gcs_server", "raylet"), (signal.SIGKILL, signal.SIGSTOP)))
    random.Random(options.seed).shuffle(cases)
    slowest, differ = 0.0, 0
    for index in range(options.strikes):
        what, number = cases[index % len(cases)]
        folder = scratch / str(index)
        folder.mkdir()
        code, said, seconds = strike(folder, what, number, options.patience)
        failures = folder / "run" / "failures"
        reports = list(failures.iterdir()) if failures.is_dir() else []
        named = "has not answered for" in said or "on this machine has ended" in said
        if code != 1 or not named or len(reports) != 1:
            gate.fail(f"{what} {number.name}: code {code}, {len(reports)} reports, said {said}")
            continue
        run = etude.resume(folder / "run", collector=Placement(kind="local"))
        result = fingerprint(run.path)
        differ += result != reference
        slowest = max(slowest, seconds)
        gate.count("strikes")
        print(f"{what} {number.name}: {seconds:.1f} s, {result == reference}", flush=True)
    gate.figure("runs that differ", differ, at_most=0)
    gate.figure("seconds until the end", slowest or float("nan"), at_most=WITHIN)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=20)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, smallest={"strikes": 1, "patience": 2.0}, arguments=arguments)
    with (
        tempfile.TemporaryDirectory() as scratch,
        Gate("ray_head", options, needs={"strikes": options.strikes}, rows=(20,)) as gate,
    ):
        judge(gate, options, Path(scratch))
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
