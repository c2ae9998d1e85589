"""Memory: `etude train reach-memory`, whose target is hidden after 5 steps, with and without LSTM.

    python gates/train_memory.py [--seeds 2]

Runs the real command in a fresh process for each seed and policy, and plays 500 fresh episodes. A
policy with memory must reach 90 % success and one without stay below 30 %, each within 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from command import etude
from machine import report_load
from report import Gate, parse

ENOUGH, CHANCE, SECONDS = 0.9, 0.3, 600.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--timesteps", type=int, help="default the recipe's own")
    parser.add_argument("--episodes", type=int, default=500, help="fresh ones")
    parser.add_argument("--success", type=float, default=ENOUGH, help="with memory, at least")
    # One iteration each: both kinds must complete, and neither can know the target.
    smallest = {"seeds": 1, "timesteps": 16_384, "episodes": 32, "success": 0.0}
    options = parse(parser, smallest, arguments)
    with Gate("train_memory", options, needs={"trainings": 2 * options.seeds}) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.seeds):
                for kind in ("lstm", "mlp"):
                    success, seconds = train(gate, kind, seed, options, Path(scratch))
                    print(f"seed {seed}, {kind}: {success:.1%}, {seconds:.0f} s", flush=True)
                    gate.count("trainings")
                    bound = {"at_least": options.success} if kind == "lstm" else {"at_most": CHANCE}
                    gate.figure(f"success of {kind}, seed {seed}", success, **bound)
                    name = f"seconds of {kind}, seed {seed}"
                    gate.figure(name, seconds, at_most=SECONDS, timing=True)
    return gate.code


def train(
    gate: Gate, kind: str, seed: int, options: argparse.Namespace, scratch: Path
) -> tuple[float, float]:
    """Success on fresh episodes, and seconds from command to exit."""
    start, folder = time.perf_counter(), str(scratch / f"{kind}{seed}")
    chosen = ["reach-memory", "--seed", str(seed), "--folder", folder, "--policy.kind", kind]
    if options.timesteps:
        chosen += ["--clock.total-timesteps", str(options.timesteps)]
    etude(gate, "train", *chosen)
    seconds = time.perf_counter() - start
    told = etude(gate, "eval", folder, "--episodes", str(options.episodes), "--json")
    return float(json.loads(told)["eval/success_rate"]), seconds


if __name__ == "__main__":
    sys.exit(main())
