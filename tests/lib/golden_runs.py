"""A short run of every method, and one hash of all it learned and logged.

    python tests/lib/golden_runs.py [NAME ...]      # write tests/golden.json anew

The hashes hold for processors that compute as the one did that wrote the file; `machine` says so.
Names of parameters and metrics are left out: only numbers count, so that a rename changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import short_recipes
from etude.api import train
from etude.core.board import LAST_RETURNS, SUCCESSES
from etude.planning.recipes import Recipe
from etude.runs import checkpoint, manifest
from run_hash import comparable_rows
from toys import changed, tiny_bc, tiny_motions, tiny_offline, tiny_reach, tiny_reward_only

FILE = Path(__file__).parents[1] / "golden.json"
SMALL_EVALUATION = {"episodes": 6, "num_envs": 6, "envs_per_group": 6, "final_episodes": 6}


def short(name: str, timesteps: int, **sections: dict[str, object]) -> Recipe:
    """A recipe of the catalogue, cut to so many steps."""
    sections["clock"] = {"total_timesteps": timesteps} | sections.get("clock", {})
    sections["evaluation"] = SMALL_EVALUATION | sections.get("evaluation", {})
    return changed(short_recipes.find(name), **sections)


def gymnasium(folder: Path) -> Recipe:
    algorithm = {"update_epochs": 2, "rollout_steps": 32}
    return short("ppo", 6 * 512, algorithm=algorithm, clock={"iterations": 2, "cycles": 1})


def off_policy(name: str) -> Callable[[Path], Recipe]:
    def make(folder: Path) -> Recipe:
        base = short_recipes.find("episodic-short")
        chosen = short_recipes.find(name)
        sizes = ("rollout_steps", "batch_size", "warmup_steps", "train_batches", "capacity")
        return base.replace(
            algorithm=chosen.algorithm.replace(**{n: getattr(base.algorithm, n) for n in sizes}),
            policy__kind=chosen.policy.kind,
            rewards=chosen.rewards,
        )

    return make


RUNS: dict[str, Callable[[Path], Recipe]] = {
    "ppo": lambda folder: tiny_reach(6),
    "ppo on Gymnasium": gymnasium,
    "ppo on PettingZoo": lambda folder: short("spread", 2 * 6_144),
    "lstm, priorities, lag, shards": lambda folder: short("reach-at-scale-short", 4 * 2_048),
    "pick and place": lambda folder: short_recipes.find("pick-place-short"),
    "imitation": lambda folder: short_recipes.find("imitate-walk-short"),
    "curriculum over motions": lambda folder: tiny_motions(1),
    "amp": lambda folder: short_recipes.find("amp-walk-short"),
    "sac": off_policy("sac"),
    "td3": off_policy("td3"),
    "rrd": lambda folder: short_recipes.find("episodic-short"),
    "ircr": off_policy("episodic-ircr"),
    "offline": lambda folder: tiny_offline(folder, 2, 2, "1 epoch"),
    "bc": lambda folder: tiny_bc(folder, "lstm", 2, 2, "1 epoch"),
    "flow": lambda folder: tiny_bc(folder, "flow", 2, 2, "1 epoch"),
    "ppo from pictures": lambda folder: short("seek-pictures", 2 * 2_048),
    "reward-only": lambda folder: tiny_reward_only(folder, 2, 2, "1 epoch"),
}


LATER = (LAST_RETURNS, SUCCESSES)
"""Columns that came after the hashes were written: sums over the same episodes as others."""


def golden_hash(recipe: Recipe, folder: Path) -> str:
    """Of the final policy's arrays and of every number in metrics.jsonl that is no time."""
    run = train(recipe, folder / "run")
    arrays = checkpoint.load_training(run.path / "checkpoints" / "final")[0]
    parts = [hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest() for a in arrays.values()]
    for row in comparable_rows(run.path):
        parts.append(json.dumps(sorted(repr(v) for k, v in row.items() if k not in LATER)))
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def machine() -> str:
    """How this machine rounds."""
    return manifest.standard_digest()[:16]


def main() -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known["machine"] = machine()
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            found = golden_hash(RUNS[name](Path(scratch)), Path(scratch))
        print(f"{name}: {'same' if known.get(name) == found else 'NEW'} {found[:16]}", flush=True)
        known[name] = found
    FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
