"""How long a run takes: a few of its iterations are made and timed."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from etude.building.build import build
from etude.core.progress import waiting
from etude.planning.plan import Plan
from etude.planning.recipe import Resolved, dump
from etude.runs.folder import RunFolder

_LONGEST_MEASUREMENT = 60.0
"""Seconds after which no further iteration is timed, once there are two."""


@waiting("timing a few iterations")
def measured(run: Resolved, plan: Plan, rounds: int = 3) -> Plan:
    """The plan with the expected seconds of the whole run, from a few real iterations in a folder
    that is thrown away.

    Evaluation is timed on an untrained policy, whose episodes last as long as they can.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run", dump(run.recipe), "", {}, {})
        parts = build(run, folder)
        loop = parts.loop
        timings: dict[str, list[float]] = {"collect": [], "train": []}
        begin = time.perf_counter()
        loop.clock.skip_idle()
        first = loop.clock.now.iterations
        for i in range(rounds + 1):
            start = time.perf_counter()
            if i > 1 and start - begin > _LONGEST_MEASUREMENT:
                break
            fragments = loop.collector.collect(loop.algorithm.broadcast(loop.clock), first + i)
            middle = time.perf_counter()
            loop.algorithm.ingest(fragments, loop.clock)
            for _ in loop.algorithm.batches(loop.clock, loop.key.child("measure", i)):
                pass
            loop.algorithm.end_iteration()
            loop.clock.advance(0, 0)
            timings["collect"].append(middle - start)
            timings["train"].append(time.perf_counter() - middle)
        start = time.perf_counter()
        loop.evaluator.evaluate(loop.algorithm.broadcast(loop.clock))
        test = time.perf_counter() - start
        start = time.perf_counter()
        loop.saver.save_if_due(loop.clock, urgent=True)
        save = time.perf_counter() - start
        parts.close()
        folder.close()
    # The first round warms caches and is not typical.
    loops = run.loops
    learning = max(loops.iterations - loops.idle_iterations, 0)
    counts = {"collect": loops.iterations, "train": learning}
    seconds = {k: float(np.median(v[1:])) * counts[k] for k, v in timings.items()}
    seconds |= {
        "test": test * plan.counts["evaluations"],
        "save": save * plan.counts["checkpoints"],
    }
    return replace(plan, seconds={**seconds, "total": sum(seconds.values())})
