"""SAC and TD3 beside stable-baselines3's: returns after the same steps of the same environment.

    python -m gates.learn.peer_off_policy [--env HalfCheetah-v5] [--steps 30000] [--seeds 3]
        [--peer-seeds 3] [--methods sac td3] [--warmup 1000] [--jobs 2]

Both sides have the recipes' settings: two layers of 256, batches of 256, learning rate 3e-4, steps
of random actions (`--warmup`) and then a gradient step for every step. With a warm-up of 10,000
steps these are also what the package rl_zoo3 (2.9.2) lists for SAC on Gymnasium's walkers. Etude
collects 100 steps and then learns 100 times; stable-baselines3, as it does by default, takes turns
after every step. The last policies of a training play the same 10 episodes each with their most
likely actions. Trainings are kept (`trainings.py`). Needs the `bench` extra: pip install
'etude[bench]'.

The returns must reach those of stable-baselines3 by the rule of `gates/lib/compare.py`. Three
quarters of an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import etude
from etude.core.clock import ClockConfig
from etude.rl.off_policy import OffPolicyConfig
from gates.learn.trainings import (
    EvaluatesLast,
    Evaluations,
    Training,
    add_options,
    returns_of,
    sb3_callback,
)
from gates.lib.compare import compare_with_peer
from gates.lib.report import Gate, parse

SIDES = ("etude", "sb3")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peer-seeds", type=int, help="default: --seeds")
    parser.add_argument("--methods", nargs="+", default=["sac", "td3"])
    parser.add_argument("--episodes", type=int, default=10, help="of every evaluation")
    parser.add_argument("--warmup", type=int, default=1_000, help="steps of random actions")
    add_options(parser, "peer_off_policy")
    # Hardly past the warm-up: only completion is judged, not learning.
    smallest = {"env": "Pendulum-v1", "steps": 1_100, "methods": ["sac"], "episodes": 2, "seeds": 1}
    with tempfile.TemporaryDirectory() as scratch:
        smallest |= {"folder": Path(scratch, "runs"), "kept": Path(scratch)}
        options = parse(parser, smallest, arguments)
        options.peer_seeds = options.peer_seeds or options.seeds
        needs = {"trainings": len(options.methods) * (options.seeds + options.peer_seeds)}
        with Gate("peer_off_policy", options, needs=needs, variant=options.env) as gate:
            measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    """Train what is missing, and compare the returns."""
    sizes = (options.env, options.steps, options.warmup)
    trains = {"etude": train_etude, "sb3": train_sb3}
    seeds = {"etude": options.seeds, "sb3": options.peer_seeds}
    wanted = {
        (side, method, seed): Training(
            f"{side}-{method}-{'-'.join(map(str, sizes))}-seed-{seed}",
            options.env,
            options.episodes,
            options.steps,
            partial(trains[side], method, seed, *sizes),
        )
        for method in options.methods
        for side in SIDES
        for seed in range(seeds[side])
    }
    found = returns_of(gate, [*wanted.values()], options)
    scores: dict[tuple[str, str], list[list[float]]] = {}
    for (side, method, seed), training in wanted.items():
        if training.name in found:
            scores.setdefault((side, method), []).append(found[training.name])
            mean = float(np.mean(found[training.name]))
            gate.figure(f"return of {side} {method}, seed {seed}", mean)
    for method in options.methods:
        sides = (scores.get((side, method), []) for side in SIDES)
        compare_with_peer(gate, method, *sides, peer="stable-baselines3")


def train_etude(
    method: str, seed: int, env: str, steps: int, warmup: int, folder: Path, evaluate: Evaluations
) -> None:
    """Train the recipe of that name on this task for these steps; resume an interrupted run."""
    recipe = etude.recipes.sac() if method == "sac" else etude.recipes.td3()
    assert isinstance(recipe.algorithm, OffPolicyConfig)
    recipe = recipe.replace(
        seed=seed,
        env__id=env,
        clock=ClockConfig(total_timesteps=steps, cycles=5, iterations=10),
        algorithm__warmup_steps=warmup,
        evaluation__every="1000 epochs",
        evaluation__episodes=1,
        evaluation__num_envs=1,
        evaluation__envs_per_group=1,
    )
    callbacks = [EvaluatesLast(evaluate)]
    if folder.exists():
        etude.resume(folder, callbacks=callbacks)
    else:
        etude.train(recipe, folder, callbacks=callbacks)


def train_sb3(
    method: str, seed: int, name: str, steps: int, warmup: int, folder: Path, evaluate: Evaluations
) -> None:
    """Train stable-baselines3 with the same sizes."""
    from stable_baselines3 import SAC, TD3

    shared: dict[str, Any] = {
        "learning_rate": 3e-4,
        "learning_starts": warmup,
        "batch_size": 256,
        "gamma": 0.99,
        "tau": 0.005,
        "policy_kwargs": {"net_arch": [256, 256]},
        "seed": seed,
        "device": "cpu",
    }
    env = gymnasium.make(name)
    if method == "sac":
        model: Any = SAC("MlpPolicy", env, **shared)
    else:
        from stable_baselines3.common.noise import NormalActionNoise

        dims = env.action_space.shape[0]
        noise = NormalActionNoise(np.zeros(dims), np.full(dims, 0.1))
        model = TD3("MlpPolicy", env, action_noise=noise, **shared)

    def act(obs: Any) -> Any:
        return model.predict(obs, deterministic=True)[0]

    model.learn(steps, callback=sb3_callback(evaluate, act))


if __name__ == "__main__":
    sys.exit(main())
