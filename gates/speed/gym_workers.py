"""Steps per second of Gymnasium environments in worker processes, against one process.

    python -m gates.speed.gym_workers [--workers 2] [--milliseconds 1] [--rounds 9]

Each step of an environment computes for `--milliseconds` in Python. Both sides step the same 16
environments and alternate in one process; the median of the rounds' ratios must reach 1.7 with two
workers.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from etude.core.contracts import BatchEnv
from etude.core.keys import Key
from etude.envs.adapters.gym import GymConfig
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GOAL = 1.7
NUM_ENVS = 16


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--milliseconds", type=float, default=1.0, help="of an environment's step")
    parser.add_argument("--steps", type=int, default=100, help="of all environments, in a round")
    parser.add_argument("--rounds", type=int, default=9)
    smallest = {"steps": 10, "rounds": 2}
    options = parse(parser, smallest, arguments)
    with Gate("gym_workers", options, needs={"rounds": options.rounds}) as gate:
        report_load(gate)
        ratios = measure(options)
        gate.count("rounds", len(ratios))
        ratio = float(np.median(ratios))
        gate.figure("workers over one process", ratio, at_least=GOAL, timing=True)
    return gate.code


def measure(options: argparse.Namespace) -> list[float]:
    """Step both sides in turn; return the ratios of the rounds."""
    seconds = options.milliseconds / 1000.0
    config = GymConfig(id="slow_gym:Slow-v0", kwargs={"seconds": seconds})
    envs = [config.build(NUM_ENVS, workers) for workers in (1, options.workers)]
    for env in envs:
        env.reset(Key(0))
    found = []
    for _ in range(options.rounds):
        alone, shared = (stepped(env, options.steps) for env in envs)
        found.append(shared / alone)
        print(
            f"one process {alone:7,.0f} steps/s, {options.workers} workers {shared:7,.0f} steps/s"
        )
    for env in envs:
        env.close()
    return found


def stepped(env: BatchEnv, steps: int) -> float:
    """Environment steps per second."""
    actions, begin = np.zeros((NUM_ENVS, 1), np.float32), time.perf_counter()
    for _ in range(steps):
        env.step(actions)
    return steps * NUM_ENVS / (time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main())
