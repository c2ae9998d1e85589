"""Many agents: `etude train spread` against agents that act at random.

    python gates/train_spread.py [--seeds 2]

Runs the real command in a fresh process for each seed. The three agents of an environment share a
reward, so an episode of the environment is one sample: the mean over its agents. The 95 % interval
of the margin over random agents must lie above 0, after a training of at most 5 minutes.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import etude
from command import etude as command
from etude.core.keys import Key
from etude.envs.probe import random_actions
from machine import report_load
from report import Gate, parse

SECONDS = 300.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--timesteps", type=int, help="default the recipe's own")
    parser.add_argument("--episodes", type=int, default=600, help="fresh ones of each")
    parser.add_argument("--margin", type=float, default=0.0, help="of the interval, at least")
    # Trained for seconds: it must complete and be played, whatever it has learned.
    smallest = {"seeds": 1, "timesteps": 6_144, "episodes": 60, "margin": -math.inf}
    options = parse(parser, smallest, arguments)
    with Gate("train_spread", options, needs={"trainings": options.seeds}) as gate:
        report_load(gate)
        chance = at_random(options.episodes)
        print(f"random agents: {summary(chance)}")
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(options.seeds):
                learned, seconds = train(gate, seed, options, Path(scratch) / f"seed{seed}")
                margin = learned.mean() - chance.mean()
                error = np.sqrt(sum(x.var(ddof=1) / len(x) for x in (learned, chance)))
                print(
                    f"seed {seed}: {summary(learned)}, {margin:.2f} ± {1.96 * error:.2f} better "
                    f"than random, {seconds:.0f} s",
                    flush=True,
                )
                gate.count("trainings")
                least = margin - 1.96 * error
                gate.figure(f"margin of seed {seed}, at least", least, at_least=options.margin)
                gate.figure(f"seconds of seed {seed}", seconds, at_most=SECONDS, timing=True)
    return gate.code


def summary(returns: np.ndarray) -> str:
    error = 1.96 * returns.std(ddof=1) / np.sqrt(len(returns))
    return f"return {returns.mean():.2f} ± {error:.2f} ({len(returns)} episodes)"


def at_random(episodes: int) -> np.ndarray:
    """Returns [episodes] of environments whose agents choose at random."""
    recipe = etude.recipes.spread()
    env = recipe.env.make(episodes)
    env.reset(Key(7))
    agents, steps = env.spec.agents, env.spec.max_episode_steps or 0
    total = np.zeros(episodes)
    for actions in random_actions(env, steps, Key(8)):
        total += env.step(actions).reward
    return total.reshape(-1, agents).mean(1)


def train(
    gate: Gate, seed: int, options: argparse.Namespace, folder: Path
) -> tuple[np.ndarray, float]:
    """Returns of fresh episodes, one per environment's, and seconds from command to exit."""
    start = time.perf_counter()
    chosen = ["spread", "--seed", str(seed), "--folder", str(folder)]
    if options.timesteps:
        chosen += ["--clock.total-timesteps", str(options.timesteps)]
    command(gate, "train", *chosen)
    seconds = time.perf_counter() - start
    command(gate, "eval", str(folder), "--episodes", str(options.episodes))
    table = max(folder.glob("evaluations/*/episodes.csv"), key=lambda path: path.stat().st_mtime)
    with table.open() as file:
        returns = np.array([float(row["return"]) for row in csv.DictReader(file)])
    agents = 3
    return returns.reshape(-1, agents).mean(1), seconds


if __name__ == "__main__":
    sys.exit(main())
