"""Reward-only at size: memory, and how well the learned reward follows the true progress.

    python -m gates.learn.train_reward_only [--dataset FOLDER] [--updates 15000]
    python -m gates.learn.train_reward_only --reads state --updates 1000 [--loss unbiased]
    python -m gates.learn.train_reward_only --libero 3

Learns from at least 100,000 transitions of pick-and-place with 128-pixel images, successes and
failures both, recorded first (`etude data record pick-place FOLDER --episodes 3500`, some ten
minutes) unless a folder is given. Every return is 1 or 0. The reward reads the image and the joints
of the arm (`--reads`), never the progress; without images in `--reads`, none are recorded. The real
command runs in its own process, whose anonymous resident memory is read four times a second; pages
of mapped files are not counted, because the system can reclaim them.

Progress is judged on held-out episodes: Spearman's correlation of the running sum of the learned
reward with progress, over all their steps together, and the mean over single episodes, also of the
successes and of the failures alone. The correlation of time with progress, which any
constant reward has, is given for comparison. The first must reach .8, with less than 1.5 GiB of
anonymous memory, within 30 minutes.

With `--libero SEEDS` it learns from files in LIBERO's layout instead: 100 successes and 100
failures of each seed, of the same lengths, with actions and proprioception and a return of 1 or 0.
In a failure the object slips out of the fingers on the way and they close; the arm moves on as if
it held the object. No success shows closed fingers. On the episodes held out, the trained
reward, a constant and the untrained network are compared by the share of pairs of equal length
that are ordered like their returns: for each seed the 95 % interval of the trained reward must lie
above that of the untrained network and above .5, which a constant scores.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from etude.api import Run
from etude.data.store.episodes import EpisodeStore
from etude.data.store.views import EpisodesOf
from etude.planning.loading import policy_parts
from etude.rl.offline import split_store
from etude.rl.reward_only import make_reward_only
from etude.rl.rewards.scores import CHANCE, PAIRS, SUCCESS, evaluate
from gates.lib.command import CommandFailed, etude, record, started
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

CORRELATION, MEMORY, SECONDS = 0.8, 1.5 * 2**30, 1800.0
TRANSITIONS = 100_000
ITERATIONS, BATCHES = 5, 50
"""Iterations, and the most batches of an iteration."""
DEMOS, HELD_OUT = 100, 0.3
"""Demonstrations in each of the two files, and the share that is held out."""


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
    parser.add_argument("--libero", type=int, default=0, help="seeds of files in LIBERO's layout")
    parser.add_argument("--write", type=Path, help="only write such files there, of seed 0")
    # Some updates on vectors: only completion is judged, not learning.
    smallest = {"episodes": 24, "transitions": 100, "updates": 25, "reads": ["state"]}
    options = parse(parser, {**smallest, "correlation": -1.0}, arguments)
    if options.write:
        write_libero(options.write, 0)
        return 0
    if options.libero:
        return of_failures(options)
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


def of_failures(options: argparse.Namespace) -> int:
    """Learn from files in LIBERO's layout and compare; return the exit code of the gate."""
    needs = {"trainings": options.libero, "held-out pairs": 800 * options.libero}
    with Gate("train_reward_only", options, needs=needs, variant="libero") as gate:
        gaps, begin = [], time.perf_counter()
        for seed in range(options.libero):
            with tempfile.TemporaryDirectory() as scratch:
                found, pairs = learned_from_failures(gate, Path(scratch), seed)
            gate.count("trainings")
            gate.count("held-out pairs", pairs)
            gate.details[f"seed {seed}"] = found
            others = (CHANCE, found[f"untrained/{PAIRS.removeprefix('eval/')}_high"])
            gaps.append(found[f"{PAIRS}_low"] - max(others))
            for name, what in ((PAIRS, "in the order of returns"), (SUCCESS, "of success")):
                print(f"  seed {seed}, pairs {what}: {said(found, name)}", flush=True)
        trained, untrained = (
            [found[f"{prefix}/reward_pairs"] for found in gate.details.values()]
            for prefix in ("eval", "untrained")
        )
        gate.figure("trained reward, least of all seeds", min(trained))
        gate.figure("a constant reward", CHANCE)
        gate.figure("untrained network, least of all seeds", min(untrained))
        gate.figure("untrained network, most of all seeds", max(untrained))
        gate.figure("least distance between intervals", min(gaps), at_least=0.05)
        gate.figure("seconds in all", time.perf_counter() - begin, at_most=SECONDS, timing=True)
    return gate.code


def said(found: dict[str, float], name: str) -> str:
    """The scores of the trained reward and of the untrained network with intervals, as text."""
    words = []
    for prefix in ("eval", "untrained"):
        name = f"{prefix}/{name.partition('/')[2]}"
        low, high = found[f"{name}_low"], found[f"{name}_high"]
        words.append(f"{found[name]:.3f} ({low:.3f} to {high:.3f})")
    return f"trained {words[0]}, a constant {CHANCE}, untrained {words[1]}"


def learned_from_failures(gate: Gate, scratch: Path, seed: int) -> tuple[dict[str, float], int]:
    """Import files, learn a reward and evaluate it by the real commands; return its scores, and the
    number of held-out pairs of a success and a failure."""
    files = write_libero(scratch, seed)
    data, run = str(scratch / "data"), str(scratch / "run")
    etude(gate, "data", "import", *map(str, files), data)
    sizes = ("--algorithm.rrd.rrd-batch-size", "256", "--algorithm.rrd.rrd-sample-size", "32")
    lengths = ("--clock.epochs", "1", "--clock.cycles", "4", "--clock.iterations", "5")
    etude(
        gate,
        *("train", "reward-only", "--folder", run, "--seed", str(seed)),
        *("--algorithm.dataset", data, "--algorithm.held-out", str(HELD_OUT)),
        *(*sizes, *lengths, "--evaluation.every", "1 cycle"),
    )
    found = json.loads(etude(gate, "eval", run, "--json"))
    config: Any = Run(run).recipe.algorithm
    with closing(EpisodeStore.open(Path(data), config.read_names)) as store:
        known = split_store(store, config)[1].successes
    pairs = known.count(True) * known.count(False)
    return {name: value for name, value in found.items() if isinstance(value, float)}, pairs


def write_libero(folder: Path, seed: int) -> list[Path]:
    """Write two files in LIBERO's layout; every other demonstration fails."""
    rng, files = np.random.default_rng(seed), []
    arm = rng.normal(size=(3, 7))  # joint angles for positions of the hand
    for name in ("put_the_bowl_on_the_plate", "put_the_mug_in_the_microwave"):
        files.append(folder / f"KITCHEN_SCENE1_{name}_demo.hdf5")
        with h5py.File(files[-1], "w") as file:
            data = file.create_group("data")
            sentence = {"language_instruction": name.replace("_", " ")}
            data.attrs["problem_info"] = json.dumps(sentence)
            data.attrs["bddl_file_name"] = f"{name}.bddl"
            for number in range(DEMOS):
                write_demo(data.create_group(f"demo_{number}"), rng, arm, number % 2 == 1)
    return files


def write_demo(group: h5py.Group, rng: np.random.Generator, arm: np.ndarray, slips: bool) -> None:
    """Write a demonstration: the hand reaches for an object, closes and carries it, at 20 Hz.

    The fingers stand .04 m from the middle while they are open, and half the object's width where
    they hold it. If it slips they close, and the arm moves on.
    """
    steps = int(rng.integers(40, 81))
    grasp = int(steps * rng.uniform(0.3, 0.45))
    slip = int(rng.integers(grasp + 5, steps - 3)) if slips else steps
    places = rng.uniform(-0.3, 0.3, (3, 3))  # start, object, goal
    legs = ((places[0], places[1], grasp), (places[1], places[2], steps - grasp))
    hand = np.concatenate([_moved(*leg) for leg in legs])
    hand += 0.003 * rng.normal(size=hand.shape)
    gap = np.full(steps, 0.04)
    gap[grasp:] = rng.uniform(0.012, 0.025)
    gap[slip:] = np.maximum(gap[slip:] - 0.01 * np.arange(1, steps - slip + 1), 0.001)
    fingers = np.stack([gap, -gap], axis=1) + 0.0005 * rng.normal(size=(steps, 2))
    speed = np.gradient(hand, axis=0)
    command = np.where(np.arange(steps) < grasp, -1.0, 1.0)[:, None]
    turning = 0.1 * rng.normal(size=(steps, 3))
    group["actions"] = np.concatenate([speed / 0.03, turning, command], axis=1)
    group["obs/ee_pos"] = hand
    group["obs/joint_states"] = hand @ arm + 0.3 * rng.normal(size=7)
    group["obs/gripper_states"] = fingers
    group["states"] = np.concatenate([hand, fingers], axis=1)
    group["rewards"] = (np.arange(steps) == steps - 1).astype(np.uint8) * (not slips)
    group["dones"] = np.eye(steps, dtype=np.uint8)[-1]


def _moved(start: np.ndarray, end: np.ndarray, steps: int) -> np.ndarray:
    """Positions [steps, 3] on a line from start to end, from rest to rest."""
    share = np.linspace(0.0, 1.0, steps)[:, None]
    moved: np.ndarray = start + (3.0 * share**2 - 2.0 * share**3) * (end - start)
    return moved


def unusual(options: argparse.Namespace) -> list[str]:
    """Words of the variant: none for the biased loss with subsets of 8 steps."""
    loss = [options.loss] if options.loss != "biased" else []
    return loss + ([f"{options.sample} steps"] if options.sample != 8 else [])


def describe(folder: Path) -> int:
    """Print the sizes of a dataset; return its number of transitions."""
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
    """Train; return the seconds from command to exit and the peak of anonymous memory in bytes."""
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
    """Anonymous resident memory of a process in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def last_test(folder: Path) -> dict[str, float]:
    """The metrics of the last evaluation in the log; prints those of all evaluations."""
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
    """The correlations with progress inside successes, and inside failures."""
    kept = {}
    config: Any = Run(folder).recipe.algorithm
    store = EpisodeStore.open(Path(config.dataset), config.read_names)
    learner = make_reward_only(config, store, torch.device("cpu"), None)
    learner.load_policy(policy_parts(folder / "checkpoints" / "latest")[0])
    numbers, good = learner.held_out.numbers, learner.held_out.returns > 0
    for name, chosen in (("successes", numbers[good]), ("failures", numbers[~good])):
        found = evaluate(learner.policy, EpisodesOf(store, chosen), config.progress, 0.0)
        for what in ("rank_correlation", "time_correlation"):
            kept[f"{what} inside {name}"] = float(found.get(f"eval/{what}", math.nan))
    store.close()
    return kept


if __name__ == "__main__":
    sys.exit(main())
