"""`etude train offline`: a policy from recorded pick-and-place, and one that only imitates.

    python gates/train_offline.py [--dataset FOLDER] [--updates 10000]

Learns reward and policy by the real command from 2,500 episodes, half of them failures, recorded
first (`etude data record pick-place FOLDER --episodes 2500 --image-size 0`) unless a folder is
given, and plays fresh episodes with its best policy; then the same with
`--algorithm.behaviour-coef 100`, which hardly does more than imitate what was recorded. Exits 1
when the first succeeds in less than 95 % of them, or in no more than the second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recordings import record

GOAL = 0.95
COEFS = {"offline": 0.4, "imitation": 100.0}
EPOCHS, BATCHES = 2, 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, help="made by etude data record pick-place")
    parser.add_argument("--episodes", type=int, default=2_500, help="to record without a dataset")
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--tests", type=int, default=200, help="fresh episodes of each policy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = options.dataset or Path(scratch) / "data"
        if options.dataset is None:
            record(data, options.episodes)
        for name, coef in COEFS.items():
            start, folder = time.perf_counter(), Path(scratch) / name
            train(data, folder, coef, options)
            seconds = time.perf_counter() - start
            found[name] = success(folder, options.tests)
            print(f"{name}: {found[name]:.1%}, trained in {seconds:.0f} s", flush=True)
    print(
        f"train_offline {found['offline']:.1%} of {options.tests} fresh episodes "
        f"(goal {GOAL:.0%}), imitation {found['imitation']:.1%}"
    )
    return 0 if found["offline"] >= GOAL and found["offline"] > found["imitation"] else 1


def train(data: Path, folder: Path, coef: float, options: argparse.Namespace) -> None:
    iterations = -(-options.updates // (EPOCHS * BATCHES))
    etude(
        *("train", "offline", "--folder", str(folder), "--seed", str(options.seed)),
        *("--algorithm.dataset", str(data), "--env.kind", "pick-place"),
        *("--algorithm.behaviour-coef", str(coef), "--algorithm.train-batches", str(BATCHES)),
        *("--clock.epochs", str(EPOCHS), "--clock.cycles", "1"),
        *("--clock.iterations", str(iterations), "--evaluation.final-episodes", "0"),
    )


def success(folder: Path, episodes: int) -> float:
    """Share of fresh episodes in which the run's best policy succeeds."""
    told = json.loads(etude("eval", str(folder), "--episodes", str(episodes), "--json"))
    return float(told["eval/success_rate"])


def etude(*arguments: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "etude", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"etude {' '.join(arguments)}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
