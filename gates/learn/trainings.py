"""Trainings of two libraries, and the returns of their last policies.

A training is evaluated `LAST` times in its last fifth, each time in the same episodes. The returns
are kept as a small JSON in gates/results/trainings and used again: a comparison of many hours can
be spread over days and machines. The JSON has the fingerprint of the code that made it. Trainings
that were kept before have one evaluation, of the last policy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from etude.core.contracts import Fragment
from etude.evaluate.acting import LoadedPolicy
from etude.training.loop import Callback, Context
from gates.lib.beginnings import kept
from gates.lib.report import RESULTS, Gate, about_now

Act = Callable[[Any], Any]
"""A policy: one observation [n] to one action [m]."""
LAST = 5
"""Evaluations of a training, in its last fifth."""


class Evaluations:
    """Returns of a training's last policies, kept in a file beside its run."""

    def __init__(self, env: str, episodes: int, steps: int, path: Path) -> None:
        """env: Gymnasium's id. episodes: of each evaluation. steps: of the training."""
        self._env, self._episodes, self._path = env, episodes, path
        self._points = [round(steps * (0.8 + 0.2 * k / LAST)) for k in range(1, LAST + 1)]
        self.returns: dict[int, list[float]] = {}
        """{point: returns of the episodes}."""
        if path.exists():
            kept = json.loads(path.read_text())
            self.returns = {int(point): returns for point, returns in kept.items()}

    def __call__(self, steps: int, act: Act, ended: bool = False) -> None:
        """Evaluate the policy of this step if the next point is reached, or the training ended."""
        reached = [point for point in self._points if point <= steps or ended]
        if not reached or reached[-1] in self.returns:
            return
        self.returns[reached[-1]] = play(self._env, act, self._episodes)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.returns))


class EvaluatesLast(Callback):
    """Evaluates a run of Etude at the points of its evaluations."""

    def __init__(self, evaluate: Evaluations) -> None:
        self._evaluate = evaluate

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        clock = context.clock
        policy = LoadedPolicy(context.algorithm.policy)  # type: ignore[attr-defined]
        self._evaluate(
            clock.now.timesteps,
            lambda obs: policy.act(np.asarray(obs, np.float32)[None])[0],
            clock.finished,
        )


def sb3_callback(evaluate: Evaluations, act: Act) -> Any:
    """A callback of stable-baselines3 that evaluates a training at the points."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Evaluating(BaseCallback):  # type: ignore[misc]
        def _on_rollout_start(self) -> None:
            evaluate(self.num_timesteps, act)

        def _on_training_end(self) -> None:
            evaluate(self.num_timesteps, act, ended=True)

        def _on_step(self) -> bool:
            return True

    return Evaluating()


class Training(NamedTuple):
    name: str
    """Name of its run and its result, with everything that it depends on."""
    env: str
    """Gymnasium's id of the task."""
    episodes: int
    steps: int
    train: Callable[[Path, Evaluations], None]
    """Train in a folder, or resume the run there, and call the evaluations after every update."""

    @property
    def ours(self) -> bool:
        """Whether it depends on the code of this repository."""
        return self.name.startswith("etude-")


def add_options(parser: argparse.ArgumentParser, gate: str) -> None:
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--now", default="*", help="pattern of the trainings to make now")
    parser.add_argument("--folder", type=Path, default=Path("runs") / gate, help="of the runs")
    parser.add_argument("--kept", type=Path, default=RESULTS / "trainings", help="of the results")


def returns_of(
    gate: Gate, trainings: Sequence[Training], options: argparse.Namespace
) -> dict[str, list[float]]:
    """{training: mean returns of its last evaluations}; missing trainings are made first."""
    options.kept.mkdir(parents=True, exist_ok=True)
    missing = [
        (training, options.folder, path, gate.name, gate.variant)
        for training in trainings
        if not (path := options.kept / f"{training.name}.json").exists()
        and fnmatch(training.name, options.now)
    ]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, fresh, max_tasks_per_child=1) as pool:
        for line in pool.map(make, *zip(*missing, strict=True), timeout=gate.seconds_left):
            print(line, flush=True)
    found: dict[str, list[float]] = {}
    for training in trainings:
        path = options.kept / f"{training.name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            every = result.get("evaluations") or {"": result["returns"]}
            found[training.name] = [float(np.mean(returns)) for returns in every.values()]
            gate.count("trainings")
            if training.ours:
                gate.of_earlier(result)
    return found


def make(training: Training, folder: Path, path: Path, gate: str, variant: str) -> str:
    """Train and play on one thread, and keep the result."""
    torch.set_num_threads(1)
    run = folder / training.name
    beside = run.with_name(f"{run.name}-evaluations.json")
    evaluations = Evaluations(training.env, training.episodes, training.steps, beside)
    training.train(run, evaluations)
    returns = evaluations.returns
    result: dict[str, Any] = {
        "evaluations": returns,
        **about_now(),
    }
    if training.ours:
        result["begins"] = kept(gate, variant)
    path.write_text(json.dumps(result, indent=2) + "\n")
    means = ", ".join(f"{np.mean(each):.0f}" for each in returns.values())
    return f"{training.name}: returns {means}, each over {training.episodes} episodes"


def play(name: str, act: Act, episodes: int) -> list[float]:
    """The returns of a policy in episodes that are the same for every policy."""
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
