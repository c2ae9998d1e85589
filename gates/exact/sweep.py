"""Kill a sweep and its workers repeatedly: table and bits must be those of an undisturbed sweep.

    python -m gates.exact.sweep --trials 16 --kills 10

Runs a sweep of a short recipe undisturbed, then again in another folder, and ends processes of the
second with SIGKILL: the sweep itself, whose workers then save; one of its workers, which the sweep
restarts; and all of them at once. A sweep that was killed is continued with
`etude sweep --resume`. In the end the tables of both must be equal, and so must be the SHA-256 of
weights, training state and metrics of every trial, the best among them. The logs of the trials say
where each of their processes began: survivors of a rung begin where the rung ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gates.lib.command import started
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse

TURNS = 3
"""Most sweeps that are disturbed, if sweeps end before all kills are done."""
KINDS = ("all of it", "worker", "the sweep")
VARY = ["algorithm.learning_rate=3e-4..1e-2:log", "algorithm.gamma=0.9,0.95,0.98"]
SHORT = [
    *("--evaluation.every", "2", "iterations", "--evaluation.final-episodes", "4"),
    *("--collector.threads", "1", "--logs.no-tensorboard"),
]
BEGAN = re.compile(r"^(?:Resuming .* at step|Paused and saved .*, at step) ([\d,]+)\.$", re.M)


class Outcome(NamedTuple):
    """The results of a sweep."""

    table: str
    best: str
    """The best trial and its fingerprint."""
    fingerprints: dict[str, str]
    survivors: int
    """Promotions of trials to another rung."""
    repeated: int
    """Steps of those trials that were trained a second time."""
    seconds: float


def sweep_once(
    gate: Gate, options: argparse.Namespace, folder: Path, kills: int = 0, seconds: float = 0.0
) -> Outcome:
    """Run a sweep to its end, with `kills` kills of its processes within about `seconds`."""
    begin, chance, done = time.monotonic(), random.Random(options.seed), 0
    while True:
        with started(
            _command(options, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as it:
            while done < kills and it.poll() is None:
                kind, wait = KINDS[done % len(KINDS)], chance.uniform(0.1, 0.6) * seconds / kills
                if _kill(it, kind, wait, chance):
                    done += 1
                    gate.count("kills")
                    gate.count(f"kills of {kind}")
                    print(f"killed {kind}", flush=True)
            said, _ = it.communicate(timeout=gate.seconds_left)
        if it.returncode == 0:
            break
        if it.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the sweep ended with {it.returncode}: {said[-2000:]}")
    return _outcome(folder, said, time.monotonic() - begin)


def _command(options: argparse.Namespace, folder: Path) -> list[str]:
    words = [sys.executable, "-m", "etude", "sweep"]
    if (folder / "sweep.json").exists():
        return [*words, "--resume", str(folder), "--workers", str(options.workers)]
    words += ["reach-short", *SHORT, "--vary", *VARY, "--trials", str(options.trials)]
    words += ["--clock.total-timesteps", str(options.timesteps)]
    words += ["--reduction-factor", str(options.reduction_factor)]
    return [*words, "--folder", str(folder), "--workers", str(options.workers)]


def _kill(sweep: subprocess.Popen[str], kind: str, wait: float, chance: random.Random) -> bool:
    """Kill a process of this kind after the delay; False if the sweep has ended before."""
    when, children = time.monotonic() + wait, Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children")
    while sweep.poll() is None:
        workers = [int(word) for word in children.read_text().split()]
        if time.monotonic() < when or (kind != "the sweep" and not workers):
            time.sleep(0.02)
            continue
        chosen = [chance.choice(workers)] if kind == "worker" else [sweep.pid]
        for process in chosen + (workers if kind == "all of it" else []):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return True
    return False


def _outcome(folder: Path, said: str, seconds: float) -> Outcome:
    table = said[said.index("\n\n") : said.index("\nBest: ")].strip()
    state = json.loads((folder / "sweep.json").read_text())
    runs = {f"t{trial['number']}": trial for trial in state["trials"] if not trial["refused"]}
    fingerprints = {name: fingerprint(folder / name) for name in runs}
    best = re.search(r"^Best: \S*/(t\d+) ", said, re.M)
    assert best is not None
    repeated = 0
    for name in runs:
        paused = 0
        for line in BEGAN.finditer((folder / f"{name}.log").read_text()):
            step = int(line[1].replace(",", ""))
            # A process must begin where the one before it has paused.
            repeated += max(paused - step, 0)
            paused = step if line[0].startswith("Paused") else paused
    survivors = sum(len(trial["scores"]) - 1 for trial in runs.values() if trial["scores"])
    return Outcome(
        table, f"{best[1]} {fingerprints[best[1]]}", fingerprints, survivors, repeated, seconds
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduction-factor", type=int, default=3)
    parser.add_argument("--timesteps", type=int, default=18_432, help="of a trial")
    smallest = {"trials": 2, "kills": 1, "reduction_factor": 2, "timesteps": 4096}
    options = parse(parser, smallest, arguments)
    needs = {"kills": options.kills, "trials": options.trials, "survivors": 1}
    with Gate("sweep", options, needs=needs) as gate, tempfile.TemporaryDirectory() as scratch:
        quiet = sweep_once(gate, options, Path(scratch) / "quiet")
        print(f"{quiet.table}\nundisturbed in {quiet.seconds:.0f} s, best {quiet.best}", flush=True)
        differing = dict.fromkeys(("trials", "tables", "best"), 0)
        repeated = quiet.repeated
        for turn in range(TURNS):
            left = options.kills - gate.counts["kills"]
            if turn and left < 1:
                break
            loud = sweep_once(gate, options, Path(scratch) / f"loud{turn}", left, quiet.seconds)
            print(f"{loud.table}\ndisturbed in {loud.seconds:.0f} s, best {loud.best}", flush=True)
            gate.count("trials", len(loud.fingerprints))
            gate.count("survivors", loud.survivors)
            names = quiet.fingerprints.keys() | loud.fingerprints.keys()
            differing["trials"] += sum(
                quiet.fingerprints.get(name) != loud.fingerprints.get(name) for name in names
            )
            differing["tables"] += quiet.table != loud.table
            differing["best"] += quiet.best != loud.best
            repeated += loud.repeated
        for what, count in differing.items():
            gate.figure(f"{what} that differ", count, at_most=0)
        gate.figure("steps repeated by survivors", repeated, at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
