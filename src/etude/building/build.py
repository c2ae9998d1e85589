"""The one place where objects are put together from a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.algorithms.from_dataset import Offline
from etude.algorithms.off_policy import OffPolicyConfig
from etude.algorithms.on_policy import OnPolicy
from etude.algorithms.replay import Replay
from etude.algorithms.reward_only import RewardOnlyMethod
from etude.core.clock import Clock, Interval, Nest
from etude.core.contracts import (
    Algorithm,
    EnvSpec,
    LogWriter,
    Stateful,
)
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.core.trees import Tree
from etude.metrics.board import Board
from etude.planning.kinds import Method
from etude.planning.loading import Start, load_start
from etude.planning.recipe import Recipe
from etude.runs.checkpoint import fitting
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import MetricsLog
from etude.training.callbacks import Callback, StopAtSuccess
from etude.training.curriculum import (
    Curriculum,
    MotionCurriculum,
    NoCurriculum,
    SuccessCurriculum,
)
from etude.training.loop import Loop
from etude.training.saving import Saver
from etude.training.stop import StopRequest
from etude.training.stopwatch import Stopwatch

METHODS: dict[str, Method] = {
    "ppo": OnPolicy(),
    "sac": Replay(),
    "td3": Replay(),
    "reward-only": RewardOnlyMethod(),
}

HURRY = 5.0
"""Seconds without a sign of life until a rank is given up, where a signal asks the run to end."""


def method_of(recipe: Recipe) -> Method:
    """How the recipe's algorithm is planned and built."""
    config = recipe.algorithm
    if isinstance(config, OffPolicyConfig) and (config.dataset or recipe.env is None):
        return Offline()
    return METHODS[config.kind]


def check_ranks(recipe: Recipe, size: int) -> None:
    """Refuse a number of ranks that cannot share the recipe's shards."""
    if size == 1:
        return
    shards = recipe.learner.shards
    if shards % size:
        fitting = [str(n) for n in range(1, shards + 1) if shards % n == 0]
        several = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if fitting[1:] else fitting[0]
        raise UsageError(
            f"{size:,} ranks cannot share learner.shards {shards:,} evenly: start {several} of "
            "them (torchrun --nproc-per-node), or train a run of other --learner.shards, which "
            "is another result."
        )
    if not method_of(recipe).takes_ranks:
        raise UsageError(
            f"{recipe.algorithm.kind} learns in one process, and {size:,} ranks were started: "
            "start it without torchrun. Ranks share the shards of ppo."
        )
    if recipe.collector.kind != "local":
        raise UsageError(
            f"Each of {size:,} ranks collects with threads of its own: use --collector.kind local, "
            f"or one process with --collector.kind {recipe.collector.kind}."
        )


def nest(recipe: Recipe) -> Nest:
    """The nest of loops; refuses sizes that do not divide."""
    return method_of(recipe).nest(recipe)


@dataclass
class Parts:
    """A built run: the loop and what must be closed after it."""

    loop: Loop
    algorithm: Algorithm
    spec: EnvSpec
    metrics: MetricsLog | None
    """The first rank's."""
    ranks: Ranks
    close: Callable[[], None]


class RowsLog:
    """Log rows into metrics.jsonl."""

    def __init__(self, metrics: MetricsLog) -> None:
        self._metrics = metrics

    def begin(self, history: list[dict[str, Any]]) -> None:
        """The file has been cut back already, with the rest of the run's state."""

    def write(self, row: dict[str, Any]) -> None:
        self._metrics.append(row)

    def close(self) -> None:
        self._metrics.close()


def build(
    recipe: Recipe,
    folder: RunFolder,
    logs: Sequence[LogWriter] = (),
    callbacks: Sequence[Callback] = (),
    on_phase: Callable[[str], None] = lambda phase: None,
    say: Callable[[str], None] = lambda text: None,
    ranks: Ranks = ALONE,
) -> Parts:
    """All parts of a run, or this rank's of them, connected, at the state of a fresh start."""
    torch.set_num_threads(recipe.learner.threads)
    stopwatch = Stopwatch(on_phase)
    stop = StopRequest(recipe.checkpoint.grace, stopwatch.doing)
    ranks = ranks.adding(
        exactly=recipe.learner.reduce == "exact",
        patience=lambda: HURRY if stop.requested else recipe.learner.timeout,
    )
    key, clock = Key(recipe.seed), Clock(nest(recipe))
    assembly = method_of(recipe).assemble(recipe, key, folder, clock, ranks)
    algorithm, collector, evaluator, spec = assembly
    collector.report_to(say, folder.mark_not_exact)
    board = Board(spec.statistics)
    curriculum = make_curriculum(recipe, spec)
    state: dict[str, Stateful] = {
        "clock": clock,
        "collector": collector,
        "algorithm": algorithm,
        "curriculum": curriculum,
        "evaluator": evaluator,
        "board": board,
    }
    metrics = None
    if ranks.is_first:
        metrics = state["metrics"] = folder.metrics_log(say)
        logs = [RowsLog(metrics), *logs]
        if recipe.evaluation.stop_at_success is not None:
            callbacks = [*callbacks, StopAtSuccess(recipe.evaluation.stop_at_success)]
        state |= _with_memory(callbacks)
    loop = Loop(
        key=key,
        clock=clock,
        collector=collector,
        algorithm=algorithm,
        evaluator=evaluator,
        evaluate_every=Interval.parse(recipe.evaluation.every),
        curriculum=curriculum,
        board=board,
        logs=logs,
        saver=Saver(
            folder, recipe.checkpoint, algorithm, state, ranks, recipe.learner.compare_every
        ),
        callbacks=callbacks,
        stopwatch=stopwatch,
        ranks=ranks,
        stop=stop,
    )

    closing = ExitStack()  # Closes the rest where one of them fails.
    closers = (evaluator.close, algorithm.close, collector.close)
    for close in (*closers, *(log.close for log in reversed(loop.logs))):
        closing.callback(close)
    return Parts(loop, algorithm, spec, metrics, ranks, closing.close)


def _with_memory(callbacks: Sequence[Callback]) -> dict[str, Stateful]:
    """The callbacks that are part of a checkpoint, by name."""
    return {
        f"callback-{i}-{type(callback).__name__}": callback
        for i, callback in enumerate(callbacks)
        if isinstance(callback, Stateful)
    }


def make_curriculum(recipe: Recipe, spec: EnvSpec) -> Curriculum:
    """The curriculum a recipe asks for."""
    if recipe.motions.enabled:
        if recipe.curriculum.enabled:
            raise UsageError(
                "A run has one curriculum: leave out --curriculum.enabled or --motions.enabled."
            )
        if not spec.motions:
            raise UsageError(
                "This environment has no motions to choose from: leave out --motions.enabled."
            )
        if not {"motion", "is_success"} <= set(spec.statistics):
            raise UsageError(
                'This environment does not report "motion" and "is_success" of its episodes, which '
                "--motions.enabled goes by: add them to its statistics."
            )
        return MotionCurriculum(recipe.motions, len(spec.motions))
    if not recipe.curriculum.enabled:
        return NoCurriculum()
    if "is_success" not in spec.statistics:
        raise UsageError("This environment does not report success, which a curriculum goes by.")
    return SuccessCurriculum(recipe.curriculum)


def start_policy(recipe: Recipe, algorithm: Algorithm) -> None:
    """Begin a run with the policy of another, where the recipe says so."""
    if recipe.start_from is not None:
        start = checked_start(recipe, algorithm.policy_parts()[1])
        with fitting(start.path, "state"):
            algorithm.start_from(start.arrays, start.training)


def checked_start(recipe: Recipe, own: Tree) -> Start:
    """What `start_from` names, for a policy of the contract `own`; refused where that differs.

    The contract holds the policy's kind, which belongs to one algorithm: so training state, where
    there is any, is that algorithm's.
    """
    path = Path(recipe.start_from or "")
    start = load_start(path)
    for part in ("observations", "action", "policy"):
        there, here = (json.dumps(c.get(part), sort_keys=True) for c in (start.contract, own))
        if there != here:
            raise UsageError(
                f"The policy in {path} was made for other {part} than this recipe has: "
                f"{there[:300]} and not {here}. Give this recipe the same, or start without it."
            )
    return start
