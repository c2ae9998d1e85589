"""Trainings of two libraries, and the returns of their policies.

The returns of each training are kept as a small JSON in gates/results/trainings and used again: a
comparison of many hours can be spread over days and machines. The JSON has the fingerprint of the
code that made it.
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

from gates.lib.beginnings import kept
from gates.lib.report import RESULTS, Gate, commit, machine

Act = Callable[[Any], Any]
"""A policy: one observation [n] to one action [m]."""


class Training(NamedTuple):
    name: str
    """Name of its run and its result, with everything that it depends on."""
    env: str
    """Gymnasium's id of the task."""
    episodes: int
    train: Callable[[Path], Act]
    """Train in a folder, or resume the run there, and return the policy."""

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
    """{training: returns of its episodes}; missing trainings are made first."""
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
            found[training.name] = result["returns"]
            gate.count("trainings")
            if training.ours:
                gate.of_begins(result.get("begins", {}))
    return found


def make(training: Training, folder: Path, path: Path, gate: str, variant: str) -> str:
    """Train and play on one thread, and keep the result."""
    torch.set_num_threads(1)
    act = training.train(folder / training.name)
    returns = play(training.env, act, training.episodes)
    result: dict[str, Any] = {
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
