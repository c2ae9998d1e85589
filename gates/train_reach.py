"""`etude train reach` from command to exit: success and seconds, several seeds.

    python gates/train_reach.py [--seeds 3]

Runs the real command in a fresh process for each seed, then evaluates the kept policy on episodes
it has not seen. Every seed must reach 99 % success at its end, within 60 s.
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

SUCCESS, SECONDS = 0.99, 60.0
TIMESTEPS = 131_072


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--timesteps", type=int, default=TIMESTEPS)
    parser.add_argument("--success", type=float, default=SUCCESS, help="of every seed, at least")
    # Trained for a second: it must complete and be evaluated, whatever it has learned.
    options = parse(parser, {"seeds": 1, "timesteps": 4_096, "success": 0.0}, arguments)
    with Gate("train_reach", options, needs={"trainings": options.seeds}) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.seeds):
                trial(gate, seed, options, Path(scratch) / f"seed{seed}")
    return gate.code


def trial(gate: Gate, seed: int, options: argparse.Namespace, folder: Path) -> None:
    start = time.perf_counter()
    budget = ("--clock.total-timesteps", str(options.timesteps))
    etude(gate, "train", "reach", "--seed", str(seed), "--folder", str(folder), *budget)
    seconds = time.perf_counter() - start
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    fresh = json.loads(etude(gate, "eval", str(folder), "--episodes", "200", "--json"))
    print(
        f"seed {seed}: {last['eval/success_rate']:.1%} of {last['eval/episodes']:.0f} at "
        f"{last['timesteps']:,} steps, {seconds:.1f} s from command to exit; best policy "
        f"on fresh episodes {fresh['eval/success_rate']:.1%}",
        flush=True,
    )
    gate.count("trainings")
    gate.figure(f"success of seed {seed}", last["eval/success_rate"], at_least=options.success)
    gate.figure(f"steps of seed {seed}", last["timesteps"], at_least=options.timesteps)
    gate.figure(f"seconds of seed {seed}", seconds, at_most=SECONDS, timing=True)


if __name__ == "__main__":
    sys.exit(main())
