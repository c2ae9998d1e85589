"""Memory: `etude train reach-memory`, whose target is hidden after 5 steps, with and without LSTM.

    python gates/train_memory.py [--seeds 2]

Runs the real command in a fresh process for each seed and policy. Exits 1 when a policy with memory
stays below 90 % success on fresh episodes, one without exceeds 30 %, or a training takes more than
10 minutes; 2 when the machine was too busy to judge.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import report_load

ENOUGH, CHANCE, SECONDS = 0.9, 0.3, 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    judged, good = report_load(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            for kind in ("lstm", "mlp"):
                folder = Path(scratch) / f"{kind}{seed}"
                success, seconds = train(kind, seed, folder)
                kept = success >= ENOUGH if kind == "lstm" else success <= CHANCE
                good += kept and seconds <= SECONDS
                print(f"seed {seed}, {kind}: {success:.1%} of 500, {seconds:.0f} s", flush=True)
    total = 2 * options.seeds
    print(f"train_memory {good} of {total} (lstm >= {ENOUGH:.0%}, mlp <= {CHANCE:.0%}, 10 minutes)")
    return 0 if good == total else (1 if judged else 2)


def train(kind: str, seed: int, folder: Path) -> tuple[float, float]:
    """Success on fresh episodes, and seconds from command to exit."""
    start = time.perf_counter()
    etude(
        *("train", "reach-memory", "--seed", str(seed), "--folder", str(folder)),
        *("--policy.kind", kind),
    )
    seconds = time.perf_counter() - start
    fresh = json.loads(etude("eval", str(folder), "--episodes", "500", "--json"))
    return float(fresh["eval/success_rate"]), seconds


def etude(*arguments: str) -> str:
    """The output of an etude command."""
    command = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
