"""Let one of several ranks fail, freeze or die; all must report it, end and resume exactly.

    python -m gates.faults.rank_faults [--nans 50] [--freezes 20] [--kills 20] [--seed 0]

A number that is not finite, in turn in each place of a rollout and of an update, on a random rank
of 2 or 4: every rank must end with exit code 3, with one report that names place and rank, and
nothing saved since. If a rank is stopped with SIGSTOP, half of the time with SIGTERM to the
others, or killed, the others must name it and end within 10 s (`learner.timeout` is 4 s), and the
run resumed in one process must have the fingerprint of an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import etude
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import checkpoint
from gates import TESTS
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse

DRIVER = TESTS / "lib" / "rank_fault_driver.py"
PLACES = ("physics", "gradient", "observation", "reward", "action", "log-probability", "loss")
STEPS = 256
"""Environment steps of an iteration."""
SECONDS = 10.0
"""Seconds within which ranks must end after a signal."""


def small() -> Recipe:
    """reach with 4 shards and 12 iterations, saved after each."""
    content = recipes.find("reach-short").model_dump(mode="json")
    for section, fields in {
        "collector": {"num_envs": 32, "envs_per_group": 8, "threads": 1},
        "algorithm": {"rollout_steps": 8, "minibatch_size": 64, "update_epochs": 2},
        "learner": {"shards": 4, "timeout": 4.0},
        "clock": {"total_timesteps": 12 * STEPS, "epochs": None, "iterations": 1},
        "evaluation": {"every": "never", "final_episodes": 0},
        "checkpoint": {"every": "1 iteration"},
    }.items():
        content[section] |= fields
    return recipes.validated(content, "this gate")


def draw(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw the faults: kind, ranks, rank and iteration of each."""
    chance = random.Random(options.seed)
    kinds = [PLACES[i % len(PLACES)] for i in range(options.nans)]
    kinds += [("freeze-and-signal", "freeze")[i % 2] for i in range(options.freezes)]
    kinds += ["kill"] * options.kills
    sizes = [chance.choice((2, 4)) for _ in kinds]
    return [
        {"kind": k, "ranks": n, "rank": chance.randrange(n), "iteration": chance.randint(2, 6)}
        for k, n in zip(kinds, sizes, strict=True)
    ]


def judge_nan(gate: Gate, fault: dict[str, Any], run: Path) -> None:
    """Check that all ranks have ended and named the culprit, and the latest checkpoint is good."""
    gate.count("numbers that are not finite")
    reports, newest = list(run.glob("failures/*")), checkpoint.newest_verified(run / "checkpoints")
    named = fault["kind"] in fault["said"] and f"on rank {fault['rank']}" in fault["said"]
    if fault["codes"] != [3] * fault["ranks"] or not named or len(reports) != 1:
        gate.fail(f"{_called(fault)}: ended with {fault['codes']}, {len(reports)} reports")
    elif newest is None or int(newest.name) != fault["iteration"] * STEPS:
        gate.fail(f"{_called(fault)}: the newest checkpoint is {newest}")


def judge_loss(gate: Gate, fault: dict[str, Any], run: Path, whole: str) -> bool:
    """Check that the others have named the rank; return whether the resumed run is undisturbed."""
    gate.count("kills" if fault["kind"] == "kill" else "freezes")
    if set(fault["codes"]) != {1} or f"from rank {fault['rank']} for" not in fault["said"]:
        gate.fail(f"{_called(fault)}: the others ended with {fault['codes']}: {fault['said']}")
    if list(run.glob("failures/*")):
        gate.fail(f"{_called(fault)}: a failure report, although the run did not fail")
    return fingerprint(etude.resume(run).path) == whole


def _called(fault: dict[str, Any]) -> str:
    return f"{fault['kind']} on rank {fault['rank']} of {fault['ranks']}"


def measure(gate: Gate, faults: list[dict[str, Any]], scratch: Path) -> None:
    recipe, files = small(), [scratch / "recipe.yaml", scratch / "faults.json"]
    files[0].write_text(recipes.dump(recipe))
    files[1].write_text(json.dumps(faults))
    command = [sys.executable, str(DRIVER), str(files[0]), str(scratch), str(files[1])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    whole = fingerprint(etude.train(recipe, scratch / "whole").path)
    slowest: dict[str, float] = {}
    differ = 0
    for number, fault in enumerate(json.loads(done.stdout)):
        run, kind = scratch / str(number), fault["kind"]
        if kind in PLACES:
            judge_nan(gate, fault, run)
            continue
        slowest[kind] = max(slowest.get(kind, 0.0), fault["seconds"])
        if not judge_loss(gate, fault, run, whole):
            differ += 1
            gate.fail(f"{_called(fault)}: the resumed run is another")
    gate.figure("resumed runs that differ", differ, at_most=0)
    for kind, seconds in slowest.items():
        gate.figure(f"s from a {kind} to the end", seconds, at_most=SECONDS)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nans", type=int, default=50)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, smallest={"nans": 2, "freezes": 1, "kills": 1}, arguments=arguments)
    needs = {"numbers that are not finite": options.nans}
    needs |= {"freezes": options.freezes, "kills": options.kills}
    with (
        Gate("rank_faults", options, needs=needs, rows=(9, 19, 20)) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        measure(gate, draw(options), Path(scratch))
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
