"""The one place where objects are put together from a recipe, and the execution of a built run.

Execution compares the ranks, opens the run's folder and logs, runs the loop and measures it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from etude.core import user_code
from etude.core.board import Board
from etude.core.clock import Clock, Interval
from etude.core.contracts import Algorithm, Collector, EnvSpec, LogWriter, Stateful
from etude.core.errors import RESUMABLE, EtudeError, NonFinite, UsageError, raise_exited
from etude.core.history import History
from etude.core.keys import Key
from etude.core.output import amount, waiting
from etude.core.ranks import (
    ALONE,
    LostRank,
    Ranks,
    ReportedElsewhere,
    named,
    was_restarted,
    world_size,
)
from etude.core.trees import Tree
from etude.core.user_code import differing
from etude.models.networks import is_image
from etude.models.policies import BasePolicy, make_policy
from etude.planning import recipes
from etude.planning.plan import Plan, counted, make_curriculum
from etude.planning.recipe import Learner, Recipe, Resolved, code_roots, metrics_of
from etude.rollout.local import NoCollector, OverlappedCollector, Workers
from etude.runs import files, manifest
from etude.runs.changes import CHANGES
from etude.runs.checkpoint import explain_mismatch
from etude.runs.documents import encode_sealed
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import DiskHistory, MetricsLog
from etude.training.evaluation import AnyEvaluator, Evaluator
from etude.training.logs.outputs import LOSS_BATCHES, LOSS_BATCHES_OF_PICTURES, Outputs, open_logs
from etude.training.loop import Callback, Loop, StopAtSuccess, Stopwatch
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
    folder.published.report_to(say)
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
        # Numbered among themselves: what the screen shows is not the same in every resume.
        stateful = [callback for callback in callbacks if isinstance(callback, Stateful)]
        state |= {f"callback-{i}-{type(each).__name__}": each for i, each in enumerate(stateful)}
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


T = TypeVar("T")
S = TypeVar("S")


def joined() -> AbstractContextManager[Ranks]:
    """The ranks that torchrun started; without torchrun, this process alone."""
    if world_size() == 1:
        return nullcontext(ALONE)
    from etude.training.distributed import connected

    return connected(world_size())


def compare_recipes(recipe: Recipe, ranks: Ranks) -> None:
    """Refuse ranks with another recipe than the first."""
    if not ranks.differing(lambda: recipes.digest(recipe)):
        return
    first = ranks.from_first(lambda: recipe.model_dump(mode="json"))
    refused, allowed = recipes.changes(recipes.validated(first, "the recipe of rank 0"), recipe)
    for rank, found in enumerate(ranks.gather(["; ".join([*refused, *allowed])])):
        if found:
            raise UsageError(
                f"Rank {rank} has another recipe than rank 0: {found} there. Start all ranks with "
                "the same command and the same files."
            )


def compare_bits(ranks: Ranks) -> None:
    """Refuse ranks that compute other bits than the first, whose weights would drift apart."""
    if others := ranks.differing(manifest.standard_digest):
        cpus = ranks.gather([manifest.cpu_name()])
        raise UsageError(
            f"Rank 0, on {cpus[0]}, computes other bits than {named(others)}, on "
            f"{cpus[others[0]]}: start ranks on machines of one type, with the same versions of "
            "all libraries and the same environment variables."
        )


def compare_hashes(mine: dict[str, str], ranks: Ranks) -> None:
    """Refuse ranks whose {name of code: hash} differs from the first's."""
    first = ranks.from_first(lambda: mine)
    for rank, names in enumerate(ranks.gather([differing(first, mine)])):
        if names:
            raise UsageError(
                f"Rank {rank} computes with other code than rank 0: {', '.join(names)}. Install "
                "the same files and versions for all ranks."
            )


def refuse_to_repeat(folder: RunFolder, clock: Clock) -> None:
    """Refuse a restart by torchrun that would repeat a number that is not finite."""
    found = folder.last_failure()
    if not was_restarted() or found is None:
        return
    try:
        context = json.loads((found / "context.json").read_text())
        again = context["counters"]["now"]["iterations"] >= clock.now.iterations
        refused = context["error"] == NonFinite.__name__ and again
    except (OSError, ValueError, KeyError, TypeError):
        return
    if refused:
        fault = EtudeError(
            f"torchrun has restarted this run after a number that was not finite (see {found})."
            f" A run is exact, so the same would happen again: change its cause, then "
            f"`etude resume {folder.name}`."
        )
        fault.exit_code = NonFinite.exit_code
        raise fault


Say = Callable[[str], None]
SUMMARY = "summary.json"
MODEL = "the simulated model"


def silent(text: str) -> None:
    """Print nothing."""


def compare(ranks: Ranks, recipe: Recipe | None = None) -> None:
    """Refuse ranks that have another recipe than the first, or compute other bits."""
    if ranks.size > 1:
        if recipe is not None:
            compare_recipes(recipe, ranks)
        compare_bits(ranks)


def compare_code(ranks: Ranks, run: Resolved) -> None:
    """Refuse ranks with other code or another simulated model than the first."""
    if ranks.size > 1:
        compare_hashes(
            {**user_code.compute_hashes(code_roots(run.recipe)), MODEL: run.spec.model}, ranks
        )


def open_folder(ranks: Ranks, make: Callable[[], RunFolder]) -> RunFolder:
    """The run's folder: the first rank makes or opens it, the others open it to read."""

    def first() -> tuple[RunFolder, str]:
        folder = make()
        return folder, str(folder.path.absolute())

    folder, path = on_first(ranks, first)
    return folder or RunFolder.open(Path(path), write=False)


def on_first(ranks: Ranks, make: Callable[[], tuple[T, S]]) -> tuple[T | None, S]:
    """Call `make` on the first rank: its first result for this rank only (None on the others), its
    second one, which is plain data, for all ranks. Errors are reported once."""
    made: T | None = None

    def first() -> S:
        nonlocal made
        made, shared = make()
        return shared

    shared = ranks.from_first(first)
    return made, shared


def outputs_of(
    run: Resolved, folder: RunFolder, console: bool | None, outputs: Outputs, ranks: Ranks
) -> Outputs:
    """The logs of a run and the caller's; only the first rank has any."""
    if not ranks.is_first:
        return Outputs(silent, silent)
    recipe, iterations, metrics = run.recipe, run.loops.iterations, metrics_of(run.recipe)
    if run.data is None and "is_success" not in run.spec.statistics:
        metrics = tuple(metric for metric in metrics if "success" not in metric.name)
    plain, changed = recipe.model_dump(mode="json"), lambda: recipes.changed(recipe)
    every, title = loss_batches(run), recipes.title(recipe)
    return open_logs(
        recipe.logs,
        folder.path,
        plain,
        metrics,
        iterations,
        console,
        outputs,
        changed,
        every,
        title,
    )


def loss_batches(run: Resolved) -> int:
    """Batches per line of `logs.losses batches`; pictures take longer."""
    observations = run.deployed.observations  # type: ignore[attr-defined]
    sees = any(is_image(spec) for spec in observations.values())
    return LOSS_BATCHES_OF_PICTURES if sees else LOSS_BATCHES


def device_line(run: Resolved) -> str:
    """The devices of a run, as a sentence."""
    learner, device = run.recipe.learner, run.device
    where = (
        "the CPU" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    )
    line = f"Device: learning on {where} with {amount(learner.threads, 'thread')}"
    if not run.num_groups:
        return f"{line}."
    config = run.recipe.collector
    return f"{line}, rollouts on the CPU with {amount(config.threads, 'thread')}."


class Interrupted(EtudeError):
    """A signal ended the run: between two iterations, after a save, or before the first one."""

    exit_code = RESUMABLE

    def __init__(self, name: str, what: str = "Stopped and saved.") -> None:
        super().__init__(f"{what} Continue with: etude resume {name}")


def execute(parts: Parts, folder: RunFolder, say: Say) -> None:
    """Run the loop; a failure leaves the last good checkpoint and a report."""
    loop, ranks = parts.loop, parts.ranks
    try:
        with loop.stop:
            finished = loop.run(DiskHistory.so_far(folder.metrics) if ranks.is_first else History())
    except (LostRank, ReportedElsewhere):
        raise  # not a failure of this run that a resume should report
    except (Exception, SystemExit) as error:
        if ranks.is_first:  # which also raises failures of other ranks
            from etude.runs.failures import report_failure

            report_failure(error, loop.clock.state_dict(), folder, say)
        if isinstance(error, SystemExit):
            raise_exited(error, "Code in the run")
        raise
    finally:
        parts.close()
    now = loop.clock.now
    if finished:
        ranks.from_first(lambda: _summarise(parts, folder))
    elif loop.stop.pauses(now.iterations):
        say(f"Paused and saved after {now.iterations:,} iterations, at step {now.timesteps:,}.")
    else:
        raise Interrupted(folder.name) if ranks.is_first else ReportedElsewhere(RESUMABLE)


def _summarise(parts: Parts, folder: RunFolder) -> None:
    """Write summary.json: the counts of the run, in the form of the plan's."""
    loop = parts.loop
    now, rows = loop.clock.now, parts.metrics.num_rows if parts.metrics else 0
    tester, saved = loop.evaluator, loop.saver.num_saved
    counts = counted(now, parts.spec.agents, rows, tester.num_done, tester.num_episodes, saved)
    best = loop.best
    summary = {"counts": counts, "episodes": loop.clock.episodes, "best": best and best[:2]}
    summary["best_step"] = best and best.step
    known = folder.manifest()
    summary["exactness"] = known.get("exactness", "unknown")
    if CHANGES in known:
        summary[CHANGES] = known[CHANGES]
    files.replace_file(folder.path / SUMMARY, [encode_sealed(summary)])


def _step_of(recipe: Recipe) -> str | None:
    """The kind of gradient steps for the manifest; None if they cannot be compiled here."""
    if recipe.learner.step == "eager":
        return "eager"
    from etude.core import compiled

    return compiled.description()


def manifest_of(run: Resolved, plan: Plan, ranks: Ranks) -> Tree:
    """The manifest of a run in this process: exactness, versions, hashes of code and model."""
    recipe, spec = run.recipe, run.spec
    torch.set_num_threads(recipe.learner.threads)
    verdict = "exact" if plan.exactness["exact"] else "not exact"
    return manifest.collect(
        f"{verdict}: {plan.exactness['reason']}",
        {"learner": recipe.learner.threads},
        ranks=ranks.size,
        recipe=recipes.digest(recipe),
        model=spec.model,
        code=user_code.compute_hashes(code_roots(recipe)),
        notes=spec.notes,
        step=_step_of(recipe),
    )
