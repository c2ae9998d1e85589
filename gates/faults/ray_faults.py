"""Kill, freeze and remove Ray workers; the run must equal the local one, bit for bit.

    python -m gates.faults.ray_faults [--kills 80] [--stops 20] [--removals 50]

Trains the recipe's short preset on a Ray cluster of two nodes on 127.0.0.1, again and again, while
a thread ends actors with SIGKILL and freezes them with SIGSTOP at random times, and removes the
second node once in every run. Each run's SHA-256 over weights, optimizer, normaliser, snapshots
and metrics.jsonl must equal that of a run on one local thread. The gate stops at the first run that
fails, and if runs end without faults.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import etude
from etude.planning.recipe import Recipe
from gates.lib.compare import fingerprint
from gates.lib.report import Gate, parse
from ray_nodes import actors_of, node, start
from short_recipes import find, names

DEADLINE = 3.0
"""Seconds after which a frozen actor is replaced."""
PAUSE = (0.5, 6.0)
"""Range of the random seconds between two faults."""


class Torment(threading.Thread):
    """A thread that causes faults at random times, until `end` is called."""

    def __init__(
        self, cluster: Any, wanted: Counter[str], chance: random.Random, pause: tuple[float, float]
    ) -> None:
        super().__init__(daemon=True)
        self.cluster, self.wanted, self.chance, self.pause = cluster, wanted, chance, pause
        self.done: Counter[str] = Counter()
        self.ended = threading.Event()
        self.second = cluster.add_node(**node(1))

    def run(self) -> None:
        while not self.ended.wait(self.chance.uniform(*self.pause)):
            left = [kind for kind in ("kill", "stop") if self.wanted[kind] > self.done[kind]]
            actors = actors_of(self.cluster)
            if self.second is not None and self.chance.random() < 0.2:
                self.remove_node()
            elif left and actors:
                kind = self.chance.choices(left, [self.wanted[name] for name in left])[0]
                number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
                try:
                    os.kill(self.chance.choice(actors), number)
                except ProcessLookupError:
                    continue
                self.done[kind] += 1

    def remove_node(self) -> None:
        node, self.second = self.second, None
        self.cluster.remove_node(node)
        self.done["removal"] += 1

    def end(self) -> Counter[str]:
        self.ended.set()
        self.join()
        if self.second is not None:
            self.cluster.remove_node(self.second)
        return self.done


def placed(recipe: Recipe, **collector: Any) -> Recipe:
    return recipe.replace(**{f"collector__{name}": value for name, value in collector.items()})


def judge(gate: Gate, options: argparse.Namespace, scratch: Path) -> None:
    short = f"{options.recipe}-short"
    recipe = find(short if short in names() else options.recipe)
    reference = fingerprint(etude.train(placed(recipe, threads=1), scratch / "untouched").path)
    print(f"untouched {recipe.name}: {reference}", flush=True)
    cluster, chance, runs = start(2), random.Random(options.seed), 0
    wanted = Counter({kind: gate.needs[kind] for kind in ("kill", "stop", "removal")})
    ray = {"kind": "ray", "threads": 1, "actors": 2, "deadline": DEADLINE}
    different = 0
    try:
        while (wanted - gate.counts) and runs < options.runs and not different:
            torment = Torment(cluster, wanted - gate.counts, chance, options.pause)
            torment.start()
            path, runs = scratch / f"run{runs}", runs + 1
            try:
                run = etude.train(placed(recipe, **ray, address=cluster.address), path)
            finally:
                gate.counts += (done := torment.end())
            gate.count("runs")
            result = fingerprint(run.path)
            verdict = "equal" if result == reference else "DIFFERENT"
            said = ", ".join(f"{count} {kind}" for kind, count in sorted(done.items())) or "nothing"
            print(f"run {runs:3d}  {said}  {verdict}", flush=True)
            if result != reference:
                different += 1
                gate.fail(f"run {runs} after {said}: {result}")
    finally:
        cluster.shutdown()
    gate.figure("runs that differ", different, at_most=0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale", help="or episodic")
    parser.add_argument("--kills", type=int, default=80)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--removals", type=int, default=50, help="of nodes, one in a run")
    parser.add_argument("--runs", type=int, default=400, help="at most")
    parser.add_argument("--pause", type=float, nargs=2, default=PAUSE, help="between two faults")
    parser.add_argument("--seed", type=int, default=0)
    smallest = {"kills": 1, "stops": 1, "removals": 1, "runs": 6, "pause": (0.2, 1.5)}
    options = parse(parser, smallest, arguments)
    needs = {"kill": options.kills, "stop": options.stops, "removal": options.removals, "runs": 1}
    with (
        Gate("ray_faults", options, needs=needs, rows=(7, 8), variant=options.recipe) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        judge(gate, options, Path(scratch))
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
