"""Replay random moments of training: their bits must be those that the run recorded.

    python -m gates.exact.moments [--moments 100] [--ray 10]

Short runs of PPO, an LSTM with collection one iteration ahead, SAC, RRD, AMP, DAgger and BC are
trained with a callback that keeps everything: each fragment, the metrics of each gradient step, and
hashes of the policy and of the algorithm's state after each iteration. Then random moments (run,
step, environment) are replayed from the finished run's folder. Of each, the episode's observations,
actions, rewards and log-probabilities must have the recorded bits, and so must the metrics and
hashes of its iteration. `--ray`: number of moments of a run that Ray actors collected, which are
replayed on threads.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import etude
from etude.building.rewind import Watch, iteration_at, rewound
from etude.core.contracts import Fragment
from etude.core.trees import digest
from etude.evaluate.replay import Episode, replay
from etude.planning.recipe import Recipe
from etude.training.loop import Callback, Context
from gates.lib.report import Gate, parse
from gates.lib.short_runs import short_run
from ray_nodes import start

METHODS = {
    "PPO": "pick-place",
    "LSTM": "reach-at-scale",
    "SAC": "sac",
    "RRD": "episodic",
    "AMP": "amp-walk",
    "DAgger": "dagger",
    "BC": "bc",
}


class Everything(Callback):
    """Keeps all that a run computes."""

    def __init__(self) -> None:
        self.fragments: list[list[Fragment]] = []
        self.states: list[tuple[str, str]] = []
        self.batches: list[list[dict[str, float]]] = [[]]

    def batch_end(self, context: Context, metrics: Any) -> None:
        self.batches[-1].append(dict(metrics.values))

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self.fragments.append(copy.deepcopy(fragments))
        self.states.append(hashes(context.algorithm))
        self.batches.append([])


def hashes(algorithm: Any) -> tuple[str, str]:
    """Hashes of the policy's arrays and of the algorithm's state."""
    return digest(dict(algorithm.policy_parts()[0])), digest(algorithm.state_dict())


class Iteration(Watch):
    """Keeps the metrics of gradient steps that are computed again."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []

    def ingested(self, algorithm: Any) -> None:
        self.batches = []

    def stepped(self, algorithm: Any, metrics: Any) -> None:
        self.batches.append(dict(metrics.values))


def difference(found: Episode, known: Everything, num_envs: int) -> str:
    """The first array of an episode that is not as recorded; "" if all are."""
    size = num_envs // len(known.fragments[0])
    group, row = divmod(found.place.env, size)
    steps = known.fragments[0][0].rewards.shape[1]
    places = [divmod(int(step) // num_envs, steps) for step in found.columns["step"]]

    def recorded(name: str) -> Any:
        return np.stack([getattr(known.fragments[i][group], name)[row, c] for i, c in places])

    pairs = {
        "actions": (found.actions, recorded("actions")),
        "rewards": (found.rewards, recorded("rewards")),
        "log_probs": (found.columns["log_prob"].astype(np.float32), recorded("log_probs")),
    }
    for name, array in found.obs.items():
        there = np.stack([known.fragments[i][group].obs[name][row, c] for i, c in places])
        pairs[name] = (array[:-1], there)
    wrong = [name for name, (a, b) in pairs.items() if a.tobytes() != b.tobytes()]
    last = known.fragments[places[-1][0]][group]
    ended = bool((last.terminated | last.truncated)[row, places[-1][1]])
    if ended != bool(found.ending):
        wrong.append("ending")
    return wrong[0] if wrong else "" if found.is_same else "the replay says that it differs"


def moment(path: Path, recipe: Recipe, known: Everything, draw: Any, threads: int) -> str:
    """Replay one random moment; why it is not as recorded, or ""."""
    loops = recipe.algorithm.loops(recipe, recipe.algorithm.geometry(recipe))
    step = int(draw.integers(0, loops.budget[0]))
    iteration = iteration_at(step, loops)
    if loops.steps_per_iteration:
        env = int(draw.integers(0, recipe.collector.num_envs))
        found = replay(path, step, env, film=False, threads=threads)
        if wrong := difference(found, known, recipe.collector.num_envs):
            return f"step {step}, environment {env}: {wrong}"
    watch = Iteration()
    with rewound(path, iteration, watch, threads=threads) as now:
        now.forward()
        now.forward(1)
        if hashes(now.loop.algorithm) != known.states[iteration]:
            return f"iteration {iteration}: another state of the learner"
        if repr(watch.batches) != repr(known.batches[iteration]):
            return f"iteration {iteration}: other metrics of gradient steps"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--ray", type=int, default=10)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    smallest = {"moments": 4, "ray": 0, "methods": ["PPO", "BC"]}
    options = parse(parser, smallest, arguments)
    different, seconds = 0, list[float]()
    needs = {"moments": options.moments + options.ray}
    with Gate("moments", options, needs=needs) as gate, tempfile.TemporaryDirectory() as scratch:
        draw = np.random.default_rng(0)
        names = options.methods
        many = [len(range(i, options.moments, len(names))) for i in range(len(names))]
        work: list[tuple[str, str, int, dict[str, Any]]]
        work = [(n, METHODS[n], count, {}) for n, count in zip(names, many, strict=True)]
        cluster = None
        if options.ray:
            cluster = start(2)
            placed = {"kind": "ray", "threads": 1, "actors": 2, "address": cluster.address}
            work.append(("PPO on Ray", METHODS["PPO"], options.ray, placed))
        for name, short, count, placed in work:
            folder = Path(scratch) / name.replace(" ", "-")
            folder.mkdir()
            recipe = short_run(short, gate, folder)
            changed = {f"collector__{field}": value for field, value in placed.items()}
            known = Everything()
            run = etude.train(recipe.replace(**changed), folder / "run", callbacks=[known])
            begin = time.monotonic()
            for _ in range(count):
                threads = int(draw.integers(1, 4))
                if wrong := moment(run.path, recipe, known, draw, threads):
                    different += 1
                    gate.fail(f"{name}, {wrong}")
                gate.count("moments")
            seconds.append((time.monotonic() - begin) / max(count, 1))
            print(f"{name}: {count} moments, {seconds[-1]:.1f} s each", flush=True)
        if cluster is not None:
            cluster.shutdown()
        gate.figure("moments that differ", different, at_most=0)
        gate.figure("seconds of a moment", max(seconds), timing=True)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
