"""Runs of seconds that save and test often, one for every method: to be killed and resumed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import short_recipes  # isort: skip

from command import record
from etude.planning.recipe import Recipe
from memory import changed
from report import Gate

OFTEN = ["clock.cycles=1", "clock.iterations=2", "checkpoint.every=1 cycle"]
FEW = ["evaluation.episodes=8", "evaluation.num_envs=8", "evaluation.envs_per_group=4"]
REPLAY = [
    *("algorithm.rollout_steps=50", "algorithm.train_batches=8", "algorithm.warmup_steps=200"),
    *("algorithm.batch_size=32", "algorithm.capacity=1024", "policy.hidden=[32,32]"),
    *("clock.total_timesteps=1200", "evaluation.every=3 cycles", *OFTEN, *FEW),
]
DATASET = ["clock.epochs=4", "clock.cycles=4", "clock.iterations=2", "evaluation.every=2 cycles"]
SHORT: dict[str, tuple[str, list[str]]] = {
    "reach-2-threads": ("reach-short", ["learner.threads=2"]),
    "ppo": (
        "ppo",
        [
            *("algorithm.update_epochs=2", "algorithm.rollout_steps=32"),
            *("clock.total_timesteps=12288", "evaluation.every=3 cycles", *OFTEN, *FEW),
        ],
    ),
    "spread": (
        "spread",
        [
            *(
                "collector.num_envs=12",
                "collector.envs_per_group=6",
                "algorithm.minibatch_size=100",
            ),
            *("algorithm.update_epochs=2", "clock.total_timesteps=7200", "evaluation.num_envs=12"),
            *("evaluation.every=3 cycles", "evaluation.episodes=12", "evaluation.envs_per_group=6"),
            *("evaluation.final_episodes=12", *OFTEN),
        ],
    ),
    "sac": ("sac", REPLAY),
    "td3": ("td3", REPLAY),
    "episodic-ircr": (f"{short_recipes.__file__}:episodic_short", ['rewards={"kind": "ircr"}']),
}
"""Recipes without a NAME-short: a recipe, and what is changed in it."""


def short_run(name: str, gate: Gate, scratch: Path) -> Recipe:
    """A recipe's short run; those that learn from a dataset record one first."""
    if name in ("offline", "reward-only"):
        data = scratch / "data"
        record(gate, data, episodes=24, image_size=32 if name == "reward-only" else 0)
        return changed(name, [f"algorithm.dataset={data}", *DATASET, *_from_data(name)])
    if name in SHORT:
        return changed(*SHORT[name])
    short = f"{name}-short"
    return short_recipes.find(short if short in short_recipes.names() else name)


def _from_data(name: str) -> list[str]:
    if name == "offline":
        sizes = ["policy.hidden=[32,32]", "algorithm.train_batches=4", "algorithm.batch_size=64"]
        return [*sizes, "rewards.rrd_batch_size=32", "rewards.rrd_sample_size=4"]
    reads = 'algorithm.rrd.network.reads=["image","proprio"]'
    sizes = ["algorithm.train_batches=4", "algorithm.rrd.rrd_sample_size=8"]
    return [*sizes, reads, "algorithm.progress=progress"]
