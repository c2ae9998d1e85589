"""The one place where objects are put together from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from etude.core.clock import Clock, Interval
from etude.core.contracts import Algorithm, Collector, EnvSpec, LogWriter, Stateful
from etude.core.keys import Key
from etude.core.metrics.board import Board
from etude.core.progress import waiting
from etude.core.ranks import ALONE, Ranks
from etude.models.policies import BasePolicy, make_policy
from etude.planning.plan import make_curriculum
from etude.planning.recipe import Learner, Recipe, Resolved, code_roots, metrics_of
from etude.rollout.local import NoCollector, OverlappedCollector, Workers
from etude.runs.checkpoint import explain_mismatch
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import MetricsLog
from etude.training.callbacks import Callback, StopAtSuccess
from etude.training.evaluation import AnyEvaluator, Evaluator
from etude.training.loop import Loop, Stopwatch
from etude.training.saving import Saver
from etude.training.stop import StopRequest

HURRY = 5.0
"""Seconds without a sign of life until a rank is given up, where a signal asks the run to end."""


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


@waiting("building environments and networks")
def build(
    run: Resolved,
    folder: RunFolder,
    logs: Sequence[LogWriter] = (),
    callbacks: Sequence[Callback] = (),
    on_phase: Callable[[str], None] = lambda phase: None,
    say: Callable[[str], None] = lambda text: None,
    ranks: Ranks = ALONE,
) -> Parts:
    """All parts of a run, or this rank's of them, connected, at the state of a fresh start."""
    recipe, spec = run.recipe, run.spec
    torch.set_num_threads(recipe.learner.threads)
    stopwatch = Stopwatch(on_phase)
    stop = StopRequest(recipe.checkpoint.grace, stopwatch.doing)
    ranks = ranks.adding(
        exactly=recipe.learner.reduce == "exact",
        patience=lambda: HURRY if stop.requested else recipe.learner.timeout,
    )
    key, clock = Key(recipe.seed), Clock(run.loops)
    learner = recipe.algorithm.build(run, key, folder, ranks)
    algorithm = learner.algorithm
    collector, evaluator = make_collection(run, learner, key, clock, ranks)
    collector.report_to(say, folder.mark_not_exact)
    board = Board(spec.statistics, metrics_of(recipe))
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
        logs = [metrics, *logs]
        if recipe.evaluation.stop_at_success is not None:
            callbacks = [*callbacks, StopAtSuccess(recipe.evaluation.stop_at_success)]
        state |= {
            f"callback-{i}-{type(callback).__name__}": callback
            for i, callback in enumerate(callbacks)
            if isinstance(callback, Stateful)
        }
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


def start_policy(recipe: Recipe, algorithm: Algorithm) -> None:
    """Begin a run with the policy of another, where the recipe says so."""
    if recipe.start_from is not None:
        from etude.planning.loading import checked_start

        start = checked_start(recipe, algorithm.policy_parts()[1])
        with explain_mismatch(start.path, "state"):
            algorithm.start_from(start.arrays, start.training)


def make_collection(
    run: Resolved, learner: Learner, key: Key, clock: Clock, ranks: Ranks
) -> tuple[Collector, AnyEvaluator]:
    """The collector that fills the learner's buffers, and the evaluator; this rank's of them."""
    recipe = run.recipe
    if not learner.buffers:
        if learner.evaluator is not None:
            return NoCollector(*learner.dataset), learner.evaluator
        workers = Workers(recipe.collector.threads, recipe.collector.deadline)
        policy = make_policy(recipe.policy, run.spec, None)
        evaluator = make_evaluator(recipe, key, workers, policy)
        return NoCollector(*learner.dataset, workers), evaluator
    workers, config = Workers(recipe.collector.threads, recipe.collector.deadline), recipe.collector
    new_policy = partial(make_policy, recipe.policy, run.spec, None)
    collector = config.build(
        partial(recipe.task.make, config.envs_per_group, config.engine_threads),
        new_policy,
        learner.buffers,
        key.child("collect"),
        workers,
        ranks.part(config.num_groups),
        run.exactness.exact,
        code_roots(recipe),
    )
    if config.lag:
        collector = OverlappedCollector(collector, lambda i: i < clock.loops.iterations)
    tester = learner.evaluator
    if tester is None and ranks.is_first:
        tester = make_evaluator(recipe, key, workers, new_policy())
    if ranks.size == 1 and tester is not None:
        return collector, tester
    from etude.training.distributed import FirstRankEvaluator, SharedCollector

    return SharedCollector(ranks, collector), FirstRankEvaluator(ranks, tester)


@waiting("building environments for evaluation")
def make_evaluator(recipe: Recipe, key: Key, workers: Workers, policy: BasePolicy) -> Evaluator:
    """An evaluator with new environments."""
    config, task = recipe.evaluation, recipe.task.for_evaluation()
    envs = [
        task.make(config.envs_per_group, recipe.collector.engine_threads)
        for _ in range(config.num_envs // config.envs_per_group)
    ]
    return Evaluator(envs, policy, config.episodes, key.child("evaluate"), workers)
