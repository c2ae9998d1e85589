"""Trainings of two libraries, and the returns of their policies.

What is left of a training is kept as a small JSON in gates/results/trainings, and a training that
is kept is not made again: a comparison of many hours can be spread over days and machines. A result
that was made by another version of the code is marked as such.
"""

from __future__ import annotations

import argparse
import datetime
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

from beginnings import kept
from report import RESULTS, Gate, commit, machine

Act = Callable[[Any], Any]
"""One observation [n] to one action [m]."""


class Training(NamedTuple):
    name: str
    """Of its run and of its result: all that it depends on."""
    env: str
    """Gymnasium's id of the task that its policy plays."""
    episodes: int
    train: Callable[[Path], Act]
    """Trains in a folder, or continues what is there, and returns the policy."""

    @property
    def ours(self) -> bool:
        """Whether it depends on the code here."""
        return self.name.startswith("etude-")


def add_options(parser: argparse.ArgumentParser, gate: str) -> None:
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--now", default="*", help="trainings to make now, such as 'etude-*'")
    parser.add_argument("--folder", type=Path, default=Path("runs") / gate, help="of the runs")
    parser.add_argument("--kept", type=Path, default=RESULTS / "trainings", help="of the results")


def returns_of(
    gate: Gate, trainings: Sequence[Training], options: argparse.Namespace
) -> dict[str, list[float]]:
    """{name: returns of its episodes}, of those that are kept; what is missing is made first."""
    options.kept.mkdir(parents=True, exist_ok=True)
    missing = [
        (training, options.folder, path, gate.name, gate.variant)
        for training in trainings
        if not (path := options.kept / f"{training.name}.json").exists()
        and fnmatch(training.name, options.now)
    ]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, fresh, max_tasks_per_child=1) as pool:
        for told in pool.map(make, *zip(*missing, strict=True), timeout=gate.seconds_left):
            print(told, flush=True)
    found: dict[str, list[float]] = {}
    for training in trainings:
        path = options.kept / f"{training.name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            found[training.name] = result["returns"]
            gate.count("trainings")
            if training.ours:
                gate.of_begins(result.get("begins", {}))
    return found


def make(training: Training, folder: Path, path: Path, gate: str, variant: str) -> str:
    """Train and play, on one thread, and keep the result."""
    torch.set_num_threads(1)
    act = training.train(folder / training.name)
    returns = play(training.env, act, training.episodes)
    result = {
        "returns": returns,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
    }
    if training.ours:
        result["begins"] = kept(gate, variant)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return (
        f"{training.name}: return {np.mean(returns):.0f} ± {np.std(returns):.0f} over "
        f"{len(returns)} episodes"
    )


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
