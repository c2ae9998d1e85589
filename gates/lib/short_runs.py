"""Recipes of every method that run for seconds and save and evaluate often."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import short_recipes
from etude.api import train
from etude.planning.recipe import Recipe
from etude.planning.recipes import dump
from gates import ROOT
from gates.lib.command import Timed, changed, record

OFTEN = ["clock.cycles=1", "clock.iterations=2", "checkpoint.every=1 cycle"]
FEW = ["evaluation.episodes=8", "evaluation.num_envs=8", "evaluation.envs_per_group=4"]
REPLAY = [
    *("algorithm.rollout_steps=50", "algorithm.train_batches=8", "algorithm.warmup_steps=200"),
    *("algorithm.batch_size=32", "algorithm.capacity=1024", "policy.hidden=[32,32]"),
    *("clock.total_timesteps=1200", "evaluation.every=3 cycles", *OFTEN, *FEW),
]
DATASET = ["clock.epochs=4", "clock.cycles=4", "clock.iterations=2", "evaluation.every=2 cycles"]
SMALL = ["policy.hidden=[32,32]", "algorithm.train_batches=4", "algorithm.batch_size=64"]
FROM_DATA: dict[str, list[str]] = {
    "offline": [*DATASET, *SMALL, "rewards.rrd_batch_size=32", "rewards.rrd_sample_size=4"],
    "reward-only": [
        *(*DATASET, "algorithm.train_batches=4", "algorithm.rrd.rrd_sample_size=8"),
        *('algorithm.rrd.network.reads=["image","proprio"]', "algorithm.progress=progress"),
    ],
    "bc": [*DATASET, *SMALL, "policy.kind=lstm", "policy.units=32", "algorithm.average=0.9"],
    "iql": [*DATASET, *SMALL],
    "rlpd": [*REPLAY, 'env={"kind": "pick-place", "shaping": false, "max_episode_steps": 30}'],
}
"""{recipe that learns from a dataset: its changed fields}."""
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
"""{name: (recipe, its changed fields)}, for recipes without a NAME-short."""
NAMES = {"dagger", "ant", *FROM_DATA, *SHORT}
"""Names of short runs that differ from those of the recipes."""


def short_run(name: str, gate: Timed, scratch: Path) -> Recipe:
    """The short form of a recipe; makes the dataset or the teacher that it learns from."""
    if name in FROM_DATA:
        data = scratch / "data"
        task = "pick-place-rlpd" if name == "rlpd" else "pick-place"
        pixels = 32 if name == "reward-only" else 0
        record(gate, data, episodes=24, image_size=pixels, task=task)
        return changed(name, [f"algorithm.dataset={data}", *FROM_DATA[name]])
    if name == "dagger":
        return _student(scratch)
    if name == "ant":
        return _ant(scratch)
    if name in SHORT:
        return changed(*SHORT[name])
    short = f"{name}-short"
    return short_recipes.find(short if short in short_recipes.names() else name)


def _ant(scratch: Path) -> Recipe:
    """The task of the example in docs/robots.md, shortened."""
    page = (ROOT / "docs" / "robots.md").read_text()
    written = page.partition("```python file=ant.py\n")[2].partition("```")[0]
    (scratch / "ant.py").write_text(written)
    return changed("ppo", [f'env={{"kind": "{scratch}/ant.py:Ant"}}', *SHORT["ppo"][1]])


def _student(scratch: Path) -> Recipe:
    """walk-go1-student, shortened, with a teacher after 1,024 steps."""
    short = short_recipes.find("walk-go1-short").replace(env__observe_velocity=False)
    reads = ("state", "scan", "critic")
    taught = short.replace(policy__actor_reads=reads, clock__total_timesteps=1_024)
    teacher = train(taught, scratch / "teacher").path
    student = changed(
        "walk-go1-student",
        [
            *("policy.hidden=[32]", "policy.units=32", f"algorithm.teacher={teacher}"),
            *("algorithm.rollout_steps=16", "algorithm.horizon=8", "algorithm.minibatch_size=128"),
        ],
    )
    settings = ("env", "collector", "clock", "curriculum", "evaluation", "checkpoint")
    return student.replace(**{part: getattr(short, part) for part in settings})


if __name__ == "__main__":  # python -m gates.lib.short_runs NAME FILE writes the recipe
    limit = SimpleNamespace(seconds_left=600.0)
    Path(sys.argv[2]).write_text(dump(short_run(sys.argv[1], limit, Path(sys.argv[2]).parent)))
