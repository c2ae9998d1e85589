"""`etude train offline` on recorded pick-and-place, beside two policies that only imitate.

    python -m gates.learn.train_offline [--dataset FOLDER] [--updates 10000] [--seeds 3]

Learns reward and policy by the real command from 2,500 episodes, half of them failures, recorded
first (`etude data record pick-place FOLDER --episodes 2500 --image-size 0`) unless a folder is
given, with --seeds seeds; then the same

- with `--algorithm.behaviour-coef 100`, which hardly does more than imitate the dataset;
- with `etude train bc` on the successful episodes (`etude data filter --success yes`) and the same
  number of updates: imitation that needs no rewards, only labels of success.

A seed's success is the mean over its last three evaluations, each of `--tests` fresh episodes. That
of the first must be 95 %, more than that of the second, and reach that of the third by the rule of
`gates/lib/compare.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np

from gates.lib.command import etude, record
from gates.lib.compare import compare_with_peer
from gates.lib.report import Gate, parse

GOAL = 0.95
TRAININGS = {
    "offline": ("offline",),
    "imitation": ("offline", "--algorithm.behaviour-coef", "100"),
    "imitation of the successes": ("bc", "--policy.actor-reads", "state"),
}
"""{name: recipe and options}."""
EPOCHS, BATCHES, LAST = 5, 100, 3
"""Epochs, each with an evaluation; the most batches of an iteration; evaluations of a score."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, help="made by etude data record pick-place")
    parser.add_argument("--episodes", type=int, default=2_500, help="to record without a dataset")
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--tests", type=int, default=200, help="episodes of each evaluation")
    parser.add_argument("--success", type=float, default=GOAL, help="of the first, at least")
    parser.add_argument("--margin", type=float, default=1e-9, help="over the second, at least")
    parser.add_argument("--set", nargs="*", default=[], help="options of the trainings")
    parser.add_argument("--seeds", type=int, default=3)
    # A few updates: only completion is judged, not learning.
    smallest = {"episodes": 12, "updates": 20, "tests": 4, "success": 0.0, "margin": -math.inf}
    options = parse(parser, {**smallest, "seeds": 1}, arguments)
    needs = {"trainings": len(TRAININGS) * options.seeds}
    with Gate("train_offline", options, needs=needs) as gate:
        found: dict[str, list[list[float]]] = {name: [] for name in TRAININGS}
        with tempfile.TemporaryDirectory() as scratch:
            data = options.dataset or Path(scratch) / "data"
            if options.dataset is None:
                record(gate, data, options.episodes)
            successes = Path(scratch) / "successes"
            etude(gate, "data", "filter", str(data), str(successes), "--success", "yes")
            for seed, (name, how) in product(range(options.seeds), TRAININGS.items()):
                start = time.perf_counter()
                folder = Path(scratch) / f"{name.replace(' ', '-')}-{seed}"
                train(gate, successes if how[0] == "bc" else data, folder, how, seed, options)
                seconds = time.perf_counter() - start
                found[name].append(last_success(folder))
                gate.count("trainings")
                shown = ", ".join(f"{each:.1%}" for each in found[name][-1])
                print(f"{name}, seed {seed}: {shown}, trained in {seconds:.0f} s", flush=True)
        means = {name: float(np.mean(seeds)) for name, seeds in found.items()}
        gate.figure("success on fresh episodes", means["offline"], at_least=options.success)
        margin = means["offline"] - means["imitation"]
        gate.figure("more than imitation", margin, at_least=options.margin)
        peer = "imitation of the successes"
        compare_with_peer(gate, "success", found["offline"], found[peer], peer=peer, unit=1.0)
    return gate.code


def train(
    gate: Gate,
    data: Path,
    folder: Path,
    how: tuple[str, ...],
    seed: int,
    options: argparse.Namespace,
) -> None:
    batches = min(BATCHES, -(-options.updates // EPOCHS))
    iterations, half = -(-options.updates // (EPOCHS * batches)), options.tests // 2
    etude(
        gate,
        *("train", how[0], "--folder", str(folder), "--seed", str(seed)),
        *("--algorithm.dataset", str(data), "--env.kind", "pick-place"),
        *(*how[1:], "--algorithm.train-batches", str(batches)),
        *("--clock.epochs", str(EPOCHS), "--clock.cycles", "1"),
        *("--clock.iterations", str(iterations), "--evaluation.final-episodes", "0"),
        *("--evaluation.every", "1 epoch", "--evaluation.episodes", str(options.tests)),
        *("--evaluation.num-envs", str(half * 2), "--evaluation.envs-per-group", str(half)),
        *options.set,
    )


def last_success(folder: Path) -> list[float]:
    """Success of a run's last evaluations."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["eval/success_rate"] for row in rows if "eval/success_rate" in row][-LAST:]


if __name__ == "__main__":
    sys.exit(main())
