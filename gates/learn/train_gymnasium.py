"""Gymnasium's MuJoCo tasks by PPO, beside stable-baselines3's PPO with the settings of rl_zoo3.

    python -m gates.learn.train_gymnasium [--task hopper|halfcheetah|walker2d|ant] [--seeds 0 1 2]
        [--peer-seeds 0 1 2] [--steps 1000000] [--now 'sb3-*'] [--jobs 2]

Etude trains the recipe of that name, which runs on the batch engine. stable-baselines3 has the
settings that rl_zoo3 (2.9.2) lists for version 4 of the task; for the ant these are its defaults
with normalised observations and rewards. Each training has one core. Its last policies play the
same 10 episodes each with their most likely actions. Trainings are kept (`trainings.py`), so the
gate can be spread over several days: it passes only when all are complete. stable-baselines3 comes
with the `bench` extra: pip install 'etude[bench]'.

The returns must reach those of stable-baselines3 by the rule of `gates/lib/compare.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import etude
from gates.learn.trainings import (
    EvaluatesLast,
    Evaluations,
    Training,
    add_options,
    returns_of,
    sb3_callback,
)
from gates.lib.compare import compare_with_peer
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

TASKS = {
    "hopper": "Hopper-v5",
    "halfcheetah": "HalfCheetah-v5",
    "walker2d": "Walker2d-v5",
    "ant": "Ant-v5",
}
"""{recipe: Gymnasium's id}."""
WIDE = {"log_std_init": -2.0, "ortho_init": False, "net_arch": {"pi": [256, 256], "vf": [256, 256]}}
WIDE |= {"activation_fn": torch.nn.ReLU}
ZOO: dict[str, dict[str, Any]] = {
    "hopper": {
        **{"batch_size": 32, "n_steps": 512, "gamma": 0.999, "learning_rate": 9.80828e-05},
        **{"ent_coef": 0.00229519, "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99},
        **{"max_grad_norm": 0.7, "vf_coef": 0.835671, "policy_kwargs": WIDE},
    },
    "halfcheetah": {
        **{"batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05},
        **{"ent_coef": 0.000401762, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92},
        **{"max_grad_norm": 0.8, "vf_coef": 0.58096, "policy_kwargs": WIDE},
    },
    "walker2d": {
        **{"batch_size": 32, "n_steps": 512, "gamma": 0.99, "learning_rate": 5.05041e-05},
        **{"ent_coef": 0.000585045, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95},
        **{"max_grad_norm": 1.0, "vf_coef": 0.871923},
    },
    "ant": {},
}
"""Settings in rl_zoo3's ppo.yml for Hopper-v4, HalfCheetah-v4, Walker2d-v4 and Ant-v4; all have
normalised observations and rewards and one environment."""
SIDES = ("etude", "sb3")
SAVED_EVERY = 50_000
"""Steps between two saved models of stable-baselines3."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="hopper", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--peer-seeds", type=int, nargs="+", help="default: --seeds")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=10, help="of every evaluation")
    add_options(parser, "train_gymnasium")
    with tempfile.TemporaryDirectory() as scratch:
        # A rollout or two: only completion is judged, not learning.
        smallest = {"seeds": [0], "steps": 4_096, "episodes": 2}
        smallest |= {"folder": Path(scratch, "runs"), "kept": Path(scratch)}
        options = parse(parser, smallest, arguments)
        options.peer_seeds = options.peer_seeds or options.seeds
        needs = {"trainings": len(options.seeds) + len(options.peer_seeds)}
        with Gate("train_gymnasium", options, needs=needs, variant=options.task) as gate:
            report_load(gate)
            measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    """Train what is missing, and compare the returns."""
    task, steps = options.task, options.steps
    seeds = {"etude": options.seeds, "sb3": options.peer_seeds}
    trains = {"etude": train_etude, "sb3": train_sb3}
    wanted = {
        (side, seed): Training(
            f"{side}-ppo-{task}-{steps}-seed-{seed}",
            TASKS[task],
            options.episodes,
            steps,
            partial(trains[side], task, seed, steps),
        )
        for side in SIDES
        for seed in seeds[side]
    }
    found = returns_of(gate, [*wanted.values()], options)
    scores: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for (side, seed), training in wanted.items():
        if training.name in found:
            scores[side].append(found[training.name])
            gate.figure(f"return of {side}, seed {seed}", float(np.mean(scores[side][-1])))
    compare_with_peer(gate, "return", *scores.values(), peer="stable-baselines3")


def train_etude(task: str, seed: int, steps: int, folder: Path, evaluate: Evaluations) -> None:
    """Train the recipe on one thread; resume an interrupted run."""
    callbacks = [EvaluatesLast(evaluate)]
    if folder.exists():
        etude.resume(folder, callbacks=callbacks)
    else:
        recipe = etude.recipes.find(task).replace(
            seed=seed,
            clock__total_timesteps=steps,
            collector__threads=1,
            evaluation__final_episodes=0,
        )
        etude.train(recipe, folder, callbacks=callbacks)


def train_sb3(task: str, seed: int, steps: int, folder: Path, evaluate: Evaluations) -> None:
    """Train as `python -m rl_zoo3.train --algo ppo` does; resume from the last saved model."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings = ZOO[task]
    raw = make_vec_env(TASKS[task], n_envs=1, seed=seed)
    saved = max((int(path.stem.split("_")[1]) for path in folder.glob("model_*.zip")), default=0)
    if saved:
        env = VecNormalize.load(str(folder / f"model_vecnormalize_{saved}_steps.pkl"), raw)
        model = PPO.load(folder / f"model_{saved}_steps", env, device="cpu")
    else:
        env = VecNormalize(raw, gamma=settings.get("gamma", 0.99))
        model = PPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
    saving = CheckpointCallback(SAVED_EVERY, str(folder), "model", save_vecnormalize=True)

    def act(obs: Any) -> Any:
        return model.predict(env.normalize_obs(obs), deterministic=True)[0]

    callbacks = [saving, sb3_callback(evaluate, act)]
    model.learn(steps - saved, callback=callbacks, reset_num_timesteps=not saved)


if __name__ == "__main__":
    sys.exit(main())
