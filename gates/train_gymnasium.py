"""Gymnasium's MuJoCo tasks by PPO, beside stable-baselines3's PPO with the settings of rl_zoo3.

    python gates/train_gymnasium.py [--task hopper|halfcheetah|walker2d|ant] [--seeds 0 1 2]
        [--peer-seeds 0 1 2] [--steps 1000000] [--sides etude sb3] [--jobs 2]
        [--folder runs/train_gymnasium]

Etude trains the recipe of that name, which runs on the batch engine. stable-baselines3 has what
the package rl_zoo3 (2.9.2) lists for the same task of the version before; for the ant that is
stable-baselines3's own defaults with normalised observations and rewards. Each training has one
core. The policies after the last step play the same 50 episodes with their most likely actions.
Every training's result is kept in the folder, and a training whose result is there is not made
again, so the gate can be spread over several days: it ends well only when all of them are there.
stable-baselines3 needs the `bench` extra: pip install 'etude[bench]'.

The mean return over seeds must reach that of stable-baselines3.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import etude
from machine import report_load
from peer_off_policy import Act, play
from report import Gate, parse

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
"""Of rl_zoo3's ppo.yml, for Hopper-v4, HalfCheetah-v4, Walker2d-v4 and Ant-v4; all are normalised
and have one environment."""
SIDES = ("etude", "sb3")
SAVED_EVERY = 50_000
"""Steps between two models that stable-baselines3 saves."""


class Job(NamedTuple):
    side: str
    task: str
    seed: int
    steps: int
    episodes: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.side}-{self.task}-{self.seed}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="hopper", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--peer-seeds", type=int, nargs="+", help="default: --seeds")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES, help="to train now")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=50, help="of every trained policy")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--folder", type=Path, default=Path("runs/train_gymnasium"))
    parser.add_argument("--ratio", type=float, default=1.0, help="of the returns, at least")
    with tempfile.TemporaryDirectory() as scratch:
        # A rollout or two: both sides must complete and be played, whatever they have learned.
        smallest = {"seeds": [0], "steps": 4_096, "episodes": 2}
        smallest |= {"folder": Path(scratch), "ratio": -float("inf")}
        options = parse(parser, smallest, arguments)
        options.peer_seeds = options.peer_seeds or options.seeds
        needs = {"trainings": len(options.seeds) + len(options.peer_seeds)}
        with Gate("train_gymnasium", options, needs=needs, variant=options.task) as gate:
            report_load(gate)
            measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    """Train what is missing, and compare what is there."""
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = {"etude": options.seeds, "sb3": options.peer_seeds}
    wanted = [
        Job(side, options.task, seed, options.steps, options.episodes, options.folder)
        for side in SIDES
        for seed in seeds[side]
    ]
    now = [job for job in wanted if job.side in options.sides and read(job) is None]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, fresh, max_tasks_per_child=1) as pool:
        for name, result in pool.map(train, now, timeout=gate.seconds_left):
            mean = np.mean(result["returns"])
            print(f"{name}: return {mean:.0f}, {result['seconds']:.0f} s", flush=True)
    means: dict[str, list[float]] = {side: [] for side in SIDES}
    for job in wanted:
        if (kept := read(job)) is not None:
            means[job.side].append(float(np.mean(kept["returns"])))
            gate.count("trainings")
            gate.figure(f"return of {job.side}, seed {job.seed}", means[job.side][-1])
    if all(means.values()):
        ours, theirs = (float(np.mean(means[side])) for side in SIDES)
        gate.figure("return over sb3's", ours / theirs, at_least=options.ratio)


def read(job: Job) -> dict[str, Any] | None:
    """What a training has left, if it was of as many steps."""
    path = job.folder / f"{job.name}.json"
    result: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return result if result and result["steps"] == job.steps else None


def train(job: Job) -> tuple[str, dict[str, Any]]:
    """Train and play, on one thread, and keep the result."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    act = (train_etude if job.side == "etude" else train_sb3)(job)
    seconds = time.perf_counter() - begin
    returns = play(TASKS[job.task], act, job.episodes)
    result = {"steps": job.steps, "seconds": seconds, "returns": returns}
    (job.folder / f"{job.name}.json").write_text(json.dumps(result) + "\n")
    return job.name, result


def train_etude(job: Job) -> Act:
    """The recipe as it is; a run that was interrupted goes on."""
    folder = job.folder / f"{job.name}-{job.steps}"
    if folder.exists():
        run = etude.resume(folder)
    else:
        recipe = etude.recipes.find(job.task).replace(
            seed=job.seed,
            clock__total_timesteps=job.steps,
            collector__threads=1,
            evaluation__final_episodes=0,
        )
        run = etude.train(recipe, folder)
    policy = run.policy("latest")
    return lambda obs: policy.act(np.asarray(obs, np.float32)[None])[0]


def train_sb3(job: Job) -> Act:
    """As `python -m rl_zoo3.train --algo ppo` does; one that was interrupted goes on from what its
    callback saved last."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings, folder = dict(ZOO[job.task]), job.folder / f"{job.name}-{job.steps}"
    raw = make_vec_env(TASKS[job.task], n_envs=1, seed=job.seed)
    saved = max((int(path.stem.split("_")[1]) for path in folder.glob("model_*.zip")), default=0)
    if saved:
        env = VecNormalize.load(str(folder / f"model_vecnormalize_{saved}_steps.pkl"), raw)
        model = PPO.load(folder / f"model_{saved}_steps", env, device="cpu")
    else:
        env = VecNormalize(raw, gamma=settings.get("gamma", 0.99))
        model = PPO("MlpPolicy", env, seed=job.seed, device="cpu", **settings)
    saving = CheckpointCallback(SAVED_EVERY, str(folder), "model", save_vecnormalize=True)
    model.learn(job.steps - saved, callback=saving, reset_num_timesteps=not saved)
    env.training = False
    return lambda obs: model.predict(env.normalize_obs(obs), deterministic=True)[0]


if __name__ == "__main__":
    sys.exit(main())
