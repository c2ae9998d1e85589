"""Insert NaN and infinities: the update must fail, save nothing and name the culprit.

    python -m gates.faults.not_finite --cases 200

Short real runs in which one number becomes NaN or infinite, at a random time in a random row: in an
observation, a reward, an action, the physics, a loss, a gradient, or a dataset. Each must end with
NonFinite, which names the place, and with a report in the run's folder; the newest checkpoint must
be the one before that update and hold finite numbers only.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import etude
from etude.core.errors import NonFinite
from etude.core.trees import leaves
from etude.data.store.episodes import EpisodeStore
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import Simulation
from etude.models.actor_critic import MlpPolicy
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.rl.ppo import PPO
from etude.runs import checkpoint
from gates.lib.report import Gate, parse
from toys import changed, tiny_reach, toy_dataset

VALUES = (float("nan"), float("inf"), -float("inf"))
ITERATIONS, ROWS, STEPS = 4, 8, 256
"""Sizes of a run: rows of a group, steps of an iteration."""


@dataclass
class Case:
    """One number to be replaced: the iteration, the call and the place."""

    value: float
    row: int
    iteration: int
    calls: int
    seen: int = 0
    done: bool = False

    def on_phase(self, phase: str) -> None:
        self.seen += phase == "collect"

    def now(self) -> bool:
        """True once, at the chosen call."""
        if self.done or self.seen != self.iteration + 1:
            return False
        self.calls -= 1
        self.done = self.calls < 0
        return self.done


def observation(case: Case, good: Callable[..., Any], *arguments: Any) -> Any:
    result = good(*arguments)
    if case.now():
        result.obs["state"][case.row, 2] = case.value
    return result


def reward(case: Case, good: Callable[..., Any], *arguments: Any) -> Any:
    result = good(*arguments)
    if case.now():
        result.reward[case.row] = case.value
    return result


def action(case: Case, good: Callable[..., Any], *arguments: Any) -> Any:
    answer = good(*arguments)
    return answer._replace(actions=answer.actions * case.value) if case.now() else answer


def physics(case: Case, good: Callable[..., Any], simulation: Simulation, *arguments: Any) -> Any:
    if case.now():
        simulation.bind("qvel")[case.row, 0] = case.value
    return good(simulation, *arguments)


def loss(case: Case, good: Callable[..., Any], *arguments: Any) -> Any:
    found, metrics = good(*arguments)
    case.done = case.done or case.now()  # the loss is computed again to find the culprit
    return (found + case.value if case.done else found), metrics


def gradient(case: Case, good: Callable[..., Any], ppo: PPO, *arguments: Any) -> Any:
    found = good(ppo, *arguments)
    if case.now():
        ppo.flat.grad[case.row] = case.value
    return found


def dataset(case: Case, good: Callable[..., Any], *arguments: Any) -> Any:
    store, obs, *rest = arguments
    if case.done or case.now():  # episodes that are held out or never drawn have no effect
        obs["state"][case.row % len(obs["state"]), 0] = case.value
    return good(store, obs, *rest)


PLACES: dict[str, tuple[Any, Any, str, int]] = {
    "observation": (observation, MujocoEnv, "step", 8),
    "reward": (reward, MujocoEnv, "step", 8),
    "action": (action, MlpPolicy, "act", 8),
    "physics": (physics, Simulation, "step", 8),
    "loss": (loss, PPO, "loss", 8),
    "gradient": (gradient, PPO, "_gradient", 8),
    "dataset": (dataset, EpisodeStore, "append_episode", 30),
}
"""{place: (wrapper, class, method, number of calls to choose from)}."""


def from_data(case: Case, folder: Path) -> Recipe:
    """A run that learns a reward from a dataset that has the bad number."""
    case.seen = case.iteration + 1
    recipe = recipes.find("reward-only")
    rrd = {"rrd_batch_size": 16, "rrd_sample_size": 4, "network": {"reads": ("state",)}}
    return changed(
        recipe,
        algorithm={
            "dataset": str(toy_dataset(folder / "data")),
            "rrd": recipe.model_dump(mode="json")["algorithm"]["rrd"] | rrd,
        },
        clock={"epochs": 1, "cycles": 1, "iterations": 4},
        evaluation={"every": "never"},
    )


def judge(place: str, chance: random.Random, folder: Path) -> str:
    """Insert a bad number into one run; return what is wrong with its end, "" if nothing is."""
    wrapper, owner, name, calls = PLACES[place]
    iteration = chance.randrange(1, ITERATIONS)
    case = Case(chance.choice(VALUES), chance.randrange(ROWS), iteration, chance.randrange(calls))
    good = getattr(owner, name)
    folder.mkdir()
    with patch.object(owner, name, lambda *arguments: wrapper(case, good, *arguments)):
        recipe = (
            from_data(case, folder)
            if place == "dataset"
            else tiny_reach(
                ITERATIONS,
                collector={"threads": 1},
                evaluation={"every": "never"},
                checkpoint={"every": "1 iteration"},
            )
        )
        try:
            etude.train(recipe, folder / "run", on_phase=case.on_phase)
        except NonFinite as error:
            said = str(error)
        else:
            return f"{case}: was not noticed"
    words = {"dataset": "step"}.get(place, place)
    if words not in said:
        return f"{case}: says {said}"
    return wrong_on_disk(folder / "run", 0 if place == "dataset" else iteration * STEPS)


def wrong_on_disk(run: Path, step: int) -> str:
    """The fault of the folder of a run that failed after `step` steps; "" without one."""
    if len(list((run / "failures").iterdir())) != 1:
        return "there is no report"
    newest = checkpoint.newest_verified(run / "checkpoints", lambda _: None)
    found = 0 if newest is None else checkpoint.step_of(newest)
    if found != step:
        return f"the newest checkpoint is of step {found} and not of {step}"
    if newest is not None:
        arrays, _, training = checkpoint.load_training(newest)
        for path, leaf in leaves({"policy": arrays, "training": training}):
            array = np.asarray(leaf) if hasattr(leaf, "dtype") else np.zeros(1)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"the checkpoint holds a number that is not finite: {path}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, {"cases": len(PLACES)}, arguments)
    needs = {"caught": options.cases}
    with (
        Gate("not_finite", options, needs=needs, rows=(10,)) as gate,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for number in range(options.cases):
            place = list(PLACES)[number % len(PLACES)]
            chance = random.Random(f"{options.seed}-{number}")
            wrong = judge(place, chance, Path(scratch) / f"{number}")
            if wrong:
                gate.fail(f"case {number}, {place}: {wrong}")
            else:
                gate.count("caught")
        gate.figure("cases missed", len(gate.failures), at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
