"""Kill, freeze and unplug Ray workers all the time; the run must equal the local one, bit for bit.

    python gates/ray_faults.py [--recipe reach-at-scale] [--kills 30] [--stops 5]

Trains the recipe's short preset on a Ray cluster of two nodes on 127.0.0.1, again and again, while
a thread ends actors with SIGKILL and freezes them with SIGSTOP at random times, and removes the
second node once in every run. Each run's SHA-256 over weights, optimizer, normaliser, snapshots
and metrics.jsonl is held against that of a run on one local thread. Exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ray_nodes import actors_of, node, start  # isort: skip

import etude
from etude.app.recipes import CATALOG, Recipe, find
from results import fingerprint

DEADLINE = 3.0
"""Seconds after which a frozen actor is given up."""
PAUSE = (0.5, 6.0)
"""Seconds between two faults, at random."""


class Torment(threading.Thread):
    """Faults at random times, until it is told to stop."""

    def __init__(self, cluster: Any, wanted: Counter[str], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.cluster, self.wanted, self.chance = cluster, wanted, chance
        self.done: Counter[str] = Counter()
        self.ended = threading.Event()
        self.second = cluster.add_node(**node(1))

    def run(self) -> None:
        while not self.ended.wait(self.chance.uniform(*PAUSE)):
            left = [kind for kind in ("kill", "stop") if self.wanted[kind] > self.done[kind]]
            actors = actors_of(self.cluster)
            if self.second is not None and self.chance.random() < 0.2:
                self.unplug()
            elif left and actors:
                kind = self.chance.choices(left, [self.wanted[name] for name in left])[0]
                number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
                try:
                    os.kill(self.chance.choice(actors), number)
                except ProcessLookupError:
                    continue
                self.done[kind] += 1

    def unplug(self) -> None:
        node, self.second = self.second, None
        self.cluster.remove_node(node)
        self.done["unplug"] += 1

    def end(self) -> Counter[str]:
        self.ended.set()
        self.join()
        if self.second is not None:
            self.cluster.remove_node(self.second)
        return self.done


def placed(recipe: Recipe, **collector: Any) -> Recipe:
    chosen = recipe.collector.model_copy(update=collector)
    return recipe.model_copy(update={"collector": chosen})


def judge(options: argparse.Namespace, scratch: Path) -> int:
    short = f"{options.recipe}-short"
    recipe = find(short if short in CATALOG else options.recipe)
    reference = fingerprint(etude.train(placed(recipe, threads=1), scratch / "untouched").path)
    print(f"untouched {recipe.name}: {reference}", flush=True)
    cluster, chance, failures = start(2), random.Random(options.seed), 0
    wanted, hits, runs = Counter(kill=options.kills, stop=options.stops), Counter[str](), 0
    begin = time.monotonic()
    ray = {"kind": "ray", "threads": 1, "actors": 2, "deadline": DEADLINE}
    while any(hits[kind] < wanted[kind] for kind in wanted) or not hits["unplug"]:
        torment = Torment(cluster, wanted - hits, chance)
        torment.start()
        path = scratch / f"run{runs}"
        run = etude.train(placed(recipe, **ray, address=cluster.address), path)
        done = torment.end()
        hits, runs = hits + done, runs + 1
        result = fingerprint(run.path)
        failures += result != reference
        verdict = "equal" if result == reference else f"DIFFERENT: {result}"
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(done.items())) or "nothing"
        print(f"run {runs:3d}  {counted}  {verdict}", flush=True)
    cluster.shutdown()
    print(f"{time.monotonic() - begin:.0f} s")
    print(
        f"ray_faults {recipe.name}: {hits['kill']} kills, {hits['stop']} stops, {hits['unplug']} "
        f"nodes removed, {runs} runs: {'FAILED' if failures else 'all equal'}"
    )
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale", help="or episodic")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return judge(options, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
