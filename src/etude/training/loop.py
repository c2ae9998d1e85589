"""The training loop. Read it top to bottom: it is what a run does.

State is defined only at the ends of iterations, with this order: the update, the normaliser, the
curriculum, evaluation, log row, epoch summary, and the checkpoint last.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from etude.core.board import Board, epoch_means
from etude.core.clock import Clock, Interval
from etude.core.contracts import Algorithm, BatchMetrics, Collector, Fragment, LogWriter
from etude.core.history import History
from etude.core.keys import Key
from etude.core.metrics import ELAPSED, Best, step_of
from etude.core.output import waiting
from etude.core.ranks import ALONE, Ranks
from etude.training.curriculum import Curriculum
from etude.training.evaluation import AnyEvaluator
from etude.training.saving import Saver
from etude.training.stop import StopRequest


def gradient_steps(algorithm: Algorithm, clock: Clock, key: Key) -> Iterable[BatchMetrics]:
    """The gradient steps of an iteration; a run's first iterations only collect and have none."""
    return () if clock.only_collects else algorithm.batches(clock, key)


@dataclass
class Loop:
    """All parts of a run, used through their interfaces only (`core/contracts.py`)."""

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
    usage: Usage = field(default_factory=lambda: Usage())
    stop: StopRequest = field(default_factory=StopRequest)

    def run(self, history: History = History()) -> bool:  # noqa: B008
        """Train until the clock has finished; False if a signal or a pause ended it earlier.

        history: the log rows that a resumed run keeps.
        """
        context = Context(self.clock, self.algorithm, self.board, lambda: self.best)
        self.stopwatch.begin(self.clock.now.timesteps, history.last.get(ELAPSED, 0.0))
        for log in self.logs:
            log.begin(history)
        for callback in self.callbacks:
            callback.run_start(context)
        while not self.clock.finished:
            self.iteration(context)
            with self.stopwatch.phase("save"):
                saved = self.saver.save_if_due(self.clock, urgent=self._agree())
            self.stop.boundary(self.clock.now.timesteps, saved)
            # A signal that comes after the save is handled at the end of the next iteration.
            if saved and self._agree() and not self.clock.finished:
                return False
        for callback in self.callbacks:
            callback.run_end(context)
        return True

    def iteration(self, context: Context) -> None:
        """One iteration, from its rollout to its log row; a checkpoint may follow it."""
        self._iterate(context)
        self._agree()
        self._test(context)
        self._agree()
        self._log(context)

    @property
    def best(self) -> Best | None:
        """The evaluation of the policy that is kept as the best, from two checkpointed states."""
        score, step = self.evaluator.best, self.saver.best_step
        return None if score is None or step is None else Best(*score, step)

    def _agree(self) -> bool:
        """Apply the end of the run by a callback to all ranks; returns whether to stop here."""
        is_due = self.stop.is_due(self.clock.now.iterations)
        ended, stopping = zip(*self.ranks.gather([(self.clock.ended_early, is_due)]), strict=True)
        if any(ended) and not self.clock.ended_early:
            self.clock.end_here()
        return any(stopping)

    def _iterate(self, context: Context) -> None:
        """Collect a rollout, train on it, then update the normaliser with it."""
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
        """Evaluate when due and at the end of the run; keep the best."""
        if not (self.clock.is_due(self.evaluate_every) or self.clock.finished):
            return
        with self.stopwatch.phase("test"):
            result = self.evaluator.evaluate(self.algorithm.broadcast(self.clock))
        self.board.record(result.metrics)
        if result.is_best:
            self.saver.want_best(self.clock)
        for callback in self.callbacks:
            callback.evaluation_end(context, result.metrics)

    def _log(self, context: Context) -> None:
        """At the end of a cycle, write a log row; the last of an epoch also has epoch means."""
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


_ACTIVITIES = {
    "collect": "collecting",
    "train": "updating",
    "test": "evaluating",
    "save": "writing a checkpoint to the disk",
    "": "writing logs and calling callbacks",
}
"""The activity in each phase; "" is between phases."""


class Stopwatch:
    """Seconds per phase (collect, train, test, save) since the last reading."""

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._splits: dict[tuple[str, str], float] = {}
        self._phase, self._phase_start = "", time.perf_counter()
        self._start = time.perf_counter()
        self._steps_read = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._phase, self._phase_start = name, start
        self._on_phase(name)
        try:
            with waiting(_ACTIVITIES.get(name, name)):
                yield
        finally:
            self._on_phase("")
            self._phase, self._phase_start = "", time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def doing(self) -> str:
        """Describe the present activity and its duration; any thread may call this."""
        name, since = self._phase, self._phase_start
        return f"{_ACTIVITIES.get(name, name)} for {time.perf_counter() - since:.0f} s"

    def split(self, phase: str, seconds: dict[str, float]) -> None:
        """Add seconds of threads in a phase, by what they were spent on."""
        for name, value in seconds.items():
            key = (phase, name)
            self._splits[key] = self._splits.get(key, 0.0) + value

    def begin(self, timesteps: int, elapsed: float = 0.0) -> None:
        """Count steps and seconds from here; elapsed: seconds before a resume."""
        self._start = time.perf_counter() - elapsed
        self._steps_read = timesteps

    def read(self, timesteps: int, iterations: int) -> dict[str, float]:
        """The `time/` columns of a log row.

        `time/fps` is steps per second of collecting and training, without evaluations, checkpoints
        and callbacks. `time/collect_fps` is steps per second of collecting alone.
        """
        steps, self._steps_read = timesteps - self._steps_read, timesteps
        collect, train = (self._seconds.get(name, 0.0) for name in ("collect", "train"))
        row = {
            "time/fps": steps / max(collect + train, 1e-9),
            "time/collect_fps": steps / max(collect, 1e-9),
            "time/total_timesteps": float(timesteps),
            "time/iterations": float(iterations),
            "time/time_elapsed": time.perf_counter() - self._start,
        }
        row |= {f"time/{name}": seconds for name, seconds in sorted(self._seconds.items())}
        for (phase, name), seconds in sorted(self._splits.items()):
            # Threads run in parallel: their seconds are scaled to wall-clock time.
            together = sum(s for (other, _), s in self._splits.items() if other == phase)
            row[f"time/{name}"] = seconds / max(together, 1e-9) * self._seconds.get(phase, 0.0)
        self._seconds, self._splits = {}, {}
        return row


class Usage:
    """CPU, memory and GPU use since the last reading."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, float]:
        """The `system/` columns of a log row."""
        wall, cpu = time.perf_counter(), _cpu_seconds()
        cores = (cpu - self._cpu) / max(wall - self._wall, 1e-9)
        self._wall, self._cpu = wall, cpu
        row = {"system/cpu_cores": cores, "system/memory_mib": _resident_bytes() / 2**20}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            row["system/gpu_memory_mib"] = (total - free) / 2**20
        return row


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _resident_bytes() -> int:
    """Resident memory in bytes; without /proc, its peak."""
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Context:
    """The state of a run that a callback can read, and the board on which it records."""

    clock: Clock
    algorithm: Algorithm
    board: Board
    find_best: Callable[[], Best | None] = lambda: None

    @property
    def best(self) -> Best | None:
        """The evaluation of the policy that is kept as the best so far."""
        return self.find_best()

    def stop(self) -> None:
        """End the run at this boundary, with a last evaluation, log row and checkpoint."""
        self.clock.end_here()

    def record(self, name: str, value: float) -> None:
        """Record a number for the next log row."""
        self.board.record({name: value})


class Callback:
    """Hooks of the loop: override those that you need. A callback with state is also `Stateful`.

    With several ranks only the first one has callbacks; its `fragments` are of its own groups.
    """

    def run_start(self, context: Context) -> None: ...

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None: ...

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None: ...

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None: ...

    def cycle_end(self, context: Context, row: dict[str, float]) -> None: ...

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None: ...

    def run_end(self, context: Context) -> None: ...


class StopAtSuccess(Callback):
    """End the run once an evaluation reaches a success rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        if metrics.get("eval/success_rate", 0.0) >= self.rate:
            context.stop()


class CurveRecorder(Callback):
    """Keep curves in memory: `recorder.curve("eval/success_rate") -> (steps, values)`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        self.rows.append(row)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps (gradient updates if nothing is collected) and values of the rows with a metric."""
        points = [(float(step_of(row)), row[name]) for row in self.rows if name in row]
        return [x for x, _ in points], [y for _, y in points]
