"""Collected steps per second of Ray actors, against threads of one process.

    python -m gates.speed.ray_speed [--num-envs 256] [--steps 32] [--rounds 15]

Two actors of one thread each and a local collector of two threads have the same groups and
alternate. Prints Ray's share of the time of a collection; the median of the rounds' ratios must
reach 0.85.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import etude
from etude.building.build import Parts, build
from etude.planning.recipes import Recipe
from etude.planning.resolve import resolve
from etude.runs.folder import RunFolder
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GOAL = 0.85


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--envs-per-group", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32, help="control steps of a round")
    parser.add_argument("--workers", type=int, default=2, help="threads here, actors there")
    parser.add_argument("--rounds", type=int, default=15)
    options = parse(
        parser, {"num_envs": 64, "envs_per_group": 16, "steps": 8, "rounds": 2}, arguments
    )
    with Gate("ray_speed", options, needs={"rounds": options.rounds}) as gate:
        report_load(gate)
        with tempfile.TemporaryDirectory() as scratch:
            ratios = measure(options, Path(scratch))
        gate.count("rounds", len(ratios))
        gate.figure("Ray over threads", float(np.median(ratios)), at_least=GOAL, timing=True)
    return gate.code


def made(options: argparse.Namespace, folder: Path, **collector: Any) -> Parts:
    recipe: Recipe = etude.recipes.reach().replace(
        collector__num_envs=options.num_envs,
        collector__envs_per_group=options.envs_per_group,
        collector__engine_threads=1,
        algorithm__rollout_steps=options.steps,
        **{f"collector__{name}": value for name, value in collector.items()},
    )
    return build(resolve(recipe), RunFolder.create(folder, "", "", {}, {}))


def measure(options: argparse.Namespace, scratch: Path) -> np.ndarray:
    """Collect with both sides in turn; return the ratios of the rounds."""
    workers = options.workers
    sides = {
        "local": made(options, scratch / "local", threads=workers),
        "ray": made(options, scratch / "ray", kind="ray", actors=workers, threads=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    shares, rate = [], 0.0
    for i in range(options.rounds + 1):
        for name, parts in sides.items():
            broadcast = parts.loop.algorithm.broadcast(parts.loop.clock)
            start = time.perf_counter()
            fragments = parts.loop.collector.collect(broadcast, i)
            seconds[name].append(time.perf_counter() - start)
            if name == "ray":
                spent = [sum(fragment.seconds.values()) for fragment in fragments]
                shares.append(sum(f.seconds["transport"] for f in fragments) / sum(spent))
                rate = parts.loop.collector.status()["system/bytes_per_second"]
    for parts in sides.values():
        parts.close()
    for name, taken in seconds.items():
        speed = options.num_envs * options.steps / np.median(taken[1:])
        print(f"{name:5} {speed:10,.0f} steps/s  ({workers} workers, median of {options.rounds})")
    print(f"Ray's share of a collection: {np.median(shares[1:]):.1%}; {rate / 1e6:.2f} MB/s")
    ratios = np.array(seconds["local"][1:]) / np.array(seconds["ray"][1:])
    print(f"ratio by round: {np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f}")
    return ratios


if __name__ == "__main__":
    sys.exit(main())
