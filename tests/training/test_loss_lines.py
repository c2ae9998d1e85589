"""The loss of a learned reward, said for iterations and for every so many batches."""

from __future__ import annotations

from typing import Any, cast

from etude.core.clock import Clock, Loops
from etude.core.contracts import BatchMetrics
from etude.rl.rewards.rrd import METRICS
from etude.training.logs.console import LossLines
from etude.training.loop import Context


def lines(losses: list[list[float]], every: int | None) -> list[str]:
    """What is said of iterations with these losses."""
    said: list[str] = []
    clock = Clock(Loops(1, 1, len(losses), 0, len(losses[0])))
    context = Context(clock, cast(Any, None), cast(Any, None))
    shown = LossLines(said.append, METRICS[0], every)
    for iteration in losses:
        for loss in iteration:
            shown.batch_end(context, BatchMetrics({"train/R_loss": loss}))
        clock.advance(len(iteration), 0)
        shown.iteration_end(context, [])
    return said


def test_an_iteration_is_the_mean_of_its_batches() -> None:
    assert lines([[1.0, 2.0, 6.0], [4.0, 4.0, 1.0]], None) == [
        "  iteration 1: R loss 3, mean of 3 batches",
        "  iteration 2: R loss 3, mean of 3 batches",
    ]


def test_so_many_batches_are_counted_over_the_run() -> None:
    said = lines([[1.0, 2.0, 6.0], [4.0, 4.0, 1.0]], 2)
    assert [line for line in said if "batch " in line] == [
        "    batch 2: R loss 1.5",
        "    batch 4: R loss 5",
        "    batch 6: R loss 2.5",
    ]


def test_what_learns_no_reward_says_nothing() -> None:
    said: list[str] = []
    shown, clock = LossLines(said.append, METRICS[0], 1), Clock(Loops(1, 1, 1, 0, 1))
    context = Context(clock, cast(Any, None), cast(Any, None))
    shown.batch_end(context, BatchMetrics({"train/value_loss": 1.0}))
    shown.iteration_end(context, [])
    assert not said
