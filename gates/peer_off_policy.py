"""SAC and TD3 beside stable-baselines3's: returns after the same steps of the same environment.

    python gates/peer_off_policy.py [--env HalfCheetah-v5] [--steps 30000] [--seeds 2]
        [--peer-seeds 2] [--methods sac td3] [--warmup 1000] [--jobs 2]

Both sides have the recipes' settings: two layers of 256, batches of 256, learning rate 3e-4, steps
of random actions (`--warmup`) and then a gradient step for every step. With a warm-up of 10,000
steps these are also what the package rl_zoo3 (2.9.2) lists for SAC on Gymnasium's walkers. Etude
collects 100 steps and then learns 100 times; stable-baselines3, as it does by default, takes turns
after every step. Each trained policy plays the same 20 episodes with its most likely actions.
Trainings are kept (gates/trainings.py). Needs the `bench` extra: pip install 'etude[bench]'.

A method's returns are within the other's spread when the difference of the two means over seeds is
at most twice the deviation of such a difference, the seeds of both sides together telling how much
seeds differ. Few seeds leave that wide: the figures are printed to be looked at. No method's
returns may be below that spread. Half an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import etude
from etude.algorithms.replay import OffPolicyConfig
from etude.core.clock import ClockConfig
from report import Gate, parse
from trainings import Act, Training, add_options, returns_of

SIDES = ("etude", "sb3")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--peer-seeds", type=int, help="default: --seeds")
    parser.add_argument("--methods", nargs="+", default=["sac", "td3"])
    parser.add_argument("--episodes", type=int, default=20, help="of every trained policy")
    parser.add_argument("--warmup", type=int, default=1_000, help="steps of random actions")
    add_options(parser, "peer_off_policy")
    parser.add_argument("--below", type=float, default=2.0, help="deviations, at most")
    # Hardly past the warm-up: both sides must complete and be played, whatever they have learned.
    smallest = {"env": "Pendulum-v1", "steps": 1_100, "methods": ["sac"], "episodes": 2}
    with tempfile.TemporaryDirectory() as scratch:
        smallest |= {"folder": Path(scratch, "runs"), "kept": Path(scratch), "below": math.inf}
        options = parse(parser, smallest, arguments)
        options.peer_seeds = options.peer_seeds or options.seeds
        needs = {"trainings": len(options.methods) * (options.seeds + options.peer_seeds)}
        with Gate("peer_off_policy", options, needs=needs, variant=options.env) as gate:
            measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    """Train what is missing, and compare what is there."""
    sizes = (options.env, options.steps, options.warmup)
    trains = {"etude": train_etude, "sb3": train_sb3}
    seeds = {"etude": options.seeds, "sb3": options.peer_seeds}
    wanted = {
        (side, method, seed): Training(
            f"{side}-{method}-{'-'.join(map(str, sizes))}-seed-{seed}",
            options.env,
            options.episodes,
            partial(trains[side], method, seed, *sizes),
        )
        for method in options.methods
        for side in SIDES
        for seed in range(seeds[side])
    }
    found = returns_of(gate, [*wanted.values()], options)
    means: dict[tuple[str, str], list[float]] = {}
    for (side, method, seed), training in wanted.items():
        if training.name in found:
            mean = float(np.mean(found[training.name]))
            means.setdefault((side, method), []).append(mean)
            gate.figure(f"return of {side} {method}, seed {seed}", mean)
    if max(seeds.values()) < 2:
        gate.fail("one seed of each side says nothing about chance")
        return
    for method in options.methods:
        if all((side, method) in means for side in SIDES):
            above = compare(method, *(np.array(means[side, method]) for side in SIDES))
            name = f"{method} over stable-baselines3 in deviations"
            gate.figure(name, above, at_least=-options.below)


def compare(method: str, *sides: np.ndarray) -> float:
    """By how many deviations of such a difference the means over seeds of ours, [n], are above the
    other's, [m]."""
    ours, theirs = (means.mean() for means in sides)
    freedom = sum(len(means) - 1 for means in sides)
    spread = np.sqrt(sum(((m - m.mean()) ** 2).sum() for m in sides) / max(freedom, 1))
    deviation = spread * np.sqrt(sum(1 / len(means) for means in sides))
    print(
        f"{method}: etude {ours:.1f}, stable-baselines3 {theirs:.1f}, difference "
        f"{ours - theirs:+.1f}, of which chance {deviation:.1f}"
    )
    return float((ours - theirs) / deviation) if deviation else math.nan


def train_etude(method: str, seed: int, env: str, steps: int, warmup: int, folder: Path) -> Act:
    """The recipe of that name, as it is but for the task and its length; an interrupted run goes
    on."""
    recipe = etude.recipes.sac() if method == "sac" else etude.recipes.td3()
    assert isinstance(recipe.algorithm, OffPolicyConfig)
    recipe = recipe.model_copy(
        update={
            "seed": seed,
            "env": recipe.env.model_copy(update={"id": env}),
            "clock": ClockConfig(total_timesteps=steps, cycles=5, iterations=10),
            "algorithm": recipe.algorithm.model_copy(update={"warmup_steps": warmup}),
            "evaluation": recipe.evaluation.model_copy(
                update={"every": "1000 epochs", "episodes": 1, "num_envs": 1, "envs_per_group": 1}
            ),
        }
    )
    run = etude.resume(folder) if folder.exists() else etude.train(recipe, folder)
    policy = run.policy("latest")
    return lambda obs: policy.act(np.asarray(obs, np.float32)[None])[0]


def train_sb3(method: str, seed: int, name: str, steps: int, warmup: int, folder: Path) -> Act:
    """stable-baselines3 with the same sizes."""
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

        dims = env.action_space.shape[0]  # type: ignore[index]
        noise = NormalActionNoise(np.zeros(dims), np.full(dims, 0.1))
        model = TD3("MlpPolicy", env, action_noise=noise, **shared)
    model.learn(steps)
    return lambda obs: model.predict(obs, deterministic=True)[0]


if __name__ == "__main__":
    sys.exit(main())
