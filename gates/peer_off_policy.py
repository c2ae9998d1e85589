"""SAC and TD3 beside stable-baselines3's: returns after the same steps of the same environment.

    python gates/peer_off_policy.py [--env HalfCheetah-v5] [--steps 30000] [--seeds 2] [--jobs 2]
        [--methods sac td3] [--warmup 1000] [--folder runs/peer_off_policy]

Both sides have the recipes' settings: two layers of 256, batches of 256, learning rate 3e-4, steps
of random actions (`--warmup`) and then a gradient step for every step. With a warm-up of 10,000
steps these are also what the package rl_zoo3 (2.9.2) lists for SAC on Gymnasium's walkers. Etude
collects 100 steps and then learns 100 times; stable-baselines3, as it does by default, takes turns
after every step. Each trained policy plays the same 20 episodes with its most likely actions. Every
training's result is kept in the folder, and a training whose result is there is not made again.
Needs the `bench` extra: pip install 'etude[bench]'.

A method's returns are within the other's spread when the difference of the two means over seeds is
at most twice the deviation of such a difference, the seeds of both sides together telling how much
seeds differ. Few seeds leave that wide: the figures are printed to be looked at. No method's
returns may be below that spread. Half an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

import etude
from etude.algorithms.replay import OffPolicyConfig
from etude.core.clock import ClockConfig
from report import Gate, parse

Act = Callable[[Any], Any]
"""One observation [n] to one action [m]."""


class Job(NamedTuple):
    side: str
    method: str
    seed: int
    env: str
    steps: int
    episodes: int
    warmup: int
    folder: Path

    @property
    def name(self) -> str:
        sizes = f"{self.steps}-{self.warmup}-{self.episodes}"
        return f"{self.side}-{self.method}-{self.env}-{sizes}-{self.seed}"

    @property
    def path(self) -> Path:
        """Of its result."""
        return self.folder / f"{self.name}.json"


class Result(NamedTuple):
    returns: list[float]
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=["sac", "td3"])
    parser.add_argument("--episodes", type=int, default=20, help="of every trained policy")
    parser.add_argument("--warmup", type=int, default=1_000, help="steps of random actions")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--folder", type=Path, default=Path("runs/peer_off_policy"))
    parser.add_argument("--below", type=float, default=2.0, help="deviations, at most")
    # Hardly past the warm-up: both sides must complete and be played, whatever they have learned.
    smallest = {"env": "Pendulum-v1", "steps": 1_100, "methods": ["sac"], "episodes": 2}
    with tempfile.TemporaryDirectory() as scratch:
        smallest |= {"folder": Path(scratch), "below": math.inf}
        options = parse(parser, smallest, arguments)
        options.folder.mkdir(parents=True, exist_ok=True)
        sizes = (options.steps, options.episodes, options.warmup)
        jobs = [
            Job(side, method, seed, options.env, *sizes, options.folder)
            for method in options.methods
            for seed in range(options.seeds)
            for side in ("etude", "sb3")
        ]
        needs = {"trainings": len(jobs)}
        with Gate("peer_off_policy", options, needs=needs, variant=options.env) as gate:
            found = measure(gate, jobs, options.jobs)
            for method in options.methods:
                name = f"{method} over stable-baselines3 in deviations"
                gate.figure(name, compare(method, found), at_least=-options.below)
    return gate.code


def measure(gate: Gate, jobs: list[Job], many: int) -> dict[Job, Result]:
    """Train what is missing, and read what is there."""
    missing = [job for job in jobs if not job.path.exists()]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(many, fresh, max_tasks_per_child=1) as pool:
        for name in pool.map(run, missing, timeout=gate.seconds_left):
            print(f"{name}: trained", flush=True)
    found: dict[Job, Result] = {}
    for job in jobs:
        found[job] = result = Result(**json.loads(job.path.read_text()))
        gate.count("trainings")
        name = f"return of {job.side} {job.method}, seed {job.seed}"
        gate.figure(name, float(np.mean(result.returns)))
        print(
            f"{job.side:5} {job.method} seed {job.seed}: {np.mean(result.returns):8.1f} ± "
            f"{np.std(result.returns):.1f} over {len(result.returns)} episodes, "
            f"{result.seconds:.0f} s",
            flush=True,
        )
    return found


def compare(method: str, found: dict[Job, Result]) -> float:
    """By how many deviations of such a difference a method's returns are above its rival's."""
    sides = [
        np.array([np.mean(r.returns) for job, r in found.items() if job[:2] == (side, method)])
        for side in ("etude", "sb3")
    ]
    ours, theirs = (means.mean() for means in sides)
    freedom = sum(len(means) - 1 for means in sides)
    spread = np.sqrt(sum(((m - m.mean()) ** 2).sum() for m in sides) / max(freedom, 1))
    deviation = spread * np.sqrt(sum(1 / len(means) for means in sides))
    print(
        f"{method}: etude {ours:.1f}, stable-baselines3 {theirs:.1f}, difference "
        f"{ours - theirs:+.1f}, of which chance {deviation:.1f}"
    )
    return float((ours - theirs) / deviation) if deviation else math.nan


def run(job: Job) -> str:
    """Train and play, on one thread, and keep the result."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    act = (train_etude if job.side == "etude" else train_sb3)(job)
    result = Result(play(job.env, act, job.episodes), time.perf_counter() - start)
    job.path.write_text(json.dumps(result._asdict()) + "\n")
    return job.name


def play(name: str, act: Act, episodes: int) -> list[float]:
    """Returns of the same episodes for every policy."""
    env, returns = gymnasium.make(name), []
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + episode)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def train_etude(job: Job) -> Act:
    """The recipe of that name, as it is but for the task and its length; an interrupted run goes
    on."""
    recipe = etude.recipes.sac() if job.method == "sac" else etude.recipes.td3()
    assert isinstance(recipe.algorithm, OffPolicyConfig)
    recipe = recipe.model_copy(
        update={
            "seed": job.seed,
            "env": recipe.env.model_copy(update={"id": job.env}),
            "clock": ClockConfig(total_timesteps=job.steps, cycles=5, iterations=10),
            "algorithm": recipe.algorithm.model_copy(update={"warmup_steps": job.warmup}),
            "evaluation": recipe.evaluation.model_copy(
                update={"every": "1000 epochs", "episodes": 1, "num_envs": 1, "envs_per_group": 1}
            ),
        }
    )
    folder = job.folder / job.name
    run = etude.resume(folder) if folder.exists() else etude.train(recipe, folder)
    policy = run.policy()
    return lambda obs: policy.act(np.asarray(obs, np.float32)[None])[0]


def train_sb3(job: Job) -> Act:
    """stable-baselines3 with the same sizes."""
    from stable_baselines3 import SAC, TD3

    shared: dict[str, Any] = {
        "learning_rate": 3e-4,
        "learning_starts": job.warmup,
        "batch_size": 256,
        "gamma": 0.99,
        "tau": 0.005,
        "policy_kwargs": {"net_arch": [256, 256]},
        "seed": job.seed,
        "device": "cpu",
    }
    env = gymnasium.make(job.env)
    if job.method == "sac":
        model: Any = SAC("MlpPolicy", env, **shared)
    else:
        from stable_baselines3.common.noise import NormalActionNoise

        dims = env.action_space.shape[0]  # type: ignore[index]
        noise = NormalActionNoise(np.zeros(dims), np.full(dims, 0.1))
        model = TD3("MlpPolicy", env, action_noise=noise, **shared)
    model.learn(job.steps)
    return lambda obs: model.predict(obs, deterministic=True)[0]


if __name__ == "__main__":
    sys.exit(main())
