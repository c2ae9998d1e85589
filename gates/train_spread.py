"""Many agents: `etude train spread` against agents that act at random.

    python gates/train_spread.py [--seeds 2]

Runs the real command in a fresh process for each seed. The three agents of an environment share a
reward, so an episode of the environment is one sample: the mean over its agents. Prints the margin
over random agents with its 95 % interval. Exits 1 when an interval does not lie above 0 or a
training takes more than 5 minutes; 2 when the machine was too busy to judge.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import etude
from etude.core.keys import Key
from etude.envs.catalog import make_env
from etude.envs.probe import random_actions
from machine import report_load

SECONDS, EPISODES = 300.0, 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    judged, good = report_load(), 0
    chance = at_random()
    print(f"random agents: {summary(chance)}")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            learned, seconds = train(seed, Path(scratch) / f"seed{seed}")
            margin = learned.mean() - chance.mean()
            error = np.sqrt(sum(x.var(ddof=1) / len(x) for x in (learned, chance)))
            good += bool(margin - 1.96 * error > 0 and seconds <= SECONDS)
            print(
                f"seed {seed}: {summary(learned)}, {margin:.2f} ± {1.96 * error:.2f} better than "
                f"random, {seconds:.0f} s",
                flush=True,
            )
    print(f"train_spread {good} of {options.seeds} seeds better than random within 5 minutes")
    return 0 if good == options.seeds else (1 if judged else 2)


def summary(returns: np.ndarray) -> str:
    error = 1.96 * returns.std(ddof=1) / np.sqrt(len(returns))
    return f"return {returns.mean():.2f} ± {error:.2f} ({len(returns)} episodes)"


def at_random() -> np.ndarray:
    """Returns [EPISODES] of environments whose agents choose at random."""
    recipe = etude.recipes.spread()
    env = make_env(recipe.env, EPISODES)
    env.reset(Key(7))
    agents, steps = env.spec.agents, env.spec.max_episode_steps or 0
    total = np.zeros(EPISODES)
    for actions in random_actions(env, steps, Key(8)):
        total += env.step(actions).reward
    return total.reshape(-1, agents).mean(1)


def train(seed: int, folder: Path) -> tuple[np.ndarray, float]:
    """Returns of fresh episodes, one per environment's, and seconds from command to exit."""
    start = time.perf_counter()
    command("train", "spread", "--seed", str(seed), "--folder", str(folder))
    seconds = time.perf_counter() - start
    command("eval", str(folder), "--episodes", str(EPISODES))
    table = max(folder.glob("evaluations/*/episodes.csv"), key=lambda path: path.stat().st_mtime)
    with table.open() as file:
        returns = np.array([float(row["return"]) for row in csv.DictReader(file)])
    agents = 3
    return returns.reshape(-1, agents).mean(1), seconds


def command(*arguments: str) -> str:
    """The output of an etude command."""
    full = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(full, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
