"""The loop. Read it top to bottom: it is what a run does.

State is defined only at iteration boundaries, where things happen in this order: the update, the
normaliser, evaluation, the curriculum, log row, epoch summary, and the checkpoint last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from etude.core.clock import Clock, Interval
from etude.core.contracts import Algorithm, BatchMetrics, Collector, LogWriter
from etude.core.history import History
from etude.core.keys import Key
from etude.core.metrics.board import Board, epoch_means
from etude.core.metrics.declared import ELAPSED
from etude.core.ranks import ALONE, Ranks
from etude.training.callbacks import Callback, Context
from etude.training.curriculum import Curriculum
from etude.training.evaluation import AnyEvaluator
from etude.training.saving import Saver
from etude.training.stop import StopRequest
from etude.training.stopwatch import Stopwatch, Usage


def gradient_steps(algorithm: Algorithm, clock: Clock, key: Key) -> Iterable[BatchMetrics]:
    """The gradient steps of an iteration; a run's first iterations only collect and have none."""
    return () if clock.only_collects else algorithm.batches(clock, key)


@dataclass
class Loop:
    """Everything a run is made of, met only through the contracts."""

    key: Key
    clock: Clock
    collector: Collector
    algorithm: Algorithm
    evaluator: AnyEvaluator
    evaluate_every: Interval
    curriculum: Curriculum
    board: Board
    logs: Sequence[LogWriter]
    saver: Saver
    callbacks: Sequence[Callback]
    stopwatch: Stopwatch
    ranks: Ranks = ALONE
    usage: Usage = field(default_factory=Usage)
    stop: StopRequest = field(default_factory=StopRequest)

    def run(self, history: History = History()) -> bool:  # noqa: B008
        """Train until the clock has run down; False when a signal or a pause ended it earlier.

        `history` is the log rows a resumed run keeps.
        """
        context = Context(self.clock, self.algorithm, self.board)
        self.stopwatch.begin(self.clock.now.timesteps, history.last.get(ELAPSED, 0.0))
        for log in self.logs:
            log.begin(history)
        for callback in self.callbacks:
            callback.run_start(context)
        while not self.clock.finished:
            self._iterate(context)
            self._agree()
            self._test(context)
            self._agree()
            self.board.record(self.curriculum.turn(self.clock))
            self._log(context)
            with self.stopwatch.phase("save"):
                saved = self.saver.save_if_due(self.clock, urgent=self._agree())
            self.stop.boundary(self.clock.now.timesteps, saved)
            # A signal that came too late for this boundary is met at the next, where it is saved.
            if saved and self._agree() and not self.clock.finished:
                return False
        for callback in self.callbacks:
            callback.run_end(context)
        return True

    def _agree(self) -> bool:
        """Follow the first rank's callbacks, which may end the run; whether it is to stop here."""
        is_due = self.stop.is_due(self.clock.now.iterations)
        ended, stopping = zip(*self.ranks.gather([(self.clock.ended_early, is_due)]), strict=True)
        if any(ended) and not self.clock.ended_early:
            self.clock.end_here()
        return any(stopping)

    def _iterate(self, context: Context) -> None:
        """Fill the buffer, update from it, then let the normaliser take in what was collected."""
        iteration = self.clock.now.iterations
        with self.stopwatch.phase("collect"):
            broadcast = replace(
                self.algorithm.broadcast(self.clock), curriculum=self.curriculum.broadcast()
            )
            fragments = self.collector.collect(broadcast, iteration)
        updates = 0
        with self.stopwatch.phase("train"):
            self.board.record(self.algorithm.ingest(fragments, self.clock))
            key = self.key.child("update", iteration)
            for metrics in gradient_steps(self.algorithm, self.clock, key):
                updates += 1
                self.board.record(metrics.values)
                for callback in self.callbacks:
                    callback.batch_end(context, metrics)
            self.board.record(self.algorithm.end_iteration())
        reports = self.ranks.gather(
            [(f.episodes, len(f.finals.envs), f.seconds) for f in fragments]
        )
        self.board.record(self.curriculum.update([episodes for episodes, _, _ in reports]))
        for episodes, _, seconds in reports:
            self.board.record_episodes(episodes)
            self.stopwatch.split("collect", seconds)
        self.clock.advance(updates, sum(count for _, count, _ in reports))
        self.board.record({"train/n_updates": float(self.clock.now.updates)})
        for callback in self.callbacks:
            callback.iteration_end(context, fragments)

    def _test(self, context: Context) -> None:
        """Evaluate when due, and at the run's end; tell the curriculum, and remember the best."""
        if not (self.clock.is_due(self.evaluate_every) or self.clock.finished):
            return
        with self.stopwatch.phase("test"):
            result = self.evaluator.evaluate(self.algorithm.broadcast(self.clock))
        self.board.record(result.metrics)
        self.curriculum.evaluated(result.episodes)
        if result.is_best:
            self.saver.want_best(self.clock)
        for callback in self.callbacks:
            callback.evaluation_end(context, result.metrics)

    def _log(self, context: Context) -> None:
        """A cycle's end is one log row; an epoch's last row also has the means of its losses."""
        if not self.clock.cycle_ended:
            return
        row = self._row(self.board.read_cycle())
        summary = self.board.read_epoch() if self.clock.epoch_ended else {}
        row |= epoch_means(summary)
        for log in self.logs:
            log.write(row)
        for callback in self.callbacks:
            callback.cycle_end(context, row)
        if self.clock.epoch_ended:
            for callback in self.callbacks:
                callback.epoch_end(context, summary)

    def _row(self, metrics: dict[str, float]) -> dict[str, float]:
        now = self.clock.now
        return {
            "epoch": now.epochs,
            "cycle": now.cycles,
            "iterations": now.iterations,
            "timesteps": now.timesteps,
            "updates": now.updates,
            "episodes": self.clock.episodes,
            **metrics,
            **self.stopwatch.read(now.timesteps, now.iterations),
            **self.usage.read(),
            **self.collector.status(),
        }
