"""`etude train reach` from command to exit: success and seconds, several seeds.

    python gates/train_reach.py [--seeds 3]

Runs the real command in a fresh process for each seed, then evaluates the kept policy on episodes
it has not seen. Exits 1 when a seed stays below 99 % success or takes longer than 60 s, or 2 when
the machine was too busy to judge.
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

SUCCESS, SECONDS = 0.99, 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    judged, good = report_load(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            folder = Path(scratch) / f"seed{seed}"
            start = time.perf_counter()
            etude("train", "reach", "--seed", str(seed), "--folder", str(folder))
            seconds = time.perf_counter() - start
            last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            fresh = json.loads(etude("eval", str(folder), "--episodes", "200", "--json"))
            success = last["eval/success_rate"]
            good += success >= SUCCESS and seconds <= SECONDS
            print(
                f"seed {seed}: {success:.1%} of {last['eval/episodes']:.0f} at "
                f"{last['timesteps']:,} steps, {seconds:.1f} s from command to exit; best policy "
                f"on fresh episodes {fresh['eval/success_rate']:.1%}",
                flush=True,
            )
    print(
        f"train_reach {good} of {options.seeds} seeds (goal {SUCCESS:.0%} within {SECONDS:.0f} s)"
    )
    return 0 if good == options.seeds else (1 if judged else 2)


def etude(*arguments: str) -> str:
    """The output of an etude command."""
    command = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
