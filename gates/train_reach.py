"""`etude train reach` from command to exit: success and seconds, several seeds.

    python gates/train_reach.py [--recipe seek-pictures] [--seeds 3]

Runs the real command in a fresh process for each seed, then plays 200 fresh episodes with the kept
policy. Every seed must succeed in 99 % of them and of its last evaluation, within 60 s; where a
point is steered to its target by pictures alone (`seek-pictures`), in 90 % within 10 minutes.
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

LIMITS = {"reach": (0.99, 60.0, 131_072), "seek-pictures": (0.9, 600.0, 98_304)}
"""Success, seconds, and environment steps."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=tuple(LIMITS), default="reach")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--timesteps", type=int, help="default the recipe's own")
    parser.add_argument("--success", type=float, help="of every seed, at least")
    # Trained for a second: it must complete and be evaluated, whatever it has learned.
    options = parse(parser, {"seeds": 1, "timesteps": 4_096, "success": 0.0}, arguments)
    needs = {"trainings": options.seeds}
    with Gate("train_reach", options, needs=needs, variant=options.recipe) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.seeds):
                trial(gate, seed, options, Path(scratch) / f"seed{seed}")
    return gate.code


def trial(gate: Gate, seed: int, options: argparse.Namespace, folder: Path) -> None:
    success, limit, timesteps = LIMITS[options.recipe]
    if options.success is not None:
        success = options.success
    chosen = ["--seed", str(seed), "--folder", str(folder)]
    if options.timesteps:
        timesteps = options.timesteps
        chosen += ["--clock.total-timesteps", str(timesteps)]
    start = time.perf_counter()
    etude(gate, "train", options.recipe, *chosen)
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
    gate.figure(f"success of seed {seed}", fresh["eval/success_rate"], at_least=success)
    gate.figure(f"last evaluation of seed {seed}", last["eval/success_rate"], at_least=success)
    gate.figure(f"steps of seed {seed}", last["timesteps"], at_least=timesteps)
    gate.figure(f"seconds of seed {seed}", seconds, at_most=limit, timing=True)


if __name__ == "__main__":
    sys.exit(main())
