"""Etude's `pick-place` beside stable-baselines3's PPO on the same task and the same cores.

    python -m gates.speed.peer_pick_place [--rounds 5] [--full] [--steps 200000] [--seeds 3]

stable-baselines3 has the reference script's settings: one environment (Etude's task through its
Gymnasium wrapper), VecNormalize, 2,048 steps a rollout, minibatch 64, 10 epochs, 64-64 tanh. It
needs the `bench` extra: pip install 'etude[bench]'.

Speed: both train in turns, a few thousand steps each, every side in its own process, which sleeps
during the turns of the other. Both have the same network and use every step 10 times: Etude's
recipe gets update_epochs 10 with its own rows and minibatch of 256, and is also timed with a
minibatch of 64. Times are from the start of one rollout to that of another: collecting, learning,
and Etude's logs and checkpoints. stable-baselines3 is timed with one torch thread and with torch's
default; the faster one is compared. Its speed with 8 environments, without the time in the
environment, and per processor second, which other work disturbs less, is printed too.

--full: also trains both for --steps steps in ten turns each, with the unchanged recipe and --seeds
seeds. After every turn both play the same 100 fresh episodes with most likely actions and frozen
statistics of observations, which is not timed.

The ratio of steps/s, the median of the rounds, must reach 8, and the success after the last three
turns that of stable-baselines3 by the rule of `gates/lib/compare.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import etude
from etude.core.contracts import Array, Fragment
from etude.core.keys import Key
from etude.evaluate.acting import LoadedPolicy
from etude.gym import AsGymnasium
from etude.planning.recipes import Recipe
from etude.training.loop import Callback, Context
from gates.lib.compare import compare_with_peer
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GOAL = 8.0
EPOCHS = 10
ROLLOUT = 2048
EPISODES = 100
TURNS, LAST = 10, 3
"""Turns of --full, and those whose success is compared."""
ENDLESS = 1_000_000_000
PATIENCE = 1800.0
"""Longest turn of one side in seconds."""
Act = Callable[[Array], Array]
"""A policy: raw observations [rows, n] to actions [rows, m] of the environment."""


class Spent(NamedTuple):
    """A turn: steps, wall-clock and processor seconds, and wall-clock seconds in environments."""

    total: int
    steps: int
    seconds: float
    processor: float
    environment: float = 0.0
    physics: float = 0.0


def success_rate(act: Act) -> float:
    """The success rate of 100 fresh episodes with the most likely actions."""
    env = etude.recipes.pick_place().env.make(EPISODES, os.cpu_count() or 1)
    obs = env.reset(Key(0).child("peer", "test"))
    waiting, good = np.ones(EPISODES, np.bool_), 0.0
    while waiting.any():
        result = env.step(act(obs["state"]))
        first = waiting[result.final_envs]
        if first.any():
            good += float(result.episodes["is_success"][first].sum())
        waiting[result.final_envs] = False
        obs = result.obs
    env.close()
    return good / EPISODES


class Turns:
    """A side's end of the pipe: receives orders to train or test, and answers them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._target: int | None = None
        self._steps, self._start, self._processor = 0, 0.0, 0.0

    def boundary(self, steps: int, act: Act, last: bool = False, **seconds: float) -> None:
        """Called between two iterations: wait if the turn of this side is over."""
        if self._target is not None:
            if steps < self._target and not last:
                return
            wall = time.perf_counter() - self._start
            processor = time.process_time() - self._processor
            self._pipe.send(Spent(steps, steps - self._steps, wall, processor, **seconds))
        while True:
            command = self._pipe.recv()
            if command is None:
                raise SystemExit
            if command == "test":
                self._pipe.send(success_rate(act))
            elif last or command <= steps:  # A short run has reached this already.
                self._pipe.send(Spent(steps, 0, 0.0, 0.0))
            else:
                break
        self._target, self._steps = command, steps
        self._start, self._processor = time.perf_counter(), time.process_time()


class TakesTurns(Callback):
    """A callback that stops Etude's run between iterations."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def run_start(self, context: Context) -> None:
        self._stop(context)

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self._stop(context)

    def _stop(self, context: Context) -> None:
        clock = context.clock
        act = LoadedPolicy(context.algorithm.policy).act
        self._turns.boundary(clock.now.timesteps, act, clock.finished)


def run_etude(pipe: Connection, recipe: Recipe) -> None:
    """Train Etude's recipe in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        etude.train(
            recipe, Path(scratch) / "run", callbacks=[TakesTurns(Turns(pipe))], console=False
        )


class TimedEnv(AsGymnasium):
    """An environment that adds up the seconds of its steps."""

    environment = physics = 0.0

    def step(self, action: Any) -> Any:
        start = time.perf_counter()
        result = super().step(action)
        self.environment += time.perf_counter() - start
        self.physics += self.batch.physics_seconds
        return result

    def read(self) -> Array:
        seconds, self.environment, self.physics = (self.environment, self.physics), 0.0, 0.0
        return np.array(seconds)


def run_sb3(
    pipe: Connection, num_envs: int, threads: int | None, seed: int, rollout: int = ROLLOUT
) -> None:
    """Train stable-baselines3's PPO in turns, with the reference script's settings."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    if threads is not None:
        torch.set_num_threads(threads)
    config, turns = etude.recipes.pick_place_original().env, Turns(pipe)
    envs = [TimedEnv(config, ("state",)) for _ in range(num_envs)]
    rows = VecNormalize(DummyVecEnv([lambda env=env: env for env in envs]), gamma=0.99)
    model = PPO(
        "MlpPolicy",
        rows,
        learning_rate=3e-4,
        n_steps=rollout // num_envs,
        batch_size=64,
        n_epochs=EPOCHS,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "ortho_init": True,
        },
        seed=seed,
        device="cpu",
    )

    def act(obs: Array) -> Array:
        actions: Array = model.predict(rows.normalize_obs(obs), deterministic=True)[0]
        return actions

    class Boundary(BaseCallback):
        def _on_rollout_start(self) -> None:
            environment, physics = sum(env.read() for env in envs)
            turns.boundary(self.num_timesteps, act, environment=environment, physics=physics)

        def _on_step(self) -> bool:
            return True

    model.learn(ENDLESS, callback=Boundary())


@dataclass
class Side:
    """The process of one side, which trains in its turns."""

    name: str
    steps: int
    """Steps of a round."""
    pipe: Connection
    process: Any
    total: int = 0

    @classmethod
    def start(cls, name: str, steps: int, target: Callable[..., None], *arguments: Any) -> Side:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        return cls(name, steps, here, process)

    def train_to(self, target: int) -> Spent:
        self.pipe.send(target)
        spent: Spent = self._answer()
        self.total = spent.total
        return spent

    def test(self) -> float:
        self.pipe.send("test")
        return float(self._answer())

    def _answer(self) -> Any:
        """Receive an answer; raises `EOFError` if the side has died."""
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(f"{self.name}: no answer within {PATIENCE:g} s")
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def same_work(recipe: Recipe, minibatch: int) -> Recipe:
    """Etude's recipe with 10 update epochs, long enough for all turns."""
    return recipe.replace(
        algorithm__update_epochs=EPOCHS,
        algorithm__minibatch_size=minibatch,
        clock__total_timesteps=ENDLESS,
    )


def describe(turns: list[Spent]) -> str:
    """Print the medians of the rounds of a side."""

    def median(measure: Callable[[Spent], float]) -> float:
        return statistics.median(measure(turn) for turn in turns)

    wall, processor = median(lambda t: t.steps / t.seconds), median(lambda t: t.steps / t.processor)
    text = f"{wall:8,.0f} steps/s, {processor:8,.0f} per processor second"
    if any(turn.environment for turn in turns):
        inside = median(lambda t: t.environment / t.seconds)
        physics = median(lambda t: t.physics / t.seconds)
        bare = median(lambda t: t.steps / (t.seconds - t.environment + t.physics))
        text += (
            f"; {inside:.0%} of the time in the environment, {physics:.0%} in its physics; "
            f"{bare:,.0f} steps/s if the environment were nothing but physics"
        )
    return text


def compare_speed(recipe: Recipe, options: argparse.Namespace) -> list[float]:
    """Etude's steps per second over those of stable-baselines3, for each round."""
    own, rounds, steps = recipe.algorithm.minibatch_size, options.rounds, options.turn
    sb3 = {"seed": options.seed, "rollout": steps}
    ours = Side.start(f"etude, minibatch {own}", 4 * steps, run_etude, same_work(recipe, own))
    rivals = [
        Side.start("sb3, 1 env, 1 torch thread", steps, run_sb3, 1, 1, *sb3.values()),
        Side.start("sb3, 1 env, torch's threads", steps, run_sb3, 1, None, *sb3.values()),
    ]
    others = [
        Side.start("sb3, 8 envs, 1 torch thread", steps, run_sb3, 8, 1, *sb3.values()),
        Side.start("etude, minibatch 64", 4 * steps, run_etude, same_work(recipe, 64)),
    ]
    sides = [ours, *rivals, *others]
    spent: dict[str, list[Spent]] = {side.name: [] for side in sides}
    for index in range(rounds + 1):
        for side in sides:
            turn = side.train_to(side.total + side.steps)
            if index:  # The first round is a warm-up.
                spent[side.name].append(turn)
        if index:
            shown = "  ".join(f"{n}: {t[-1].steps / t[-1].seconds:,.0f}" for n, t in spent.items())
            print(f"round {index}, steps/s:  {shown}", flush=True)
    for side in sides:
        side.end()
    speeds = {name: [t.steps / t.seconds for t in turns] for name, turns in spent.items()}
    for name, turns in spent.items():
        print(f"{name:28s} {describe(turns)}")
    best = max(rivals, key=lambda side: statistics.median(speeds[side.name]))
    ratios = {
        side.name: [a / b for a, b in zip(speeds[side.name], speeds[best.name], strict=True)]
        for side in (ours, others[1])
    }
    for name, values in ratios.items():
        print(
            f"{name} / {best.name}: {statistics.median(values):.2f} "
            f"({min(values):.2f} to {max(values):.2f})"
        )
    return ratios[ours.name]


def compare_learning(recipe: Recipe, steps: int, seed: int) -> dict[str, list[float]]:
    """Print success and seconds after every tenth of the steps; return the success after each."""
    recipe = recipe.replace(seed=seed, clock__total_timesteps=steps)
    sides = [
        Side.start("etude", 0, run_etude, recipe),
        Side.start("sb3", 0, run_sb3, 1, 1, seed),
    ]
    seconds = dict.fromkeys(["etude", "sb3"], 0.0)
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(1, TURNS + 1):
        for side in sides:
            seconds[side.name] += side.train_to(steps * turn // TURNS).seconds
            found[side.name].append(side.test())
            print(
                f"{side.name:6s} {side.total:9,} steps  {seconds[side.name]:7.1f} s of training  "
                f"{found[side.name][-1]:6.1%} of {EPISODES} fresh episodes",
                flush=True,
            )
    for side in sides:
        side.end()
        print(
            f"{side.name}: {found[side.name][-1]:.1%} success at {side.total:,} steps after "
            f"{seconds[side.name]:.1f} s ({side.total / seconds[side.name]:,.0f} steps/s)"
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the speed part")
    parser.add_argument(
        "--turn", type=int, default=ROLLOUT, help="steps of sb3's rollouts; 4 of us"
    )
    parser.add_argument("--full", action="store_true", help="also train both to the end")
    parser.add_argument("--steps", type=int, default=200_000, help="how far --full trains")
    parser.add_argument("--seeds", type=int, default=3, help="of --full")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    options = parse(parser, {"rounds": 1, "turn": 256}, arguments)
    with Gate("peer_pick_place", options, needs={"rounds": options.rounds}) as gate:
        import stable_baselines3

        print(f"stable-baselines3 {stable_baselines3.__version__}")
        report_load(gate)
        recipe = etude.recipes.pick_place()
        # This gate tests both; tests are not timed.
        recipe = recipe.replace(seed=options.seed, evaluation__every="never")
        if options.full:
            seeds = range(options.seed, options.seed + options.seeds)
            each = [compare_learning(recipe, options.steps, seed) for seed in seeds]
            ours, theirs = ([found[side][-LAST:] for found in each] for side in ("etude", "sb3"))
            compare_with_peer(gate, "success", ours, theirs, peer="stable-baselines3", unit=1.0)
        ratios = compare_speed(recipe, options)
        report_load(gate)
        gate.count("rounds", len(ratios))
        times = statistics.median(ratios)
        gate.figure("steps/s over stable-baselines3", times, at_least=GOAL, timing=True)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
