"""Reward-only at size: memory, and how well the learned reward follows the true progress.

    python gates/train_reward_only.py [--dataset FOLDER] [--updates 15000]
    python gates/train_reward_only.py --reads state --updates 1000 [--loss unbiased] [--sample 4]

Learns from at least 100,000 transitions of pick-and-place with 128-pixel images, successes and
failures both, recorded first (`etude data record pick-place FOLDER --episodes 3500`, some ten
minutes) unless a folder is given. Every return is 1 or 0. The reward reads the image and the arm's
own joints, never the progress, and never the state unless `--reads` says so; where no image is
read, none is recorded. The real command runs in a process of its own, whose anonymous resident
memory is read four times a second; pages of the mapped data are the system's, which takes them
back when it needs them.

Progress is judged on held-out episodes: Spearman's correlation of the running sum of the learned
reward with progress, over all their steps together, and the mean over single episodes, also of the
successes and of the failures alone. Beside it stands what mere time gets, which any constant
reward equals. The first must reach .8, with less than 1.5 GiB of anonymous memory, within 30
minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from command import CommandFailed, record, started
from etude.algorithms.reward_only import make_reward_only
from etude.algorithms.rrd import evaluate
from etude.api import Run
from etude.experience.store.episodes import EpisodeStore
from etude.experience.store.views import EpisodesOf
from etude.planning.loading import policy_parts
from machine import report_load
from report import Gate, parse

CORRELATION, MEMORY, SECONDS = 0.8, 1.5 * 2**30, 1800.0
TRANSITIONS = 100_000
ITERATIONS, BATCHES = 5, 50
"""Batches of an iteration, at most."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, help="made by etude data record pick-place")
    parser.add_argument("--episodes", type=int, default=3_500, help="to record without a dataset")
    parser.add_argument("--transitions", type=int, default=TRANSITIONS, help="of it, at least")
    parser.add_argument("--updates", type=int, default=15_000)
    parser.add_argument("--reads", nargs="+", default=["image", "proprio"], help="or state")
    parser.add_argument("--loss", default="biased")
    parser.add_argument("--sample", type=int, default=8, help="steps of one subset")
    parser.add_argument("--correlation", type=float, default=CORRELATION, help="at least")
    # Some updates on vectors: it must complete and be tested, whatever it has learned.
    smallest = {"episodes": 24, "transitions": 100, "updates": 25, "reads": ["state"]}
    options = parse(parser, {**smallest, "correlation": -1.0}, arguments)
    needs = {"transitions": options.transitions, "trainings": 1}
    variant = " ".join([*options.reads, *unusual(options)])
    with Gate("train_reward_only", options, needs=needs, variant=variant) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            data, folder = options.dataset or Path(scratch) / "data", Path(scratch) / "run"
            if options.dataset is None:
                record(gate, data, options.episodes, 128 if "image" in options.reads else 0)
            gate.count("transitions", describe(data))
            seconds, memory = train(data, folder, options)
            found = last_test(folder) | by_outcome(folder)
        gate.count("trainings")
        gate.details = dict(sorted(found.items()))
        for name, value in gate.details.items():
            print(f"  {name:26} {value:.4g}")
        correlation = found["eval/pooled_correlation"]
        gate.figure("correlation with progress", correlation, at_least=options.correlation)
        gate.figure("correlation of mere time", found["eval/pooled_time_correlation"])
        gate.figure("anonymous memory in bytes", memory, at_least=1, at_most=MEMORY)
        gate.figure("seconds of training", seconds, at_most=SECONDS, timing=True)
    return gate.code


def unusual(options: argparse.Namespace) -> list[str]:
    """What tells the variants of the loss apart: nothing for the biased loss of 8 steps."""
    loss = [options.loss] if options.loss != "biased" else []
    return loss + ([f"{options.sample} steps"] if options.sample != 8 else [])


def describe(folder: Path) -> int:
    """Print what the dataset holds; how many transitions."""
    store = EpisodeStore.open(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    good = int((store.returns > 0).sum())
    print(
        f"{store.num_transitions:,} transitions, {store.num_episodes:,} episodes, {good:,} of them "
        f"good, {size / 2**30:.1f} GiB",
        flush=True,
    )
    store.close()
    return int(store.num_transitions)


def train(data: Path, folder: Path, options: argparse.Namespace) -> tuple[float, int]:
    """Seconds from command to exit, and the most anonymous bytes resident at once."""
    batches = min(BATCHES, -(-options.updates // ITERATIONS))
    cycles = -(-options.updates // (ITERATIONS * batches))
    command = [
        *(sys.executable, "-m", "etude", "train", "reward-only", "--folder", str(folder)),
        *("--algorithm.dataset", str(data), "--algorithm.progress", "progress"),
        *("--algorithm.rrd.loss", options.loss),
        *("--algorithm.rrd.rrd-sample-size", str(options.sample)),
        *("--algorithm.rrd.network.reads", *options.reads),
        *("--algorithm.train-batches", str(batches), "--clock.iterations", str(ITERATIONS)),
        *("--clock.cycles", str(cycles), "--clock.epochs", "1"),
        *("--evaluation.every", f"{max(cycles // 4, 1)} cycles"),
        *("--checkpoint.every", f"{max(cycles // 4, 1)} cycles"),
    ]
    start, most = time.perf_counter(), 0
    with started(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            time.sleep(0.25)
    if process.returncode:
        raise CommandFailed(f"the training ended with {process.returncode}")
    return time.perf_counter() - start, most


def anonymous(pid: int) -> int:
    """Bytes resident of a process that no file backs."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def last_test(folder: Path) -> dict[str, float]:
    """The last log row's figures of an evaluation; prints those on the way."""
    found: dict[str, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        tested = {name: value for name, value in row.items() if name.startswith("eval/")}
        if tested:
            found = tested
            print(
                f"  after {row['updates']:,} updates: {tested['eval/pooled_correlation']:.3f}, "
                f"single episodes {tested['eval/rank_correlation']:.3f}"
            )
    return found


def by_outcome(folder: Path) -> dict[str, float]:
    """How well progress is followed inside successes, and inside failures."""
    kept = {}
    config = Run(folder).recipe.algorithm
    store = EpisodeStore.open(Path(config.dataset), config.read_names)
    learner = make_reward_only(config, store, torch.device("cpu"), None)
    learner.load_policy(policy_parts(folder / "checkpoints" / "latest")[0])
    numbers, good = learner.held_out.numbers, learner.held_out.returns > 0
    for name, chosen in (("successes", numbers[good]), ("failures", numbers[~good])):
        found = evaluate(learner.rrd, EpisodesOf(store, chosen), config.progress)
        for what in ("rank_correlation", "time_correlation"):
            kept[f"{what} inside {name}"] = float(found.get(f"eval/{what}", math.nan))
    store.close()
    return kept


if __name__ == "__main__":
    sys.exit(main())
