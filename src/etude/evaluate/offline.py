"""A policy that was learned from a dataset, evaluated on the episodes held out of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.core.contracts import Broadcast
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE
from etude.evaluate.evaluation import keep_metrics, new_folder
from etude.planning.recipe import Recipe
from etude.planning.resolve import resolve
from etude.runs import checkpoint
from etude.runs.folder import RunFolder


def examine(recipe: Recipe, path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Evaluate a run's newest policy and critics on the episodes held out; their metrics."""
    newest = checkpoint.newest_verified(path / "checkpoints", say, repair=False)
    if newest is None:
        raise UsageError(f"{path} has no checkpoint yet; `etude resume {path}` continues it.")
    arrays, _, training = checkpoint.load_training(newest)
    run = resolve(recipe)
    data = run.data
    folder = RunFolder.open(path, write=False)
    made = recipe.algorithm.build(run, Key(recipe.seed), folder, ALONE)
    learner, evaluator = made.algorithm, made.evaluator
    assert evaluator is not None  # where there is no environment
    with checkpoint.fitting(newest, "state"):
        learner.load_policy(arrays)
        learner.load_state_dict(training["algorithm"])
    metrics = evaluator.evaluate(Broadcast(0, {})).metrics
    say(f"{data.held_out.num_episodes:,} episodes of {data.store.path} that were held out")
    data.store.close()
    return keep_metrics(recipe, metrics, new_folder(path, checkpoint.step_of(newest)), say)
