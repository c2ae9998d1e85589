"""Timing of a few iterations, for the expected time of a run."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from etude.building.build import Parts, build
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.core.output import amount, waiting
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.models.policies import make_policy
from etude.planning import recipes
from etude.planning.plan import Plan
from etude.planning.recipe import Resolved
from etude.rollout.group import Group
from etude.runs.folder import RunFolder
from etude.training.evaluation import Evaluator

_MEASUREMENT = 60.0
"""Seconds that a measurement may take."""


class _OutOfTime(EtudeError):
    """A measurement exceeded its time limit."""


@waiting("timing a few iterations")
def measured(run: Resolved, plan: Plan, rounds: int = 3, limit: float = _MEASUREMENT) -> Plan:
    """The plan with the expected seconds of the run, from iterations in a temporary folder.

    What does not end within `limit` seconds is extrapolated from the part that was timed; a note
    says how much that was. Evaluation is timed on an untrained policy, which may take longer than
    a trained one.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run", recipes.dump(run.recipe), "", {}, {})
        parts = build(run, folder)
        try:
            timings, note = _timed_iterations(run, parts, rounds, begin + 0.6 * limit)
            test, tested = _timed_evaluation(parts, begin + 0.9 * limit)
            start = time.perf_counter()
            parts.loop.saver.save_if_due(parts.loop.clock, urgent=True)
            save = time.perf_counter() - start
        finally:
            parts.close()
            folder.close()
    loops = run.loops
    learning = max(loops.iterations - loops.idle_iterations, 0)
    counts = {"collect": loops.iterations, "train": learning}
    # The first of several rounds also fills caches and is left out.
    seconds = {k: float(np.median(v[1:] or v)) * counts[k] for k, v in timings.items() if v}
    seconds |= {
        "test": test * plan.counts["evaluations"],
        "save": save * plan.counts["checkpoints"],
    }
    spent = f"Measured in {time.perf_counter() - begin:.0f} s: {note}{tested}."
    seconds["total"] = sum(seconds.values())
    return replace(plan, seconds=seconds, notes=[*plan.notes, spent])


def _timed_iterations(
    run: Resolved, parts: Parts, rounds: int, end: float
) -> tuple[dict[str, list[float]], str]:
    """({phase: seconds of an iteration, in every round}, what was timed, as text) until `end`."""
    timings: dict[str, list[float]] = {"collect": [], "train": []}
    loop, total = parts.loop, max(run.loops.batches_per_iteration, 1)
    expected = _expected_collection(run)
    if time.perf_counter() + expected > end:
        timings["collect"].append(expected)
        return timings, "2 steps of one group; an iteration does not fit, and learning is left out"
    before = 0.0
    loop.clock.skip_idle()
    first = loop.clock.now.iterations
    for i in range(rounds + 1):
        start = time.perf_counter()
        if i and 2 * start - before > end:
            break
        before = start
        fragments = loop.collector.collect(loop.algorithm.broadcast(loop.clock), first + i)
        middle = time.perf_counter()
        loop.algorithm.ingest(fragments, loop.clock)
        done, is_whole = 0, True
        for _ in loop.algorithm.batches(loop.clock, loop.key.child("measure", i)):
            done += 1
            if done < total and time.perf_counter() > end:
                is_whole = False
                break
        timings["collect"].append(middle - start)
        train = time.perf_counter() - middle
        if not is_whole:
            timings["train"].append(train * total / done)
            return timings, f"{amount(i, 'iteration')} and {done:,} of {total:,} batches of another"
        loop.algorithm.end_iteration()
        loop.clock.advance(0, 0)
        timings["train"].append(time.perf_counter() - middle)
    return timings, amount(len(timings["train"]), "iteration")


def _expected_collection(run: Resolved) -> float:
    """Seconds of an iteration's collection by two steps of one group; 0 without collection."""
    if not run.num_groups:
        return 0.0
    config, key = run.recipe.collector, Key(run.recipe.seed).child("measure")
    env = run.recipe.task.make(config.envs_per_group, config.engine_threads)
    try:
        policy, group = make_policy(run.recipe.policy, env.spec, None), Group(env)
        two = SegmentBuffer(BufferSpec(env.spec, policy.state_specs, env.num_envs, 2, 1))
        begun = group.begin(policy, key)
        start = time.perf_counter()
        group.rollout(policy, begun, key, 0, two.part(slice(0, env.num_envs)))
        step = 0.5 * (time.perf_counter() - start)
    finally:
        env.close()
    steps = run.loops.steps_per_iteration // config.num_envs
    return step * steps * -(-config.num_groups // max(config.threads, 1))


def _timed_evaluation(parts: Parts, end: float) -> tuple[float, str]:
    """(seconds of an evaluation, the part that was played, as text) until `end`."""
    loop = parts.loop
    evaluator, broadcast = loop.evaluator, loop.algorithm.broadcast(loop.clock)
    start, played = time.perf_counter(), 0.0

    def tick(done: float) -> None:
        nonlocal played
        played = done
        if time.perf_counter() > end:
            raise _OutOfTime

    if not isinstance(evaluator, Evaluator):
        evaluator.evaluate(broadcast)
        return time.perf_counter() - start, ""
    with suppress(_OutOfTime):
        evaluator.episodes(broadcast, broadcast.version, tick=tick)
        return time.perf_counter() - start, ""
    total, seconds = evaluator.num_per_evaluation, time.perf_counter() - start
    return seconds * total / max(played, 1e-3), f"; {played:.1f} of {total:,} episodes"
