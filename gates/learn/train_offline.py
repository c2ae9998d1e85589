"""`etude train offline` on recorded pick-and-place, beside two policies that only imitate.

    python -m gates.learn.train_offline [--dataset FOLDER] [--updates 10000]

Learns reward and policy by the real command from 2,500 episodes, half of them failures, recorded
first (`etude data record pick-place FOLDER --episodes 2500 --image-size 0`) unless a folder is
given, and plays fresh episodes with its best policy; then the same

- with `--algorithm.behaviour-coef 100`, which hardly does more than imitate the dataset;
- with `etude train bc` on the successful episodes (`etude data filter --success yes`) and the same
  number of updates: imitation that needs no rewards, only labels of success.

The first must succeed in 95 % of the episodes, in more than the second, and in as many as the
third, within `--within`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

from gates.lib.command import etude, record
from gates.lib.report import Gate, parse

GOAL = 0.95
TRAININGS = {
    "offline": ("offline",),
    "imitation": ("offline", "--algorithm.behaviour-coef", "100"),
    "imitation of the successes": ("bc", "--policy.actor-reads", "state"),
}
"""{name: recipe and options}."""
EPOCHS, BATCHES = 2, 100
"""Epochs, and the most batches of an iteration."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, help="made by etude data record pick-place")
    parser.add_argument("--episodes", type=int, default=2_500, help="to record without a dataset")
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--tests", type=int, default=200, help="fresh episodes of each policy")
    parser.add_argument("--success", type=float, default=GOAL, help="of the first, at least")
    parser.add_argument("--margin", type=float, default=1e-9, help="over the second, at least")
    parser.add_argument("--within", type=float, default=0.05, help="below the third, at most")
    parser.add_argument("--set", nargs="*", default=[], help="options of the trainings")
    parser.add_argument("--seed", type=int, default=0)
    # A few updates: only completion is judged, not learning.
    smallest = {"episodes": 12, "updates": 20, "tests": 4, "success": 0.0, "margin": -math.inf}
    smallest["within"] = math.inf
    few = ["--evaluation.episodes=4", "--evaluation.num_envs=4", "--evaluation.envs-per-group=4"]
    options = parse(parser, {**smallest, "set": few}, arguments)
    with Gate("train_offline", options, needs={"trainings": len(TRAININGS)}) as gate:
        found = {}
        with tempfile.TemporaryDirectory() as scratch:
            data = options.dataset or Path(scratch) / "data"
            if options.dataset is None:
                record(gate, data, options.episodes)
            successes = Path(scratch) / "successes"
            etude(gate, "data", "filter", str(data), str(successes), "--success", "yes")
            for name, how in TRAININGS.items():
                start, folder = time.perf_counter(), Path(scratch) / name.replace(" ", "-")
                train(gate, successes if how[0] == "bc" else data, folder, how, options)
                seconds = time.perf_counter() - start
                found[name] = success(gate, folder, options.tests)
                gate.count("trainings")
                print(f"{name}: {found[name]:.1%}, trained in {seconds:.0f} s", flush=True)
        gate.figure("success on fresh episodes", found["offline"], at_least=options.success)
        margin = found["offline"] - found["imitation"]
        gate.figure("more than imitation", margin, at_least=options.margin)
        margin = found["offline"] - found["imitation of the successes"]
        gate.figure("over imitation of the successes", margin, at_least=-options.within)
    return gate.code


def train(
    gate: Gate, data: Path, folder: Path, how: tuple[str, ...], options: argparse.Namespace
) -> None:
    batches = min(BATCHES, -(-options.updates // EPOCHS))
    iterations = -(-options.updates // (EPOCHS * batches))
    etude(
        gate,
        *("train", how[0], "--folder", str(folder), "--seed", str(options.seed)),
        *("--algorithm.dataset", str(data), "--env.kind", "pick-place"),
        *(*how[1:], "--algorithm.train-batches", str(batches)),
        *("--clock.epochs", str(EPOCHS), "--clock.cycles", "1"),
        *("--clock.iterations", str(iterations), "--evaluation.final-episodes", "0"),
        *options.set,
    )


def success(gate: Gate, folder: Path, episodes: int) -> float:
    """Share of fresh episodes in which the run's best policy succeeds."""
    found = json.loads(etude(gate, "eval", str(folder), "--episodes", str(episodes), "--json"))
    return float(found["eval/success_rate"])


if __name__ == "__main__":
    sys.exit(main())
