"""Real runs whose verdict is known (see record_runs.py) are judged right, from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from record_runs import COMMANDS, FOLDER

from etude.core.metrics import COUNTERS, EPISODES, Best, Health, step_of
from etude.rl.ppo import PPOConfig
from etude.rl.td3 import TD3Config
from etude.training.evaluation import AnyEvaluator, Evaluator

VERDICTS: dict[str, tuple[str, set[str]]] = {
    "solved": ("level", set()),
    "solved-other-seed": ("level", set()),
    "solved-from-the-start": ("level", set()),
    "solved-reach": ("level", set()),
    "solved-roughly": ("level", set()),
    "climbing": ("rising", set()),
    "climbing-slowly": ("rising", set()),
    "climbing-late": ("rising", set()),  # the return, for long, and no success yet
    "exploding-kl": ("level", {"KL too high", "eval return fell"}),
    "exploding-kl-other-seed": ("falling", {"KL too high", "eval return fell"}),
    "collapse": ("rising", {"KL too high", "eval return fell"}),  # from 9 to 65, after 500
    "frozen": ("level", {"no progress"}),
    "dead-critic": ("rising", {"value function explains nothing"}),
    "no-progress": ("level", {"no progress", "value function explains nothing"}),
    "plateau": ("level", {"success stuck"}),
    "diverging": ("falling", {"Q values diverge"}),
}
"""The trend at the end of each run, and its warnings."""


def best_of(rows: list[dict[str, float]]) -> Best | None:
    """The best evaluation of some rows, by the rule of the run's evaluator."""
    evaluator, best = object.__new__(Evaluator), None
    AnyEvaluator.__init__(evaluator)
    for row in rows:
        if "eval/mean_reward" in row:
            error = row["eval/std_reward"] / math.sqrt(row["eval/episodes"])
            if evaluator._is_best(row, error):
                assert evaluator.best is not None
                best = Best(*evaluator.best, step_of(row))
    return best


def healths(name: str) -> list[Health]:
    """The health of a run after each of its rows."""
    rows = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    algorithm = TD3Config if "train/q_mean" in rows[-1] else PPOConfig
    found = []
    for count in range(1, len(rows) + 1):
        health = Health((*algorithm.metrics, *COUNTERS, *EPISODES), rows[-1]["iterations"])
        for row in rows[:count]:
            health.add(row)
        health.best = best_of(rows[:count])
        found.append(health)
    return found


def names(health: Health) -> set[str]:
    return {warning.name for warning in health.warnings}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_verdict_at_the_end(name: str) -> None:
    end = healths(name)[-1]
    assert (end.trend, names(end)) == VERDICTS[name]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith(("solv", "climb"))])
def test_what_goes_well_is_never_warned_of(name: str) -> None:
    said = {i: names(health) for i, health in enumerate(healths(name)) if health.warnings}
    assert said == {}


def test_every_recorded_run_has_a_verdict_and_is_small() -> None:
    assert VERDICTS.keys() == COMMANDS.keys() == {path.stem for path in FOLDER.glob("*.jsonl")}
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir()) < 300_000
