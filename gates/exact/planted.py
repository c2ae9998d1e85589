"""Plant faults in a training and let `etude bisect` find them.

    python -m gates.exact.planted [--faults 50] [--commits 10]

Each fault changes the bits of one phase of one iteration: one flipped bit in a tensor, a changed
constant, or another function of a library. A run with the fault is compared with one without. The
iteration, the phase, the gradient step, the tensor and, of a flipped bit, the number in it must be
found exactly, in at most log2(iterations) + 2 resumes.

`--commits`: number of commits of a repository, of which one at random changes bits of a recipe, for
each of four phases. It must be found, with its phase.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import etude
from etude.cli.commits import first_change
from etude.compare.bisect import Bisection, bisect
from etude.data import returns
from etude.models.networks import Normaliser
from etude.planning.recipe import Recipe
from etude.rl.base import Adam, NetworkOptimizer
from etude.rl.off_policy import OffPolicy
from etude.rl.ppo import PPO
from etude.rollout.local import LocalCollector
from etude.training.evaluation import Evaluator
from etude.training.loop import Loop
from gates.lib.report import Gate, parse
from gates.lib.short_runs import short_run
from toys import tiny_reach

SOURCE = Path(etude.__file__).parent
NOW = {"iteration": -1, "step": -1}
"""Where the run with the fault is."""


@dataclass
class Fault:
    """A fault, and the findings that it must lead to."""

    kind: str
    iteration: int
    phase: str
    tensor: Callable[[str], bool]
    planted: Callable[[], Any]
    gradient_step: int | None = None
    place: tuple[int, ...] | None = None

    def wrong(self, found: Bisection, iterations: int) -> str:
        """Describe the wrong findings; "" if all are right."""
        first = found.difference
        if first is None:
            return f"nothing was found: {' '.join(found.notes)}"
        pairs = {
            "iteration": (first.iteration, self.iteration),
            "phase": (first.phase, self.phase),
            "gradient step": (first.gradient_step, self.gradient_step),
            "tensor": (self.tensor(first.tensor), True),
            "number": (first.place if self.place is not None else None, self.place),
        }
        bad = [f"{name} {a} instead of {b}" for name, (a, b) in pairs.items() if a != b]
        if found.resumes > math.log2(iterations) + 2:
            bad.append(f"{found.resumes} resumes")
        return f"{', '.join(bad)} ({first.sentence()})" if bad else ""


def flip(array: Any, place: tuple[int, ...]) -> None:
    """Flip a high bit of a number's mantissa in an array or tensor, in place."""
    x = array.numpy() if isinstance(array, torch.Tensor) else array
    kind, bit = {4: (np.int32, 21), 8: (np.int64, 50)}[x.dtype.itemsize]
    x.view(kind)[place] ^= 1 << bit


@contextmanager
def counted(**patches: Any) -> Iterator[None]:
    """Count iterations and gradient steps in `NOW`, and apply patches {"Class.method": (class,
    name, wrapper)}."""

    def iterate(method: Any) -> Any:
        def wrapped(self: Loop, context: Any) -> None:
            NOW.update(iteration=self.clock.now.iterations, step=-1)
            method(self, context)

        return wrapped

    with ExitStack() as stack:
        for owner, name, wrap in ((Loop, "_iterate", iterate), *patches.values()):
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        yield


def at(iteration: int) -> bool:
    return NOW["iteration"] == iteration


def faults(recipe: Recipe, iterations: int, draw: Any) -> Iterator[Fault]:
    """Faults of all kinds in turn, each in a random place."""
    is_ppo = recipe.algorithm.kind == "ppo"
    kinds: list[Callable[[Recipe, int, Any], Fault]] = [
        *(observation_bit, rewards_scaled, weight_bit, moment_bit, other_adam, normaliser_bit),
        *((return_bit, lambda_changed, loss_scaled) if is_ppo else (critic_constant,)),
        evaluation_changed,
    ]
    idle = -(-getattr(recipe.algorithm, "warmup_steps", 0) // recipe_steps(recipe)) + 2
    while True:
        for kind in kinds:
            yield kind(recipe, int(draw.integers(idle, iterations - 1)), draw)


def recipe_steps(recipe: Recipe) -> int:
    """Environment steps of an iteration."""
    return recipe.collector.num_envs * rollout_steps(recipe)


def rollout_steps(recipe: Recipe) -> int:
    """Steps of each environment in an iteration."""
    algorithm: Any = recipe.algorithm
    return int(algorithm.rollout_steps)


def observation_bit(recipe: Recipe, k: int, draw: Any) -> Fault:
    group = int(draw.integers(recipe.collector.num_groups))
    row = int(draw.integers(recipe.collector.envs_per_group))
    # Not the first step: the replay compares it with what it expects, and refuses another.
    step = int(draw.integers(1, rollout_steps(recipe)))
    place = (row, step, int(draw.integers(3)))

    def wrap(collect: Any) -> Any:
        def wrapped(self: Any, broadcast: Any, iteration: int) -> Any:
            fragments = collect(self, broadcast, iteration)
            if iteration == k:
                flip(fragments[group].obs["state"], place)
            return fragments

        return wrapped

    plant = lambda: counted(a=(LocalCollector, "collect", wrap))  # noqa: E731
    name = f"group {group}/obs/state"
    return Fault("observation bit", k, "collect", name.__eq__, plant, place=place)


def rewards_scaled(recipe: Recipe, k: int, draw: Any) -> Fault:
    def wrap(collect: Any) -> Any:
        def wrapped(self: Any, broadcast: Any, iteration: int) -> Any:
            fragments = collect(self, broadcast, iteration)
            if iteration == k:
                fragments[0].rewards *= np.float32(1.01)
            return fragments

        return wrapped

    plant = lambda: counted(a=(LocalCollector, "collect", wrap))  # noqa: E731
    return Fault("reward constant", k, "collect", "group 0/rewards".__eq__, plant)


def after_step(k: int, b: int, change: Callable[[Any], None], name: str) -> Callable[[], Any]:
    """Plant a change after the b-th step of a network's optimizer in iteration k."""

    def wrap(step: Any) -> Any:
        def wrapped(self: Any, learning_rate: float) -> None:
            step(self, learning_rate)
            if isinstance(self, NetworkOptimizer) and self.name == name:
                NOW["step"] += 1
                if at(k) and NOW["step"] == b:
                    with torch.no_grad():
                        change(self)

        return wrapped

    return lambda: counted(a=(Adam, "step", wrap))


def _network(recipe: Recipe) -> str:
    return "policy" if recipe.algorithm.kind == "ppo" else "actor"


def weight_bit(recipe: Recipe, k: int, draw: Any) -> Fault:
    b, share = int(draw.integers(2)), draw.random()
    chosen: dict[str, Any] = {}

    def change(optimizer: Any) -> None:
        named = {n: p for n, p in optimizer.flat.named.items() if p.ndim == 2}
        name = [*named][int(share * len(named))]
        place = tuple(int(share * size) for size in named[name].shape)
        chosen.update(name=f"policy/{name}", place=place)
        flip(named[name].data, place)

    plant = after_step(k, b, change, _network(recipe))
    fault = Fault("weight bit", k, "update", lambda n: n == chosen["name"], plant, b)
    return fault


def moment_bit(recipe: Recipe, k: int, draw: Any) -> Fault:
    b, place = int(draw.integers(2)), (int(draw.integers(1000)),)
    change = lambda optimizer: flip(optimizer.mean, place)  # noqa: E731
    plant = after_step(k, b, change, _network(recipe))
    return Fault("Adam bit", k, "update", lambda n: n.endswith("/mean"), plant, b, place)


def other_adam(recipe: Recipe, k: int, draw: Any) -> Fault:
    """Adam by other functions of torch than the fused one."""

    def wrap(step: Any) -> Any:
        def wrapped(self: Any, learning_rate: float) -> None:
            if not at(k):
                return step(self, learning_rate)
            self.count += 1
            with torch.no_grad():
                self._step_by_public_operations(learning_rate)

        return wrapped

    plant = lambda: counted(a=(Adam, "step", wrap))  # noqa: E731
    return Fault("library function", k, "update", _learned, plant, 0)


def _learned(name: str) -> bool:
    return name.startswith(("policy/", "state/", "metrics/"))


def normaliser_bit(recipe: Recipe, k: int, draw: Any) -> Fault:
    place = (int(draw.integers(3)),)

    def wrap(absorb: Any) -> Any:
        def wrapped(self: Any, moments: Any) -> None:
            absorb(self, moments)
            if at(k):
                flip(self.mean, place)

        return wrapped

    plant = lambda: counted(a=(Normaliser, "absorb", wrap))  # noqa: E731
    mean = lambda n: "normaliser" in n and n.endswith("mean")  # noqa: E731
    return Fault("normaliser bit", k, "normaliser", mean, plant, place=place)


def return_bit(recipe: Recipe, k: int, draw: Any) -> Fault:
    place = (int(draw.integers(8)), 0)

    def wrap(make: Any) -> Any:
        def wrapped(self: Any, *arguments: Any) -> Any:
            shard = make(self, *arguments)
            if at(k):
                flip(shard.returns, place)
            return shard

        return wrapped

    plant = lambda: counted(a=(PPO, "make_shard", wrap))  # noqa: E731
    return Fault("return bit", k, "ingest", "shards 0/returns".__eq__, plant, place=place)


def lambda_changed(recipe: Recipe, k: int, draw: Any) -> Fault:
    def wrap(function: Any) -> Any:
        def wrapped(a: Any, b: Any, c: Any, d: Any, gamma: float, factor: float, *e: Any) -> Any:
            return function(a, b, c, d, gamma, factor * (0.99 if at(k) else 1.0), *e)

        return wrapped

    plant = lambda: counted(a=(returns, "rollout_advantages", wrap))  # noqa: E731
    return Fault("lambda", k, "ingest", "shards 0/advantages".__eq__, plant)


def loss_scaled(recipe: Recipe, k: int, draw: Any) -> Fault:
    def wrap(loss: Any) -> Any:
        def wrapped(self: Any, *arguments: Any) -> Any:
            found, metrics = loss(self, *arguments)
            return (found * 1.001 if at(k) else found), metrics

        return wrapped

    plant = lambda: counted(a=(PPO, "loss", wrap))  # noqa: E731
    return Fault("loss constant", k, "update", _learned, plant, 0)


def critic_constant(recipe: Recipe, k: int, draw: Any) -> Fault:
    def wrap(targets: Any) -> Any:
        def wrapped(self: Any, batch: Any, values: Any) -> Any:
            return targets(self, batch, values) * (1.001 if at(k) else 1.0)

        return wrapped

    plant = lambda: counted(a=(OffPolicy, "td_targets", wrap))  # noqa: E731
    return Fault("target constant", k, "update", _learned, plant, 0)


def evaluation_changed(recipe: Recipe, k: int, draw: Any) -> Fault:
    def wrap(evaluate: Any) -> Any:
        def wrapped(self: Any, broadcast: Any) -> Any:
            found = evaluate(self, broadcast)
            if at(k):
                found.metrics["eval/mean_reward"] *= 1.001
            return found

        return wrapped

    plant = lambda: counted(a=(Evaluator, "evaluate", wrap))  # noqa: E731
    name = "metrics/eval.mean_reward"
    return Fault("evaluation constant", k, "evaluation", name.__eq__, plant)


def judged(
    fault: Fault, recipe: Recipe, folder: Path, good: Path, iterations: int
) -> tuple[str, int]:
    """(what was found wrongly of a fault, number of resumes)."""
    with fault.planted():
        bad = etude.train(recipe, folder)
    found = bisect(bad.path, good, contexts=(fault.planted, ExitStack))
    return fault.wrong(found, iterations), found.resumes


def recipes_of(gate: Gate, scratch: Path, names: list[str]) -> Iterator[tuple[str, Recipe]]:
    """Recipes that evaluate and log in every iteration."""
    every = {
        "clock__cycles": 1,
        "clock__iterations": 1,
        "evaluation__every": "1 iteration",
        "checkpoint__every": "3 iterations",
        "checkpoint__keep_last": 100,
    }
    for name in names:
        base = tiny_reach(12) if name == "ppo" else short_run(name, gate, scratch)
        normalises = {} if name == "ppo" else {"algorithm__normalise_observations": True}
        yield name, base.replace(**every, **normalises)


EDITS = {
    "collect": ("rollout/group.py", "= result.reward\n", "= result.reward * 1.001\n"),
    "ingest": ("rl/ppo.py", "div_(spread + 1e-8)", "div_(spread + 1e-4)"),
    "update": ("rl/base.py", "BETA1, BETA2 = 0.9, 0.999", "BETA1, BETA2 = 0.9, 0.9991"),
    "normaliser": (
        *("models/networks.py", "merge_moments(known, moments)"),
        "merge_moments(moments, known)",
    ),
}  # fmt: skip
"""{phase: (file, text, changed text)} of a commit that changes bits."""


def planted_commit(scratch: Path, count: int, phase: str, draw: Any) -> str:
    """Why the one commit of `count` that changes bits is not found; "" if it is."""
    root = scratch / f"repository-{phase}"
    shutil.copytree(SOURCE, root / "src" / "etude", ignore=shutil.ignore_patterns("__pycache__"))
    chosen, commits = int(draw.integers(1, count)), list[str]()

    def git(*words: str) -> str:
        who = ("-c", "user.name=gate", "-c", "user.email=gate@example.org")
        done = subprocess.run(
            ["git", *who, *words], cwd=root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    for number in range(count):
        if number == chosen:
            name, text, changed = EDITS[phase]
            file = root / "src" / "etude" / name
            assert text in file.read_text(), f"{name} has changed: choose another edit"
            file.write_text(file.read_text().replace(text, changed))
        (root / "README.md").write_text(f"{number}\n")
        git("add", "-A")
        git("commit", "-qm", f"change {number}")
        commits.append(git("rev-parse", "HEAD"))
    found = first_change("reach-short", commits[0], commits[-1], repository=root)
    if found is None or found.commit != commits[chosen]:
        return f"found {found} instead of change {chosen}"
    print(found.sentence(), flush=True)
    if found.phase != phase or found.probes > math.ceil(math.log2(count)) + 2:
        return f"phase {phase}: {found.sentence()}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--recipes", nargs="+", default=["ppo", "sac"])
    parser.add_argument("--commits", type=int, default=10)
    smallest = {"faults": 3, "recipes": ["ppo"], "commits": 0}
    options = parse(parser, smallest, arguments)
    needs = {
        "faults": options.faults,
        **({"commits": options.commits * len(EDITS)} if options.commits else {}),
    }
    missed, resumes = 0, [0]
    with Gate("planted", options, needs=needs) as gate, tempfile.TemporaryDirectory() as scratch:
        draw = np.random.default_rng(0)
        for name, recipe in recipes_of(gate, Path(scratch), options.recipes):
            good = etude.train(recipe, Path(scratch) / name / "good")
            iterations = int(good.history().last["iterations"])
            coming = faults(recipe, iterations, draw)
            for number in range(options.faults // len(options.recipes)):
                fault, folder = next(coming), Path(scratch) / name / f"bad-{number}"
                wrong, many = judged(fault, recipe, folder, good.path, iterations)
                resumes.append(many)
                if wrong:
                    missed += 1
                    gate.fail(f"{name}, {fault.kind} in iteration {fault.iteration}: {wrong}")
                gate.count("faults")
                print(f"{name}: {fault.kind} in iteration {fault.iteration}", flush=True)
        gate.figure("faults not found exactly", missed, at_most=0)
        gate.figure("most resumes", max(resumes), at_most=math.log2(12) + 2)
        if options.commits:
            lost = 0
            for phase in EDITS:
                if wrong := planted_commit(Path(scratch), options.commits, phase, draw):
                    gate.fail(f"commits: {wrong}")
                    lost += 1
                gate.count("commits", options.commits)
            gate.figure("commits not found", lost, at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
