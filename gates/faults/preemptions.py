"""Take the machine of a run in an object store away, with its disk; the run must end as one that
was left alone.

    python -m gates.faults.preemptions [--preemptions 200] [--chance 0.05] [--jobs 4] [--seed 0]

A short run trains through a relay that lets one request in twenty fail, vanish, arrive late or
twice, or hang, before an S3 server on 127.0.0.1. Its process gets SIGKILL or a notice (SIGTERM) at
a random time, also while it starts, its disk is deleted, and a replacement resumes it; every tenth
time two replacements start at once, of which one must say that the other writes the run. The
newest checkpoint must never get older, the index must be written by one writer at a time, a run
that was saved after a notice must be free at once, and finished runs must have the fingerprint of a
local one. `--jobs` runs are preempted side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import etude
from etude.core.clock import ClockConfig
from etude.planning import recipes
from etude.planning.recipe import Recipe
from gates import TESTS
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse

import object_store  # isort: skip

LIB = TESTS / "lib"
LEASE = 3.0


def small() -> Recipe:
    """reach with 48 iterations, saved after each."""
    return recipes.find("reach-short").replace(
        clock=ClockConfig(total_timesteps=48 * 1024, cycles=1, iterations=1),
        collector__threads=1,
        evaluation__every="8 cycles",
        evaluation__final_episodes=0,
        checkpoint__every="1 iteration",
        checkpoint__lease=LEASE,
        checkpoint__grace=25.0,
    )


def strike(recipe: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Preempt runs; what the driver and the relay have counted, and the fingerprints."""
    url = f"s3://{object_store.BUCKET}/runs/one"
    served = subprocess.Popen(
        [sys.executable, str(LIB / "object_store.py"), str(options.chance), str(options.seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert served.stdout is not None
        places = json.loads(served.stdout.readline())
        each = -(-options.preemptions // options.jobs)

        def drive(job: int) -> dict[str, Any]:
            folder = scratch / str(job)
            arguments = (recipe, f"{url}-{job}", places["server"], places["relay"], folder)
            numbers = (each, options.seed + job)
            done = subprocess.run(
                [sys.executable, str(LIB / "preempt_driver.py"), *map(str, (*arguments, *numbers))],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found

        with ThreadPoolExecutor(options.jobs) as pool:
            found = added([*pool.map(drive, range(options.jobs))])
        with object_store.environment(places["server"], scratch / "reading"):
            finished = [] if found["faults"] else found["runs"]
            found["fingerprints"] = [fingerprint(run) for run in finished]
    finally:
        assert served.stdin is not None
        served.stdin.close()
        told = served.stdout.read() if served.stdout else "{}"
        served.wait(30)
    return {**found, **json.loads(told)}


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of counts, joined lists, and the same within dicts."""
    whole: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        whole[name] = added(values) if isinstance(values[0], dict) else sum(values[1:], values[0])
    return whole


def broken_order(commits: list[list[Any]]) -> list[str]:
    """Commits that are not those of one writer at a time, a sentence each."""
    wrong, last = [], dict[str, list[Any]]()
    for path, epoch, serial, writer in commits:
        _, before, number, name = last.get(path, [path, 0, 0, ""])
        is_next = serial == number + 1
        is_same, is_successor = epoch == before and writer == name, epoch == before + 1
        if not is_next or not (is_same or is_successor):
            wrong.append(f"{path}: commit {serial} of epoch {epoch} after {number} of {before}")
        last[path] = [path, epoch, serial, writer]
    return wrong


def judge(gate: Gate, options: argparse.Namespace, scratch: Path) -> None:
    reference = fingerprint(etude.train(small(), scratch / "untouched").path)
    recipe = scratch / "recipe.yaml"
    recipe.write_text(recipes.dump(small()))
    found = strike(recipe, scratch, options)
    counts = found["counts"]
    for why in [*found["faults"], *broken_order(found["commits"])]:
        gate.fail(why)
    gate.count("preemptions", counts.get("kills", 0) + counts.get("notices", 0))
    for name, number in counts.items():
        gate.count(name, number)
    gate.count("runs", len(found["runs"]))
    gate.count("requests", found["requests"])
    gate.count("commits", len(found["commits"]))
    for name, number in found["faults of requests"].items():
        gate.count(f"requests: {name}", number)
    differ = sum(each != reference for each in found["fingerprints"])
    gate.figure("runs that differ", differ if found["fingerprints"] else float("nan"), at_most=0)
    for kind, name in (("SIGKILL", "a kill"), ("SIGTERM", "a notice")):
        if times := found["starts"][kind]:
            gate.figure(f"seconds until a replacement trains after {name}", median(times))
    if found["repeated"]:
        gate.figure("seconds of work lost with a kill", median(found["repeated"]))
    if found["notices"]:
        gate.figure("seconds from a notice to the end", median(found["notices"]))
        gate.figure("longest seconds from a notice to the end", max(found["notices"]))


def median(times: list[float]) -> float:
    return round(statistics.median(times), 2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preemptions", type=int, default=200)
    parser.add_argument("--chance", type=float, default=0.05, help="share of requests with faults")
    parser.add_argument("--jobs", type=int, default=4, help="runs side by side")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, smallest={"preemptions": 3, "jobs": 1}, arguments=arguments)
    needs = {"preemptions": options.preemptions}
    with (
        Gate("preemptions", options, needs=needs, rows=(34,)) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        judge(gate, options, Path(scratch))
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
