"""A run at the beginning of any of its iterations, in this process.

A run is a function of its recipe and seed, so every iteration can be computed again: from the
newest checkpoint at or before it, or from the start of the run, in a scratch folder. The run's
folder is only read: it is not locked, and a process that trains it meanwhile is not disturbed.

    with rewound(path, iteration, watch) as moment:
        moment.forward()       # to the beginning of `iteration`
        moment.forward(1)      # this iteration, which `watch` sees phase by phase

Log rows of the iterations that are computed again are compared with the run's: `moment.notes` says
where they differ, and what else may change bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from etude.building.build import Parts, build, start_policy
from etude.core import user_code
from etude.core.clock import Clock, Loops
from etude.core.contracts import Algorithm, BatchMetrics, Broadcast, Collector, Fragment
from etude.core.errors import Damaged, EtudeError, UsageError
from etude.core.history import Row
from etude.core.keys import Key
from etude.core.metrics import step_of as step_of_row
from etude.core.output import amount, waiting
from etude.core.trees import Tree, copy_arrays
from etude.data.store.episodes import EpisodeStore
from etude.planning.recipe import Recipe, Resolved, code_roots, load, parsed, with_changes
from etude.planning.resolve import resolve
from etude.rollout.local import CollectorWrapper, OverlappedCollector
from etude.rollout.placement import Placement
from etude.runs import checkpoint, manifest
from etude.runs.changes import Change, changes_of
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import DiskHistory
from etude.training.evaluation import AnyEvaluator, EvaluationResult
from etude.training.loop import Context, Loop
from etude.training.saving import RUN, renumbered, step_of

FREE_COLUMNS = ("time/", "system/")
"""Columns of log rows that differ between exact runs."""
_TRIES = 3
"""Tries to read a checkpoint, which the run may delete meanwhile."""


class Watch:
    """Sees the phases of the iterations of a run; override what you need, and change nothing."""

    def collecting(self, iteration: int, broadcast: Broadcast, groups: Tree) -> None:
        """Before a rollout; groups: the snapshots of all groups, {} before the first one. With
        collection one iteration ahead it is called in another thread."""

    def collected(self, iteration: int, fragments: list[Fragment]) -> None: ...

    def ingested(self, algorithm: Algorithm) -> None:
        """Before the gradient steps."""

    def stepped(self, algorithm: Algorithm, metrics: BatchMetrics) -> None:
        """After each gradient step."""

    def updated(self, algorithm: Algorithm) -> None:
        """After the gradient steps, before the normaliser is updated."""

    def normalised(self, algorithm: Algorithm, metrics: dict[str, float]) -> None:
        """At the end of the iteration."""

    def evaluated(self, result: EvaluationResult) -> None: ...


class _WatchedCollector(CollectorWrapper):
    def __init__(self, inner: Collector, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        groups = self._inner.state_dict().get("groups", {})
        self._watch.collecting(iteration, broadcast, groups)
        fragments = self._inner.collect(broadcast, iteration)
        self._watch.collected(iteration, fragments)
        return fragments

    def state_dict(self) -> Tree:
        return self._inner.state_dict()

    def load_state_dict(self, state: Tree) -> None:
        self._inner.load_state_dict(state)


class _WatchedAlgorithm:
    def __init__(self, inner: Algorithm, watch: Watch) -> None:
        self.inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        metrics = self.inner.ingest(fragments, clock)
        self._watch.ingested(self.inner)
        return metrics

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        for metrics in self.inner.batches(clock, key):
            self._watch.stepped(self.inner, metrics)
            yield metrics

    def end_iteration(self) -> dict[str, float]:
        self._watch.updated(self.inner)
        metrics = self.inner.end_iteration()
        self._watch.normalised(self.inner, metrics)
        return metrics


class _WatchedEvaluator:
    def __init__(self, inner: AnyEvaluator, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        result = self._inner.evaluate(broadcast)
        self._watch.evaluated(result)
        return result


class _Rows:
    """In place of the log of a run that is computed again: compares its rows with the run's."""

    def __init__(self, history: DiskHistory, notes: list[str]) -> None:
        self._history, self._notes = history, notes
        self._known: Iterator[Row] | None = None
        self.compared = 0
        self.different = False

    def begin(self, history: Iterable[Row]) -> None: ...

    def write(self, row: Row) -> None:
        step = step_of_row(row)
        if self._known is None:
            self._known = self._history.after(step - 1, step_of_row)
        with suppress(Damaged):
            for known in self._known:
                if step_of_row(known) == step:
                    self._compare(known, row)
                if step_of_row(known) >= step:
                    return
        self._known = None  # not written yet

    def _compare(self, known: Row, row: Row) -> None:
        self.compared += 1
        names = [n for n in row if not n.startswith(FREE_COLUMNS) and n in known]
        other = [n for n in names if repr(known[n]) != repr(row[n]) and known[n] is not None]
        if other and not self.different:
            self.different = True
            self._notes.append(
                f"The log row of step {step_of_row(row):,} differs from the run's, first in "
                f"{other[0]}: {row[other[0]]!r} instead of {known[other[0]]!r}. What is shown is "
                "not what the run computed."
            )

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None: ...

    def close(self) -> None: ...


class _Scratch(RunFolder):
    """A temporary folder in place of the run's."""

    def __init__(self, path: Path, rows: _Rows, notes: list[str]) -> None:
        super().__init__(path)
        self._rows, self._notes = rows, notes

    def metrics_log(self, say: Callable[[str], None] = lambda text: None) -> Any:
        return self._rows

    def copies(self) -> Tree:
        return {}

    def mark_not_exact(self, reason: str) -> None:
        self._notes.append(f"Not exact: {reason}.")


class Start(NamedTuple):
    """The state that a moment is computed from: that of a checkpoint, or the start of the run."""

    step: int
    path: Path | None
    """The checkpoint; None for the start of the run."""
    policy: Tree
    training: Tree

    @property
    def iterations(self) -> int:
        """Completed iterations."""
        return 0 if self.path is None else int(self.training["clock"]["now"]["iterations"])


def iteration_at(step: int, loops: Loops) -> int:
    """The iteration in which an environment step falls; of runs that learn from a dataset, a
    gradient step."""
    total, size, unit = loops.budget
    if not 0 <= step < total:
        raise UsageError(f"The run has the {unit} 0 to {total - 1:,}, not {step:,}.")
    return step // max(size, 1)


def find_start(folder: RunFolder, step: int) -> Start:
    """The newest checkpoint at or before a step; reads and changes nothing else."""
    for last in range(_TRIES - 1, -1, -1):
        path = checkpoint.newest_verified(
            folder.checkpoints, lambda text: None, repair=False, before=step + 1
        )
        if path is None:
            return Start(0, None, {}, {})
        try:
            policy, _, training = checkpoint.load_training(path)
        except EtudeError:
            if not last:
                raise
            continue  # deleted by the run meanwhile
        return Start(int(path.name), path, policy, renumbered(training))
    raise AssertionError


def recipes_from(
    folder: RunFolder, start: Start, trust: bool = False
) -> tuple[Recipe, list[tuple[int, Recipe]]]:
    """(recipe at a start, [(step, recipe from that step on)] of the changes after it)."""
    now = load(folder.recipe, trust)
    base = now
    if (copies := start.training.get(RUN)) and "recipe" in copies:
        text = str(copies["recipe"]).encode()
        base = parsed(text, "The recipe in the checkpoint", folder.recipe, trust)
    with_changes(now, folder, trust)  # refuses changes that cannot be
    changes = changes_of(folder.manifest())
    first = _changed(base, [change for change in changes if change.step <= start.step])
    later, recipe = list[tuple[int, Recipe]](), first
    for change in (each for each in changes if each.step > start.step):
        recipe = _changed(recipe, [change])
        later.append((change.step, recipe))
    if now.clock != base.clock:  # the budget has grown since
        at = _last_with(folder, base, start.step)
        later = [(s, r if s < at else r.replace(clock=now.clock)) for s, r in later]
        before = [r for s, r in later if s <= at]
        longer = (before[-1] if before else first).replace(clock=now.clock)
        later = sorted([*(pair for pair in later if pair[0] != at), (at, longer)])
    return first, later


def _changed(recipe: Recipe, changes: list[Change]) -> Recipe:
    for change in changes:
        recipe = recipe.replace(**{n.replace(".", "__"): b for n, (_, b) in change.fields.items()})
    return recipe


def _last_with(folder: RunFolder, recipe: Recipe, step: int) -> int:
    """The last checkpoint with the clock of a recipe: its step, where a resume extended the run."""
    last = step
    for path in reversed(checkpoint.resumable(folder.checkpoints)):
        copies = checkpoint.load_document(path).get(RUN, {})
        text = str(copies.get("recipe", "")).encode()
        if int(path.name) > last and text:
            if parsed(text, str(path), folder.recipe).clock != recipe.clock:
                break
            last = int(path.name)
    return last


class Rewound:
    """A run at an iteration, see `rewound`."""

    def __init__(
        self,
        folder: RunFolder,
        iteration: int,
        watch: Watch,
        scratch: Path,
        trust: bool = False,
        threads: int | None = None,
    ) -> None:
        self.folder, self.iteration, self.watch = folder, iteration, watch
        self.notes: list[str] = []
        self.scratch, self._threads, self._parts = scratch, threads, cast(Parts, None)
        recipe = with_changes(load(folder.recipe, trust), folder, trust)
        geometry = recipe.algorithm.geometry(recipe)
        loops = recipe.algorithm.loops(recipe, geometry)
        if not 0 <= iteration <= loops.iterations:
            raise UsageError(f"The run has {loops.iterations:,} iterations, not {iteration:,}.")
        at = loops.at(iteration)
        step = at.timesteps if loops.steps_per_iteration else at.updates
        self.start = find_start(folder, step)
        self._rows = _Rows(DiskHistory(folder.metrics), self.notes)
        recipe, self._later = recipes_from(folder, self.start, trust)
        self._build(recipe, self.start)
        self._compare_machines()

    @property
    def loop(self) -> Loop:
        """The loop of the run, whose parts tell `watch` what they do."""
        return self._loop

    @property
    def now(self) -> int:
        """Completed iterations."""
        return self._loop.clock.now.iterations

    @property
    def rows_compared(self) -> int:
        """Log rows that were compared with the run's."""
        return self._rows.compared

    @property
    def is_same(self) -> bool:
        """Whether the log rows that were compared are the run's."""
        return not self._rows.different

    def forward(self, iterations: int | None = None) -> None:
        """Compute iterations; None: those up to the beginning of the one that was asked for."""
        until = self.iteration if iterations is None else self.now + iterations
        if iterations is None and until > self.now:
            with waiting("computing again", until - self.now, "iterations") as wait:
                while self.now < until:
                    self._one()
                    wait.done += 1
            return
        while self.now < until:
            self._one()

    def _one(self) -> None:
        while self._later and step_of(self.loop.clock) >= self._later[0][0]:
            _, recipe = self._later.pop(0)
            state = self.state()
            self._parts.close()
            self._build(recipe, Start(0, self.folder.path, *state))
        self._loop.iteration(self._context)

    def state(self) -> tuple[Tree, Tree]:
        """(policy, training): copies of what a checkpoint of this moment holds."""
        loop, saver = self._parts.loop, self._parts.loop.saver
        policy = copy_arrays(loop.algorithm.policy_parts()[0])
        return policy, copy_arrays(saver.training_state())

    def _build(self, recipe: Recipe, start: Start) -> None:
        placed = Placement(kind="local", threads=self._threads).applied(recipe.collector)
        self.run: Resolved = resolve(recipe.replace(collector=placed))
        self._copy_replay(start)
        folder = _Scratch(self.scratch, self._rows, self.notes)
        parts = self._parts = build(self.run, folder)
        watch = self.watch

        def watched(collector: Collector) -> Collector:
            return _WatchedCollector(collector, watch)

        loop = parts.loop
        collector = loop.collector
        if isinstance(collector, OverlappedCollector):
            collector._inner = watched(collector._inner)
        else:
            collector = watched(collector)
        self._loop = replace(
            loop,
            collector=collector,
            algorithm=cast(Algorithm, _WatchedAlgorithm(loop.algorithm, watch)),
            evaluator=cast(AnyEvaluator, _WatchedEvaluator(loop.evaluator, watch)),
        )
        if start.path is None:
            start_policy(self.run.recipe, parts.algorithm)
        else:
            loop.saver.load(start.path, start.policy, {**start.training, "metrics": {}})
        board, algorithm = self._loop.board, self._loop.algorithm
        self._context = Context(self._loop.clock, algorithm, board, lambda: self._loop.best)

    def _copy_replay(self, start: Start) -> None:
        """Copy the experience that a checkpoint names into the scratch folder."""
        stores = start.training.get("algorithm", {}).get("stores", {})
        for number, name in enumerate(sorted(stores)):
            part = f"replay/shard-{number}"
            source, target = self.folder.path / part, self.scratch / part
            if source.is_dir() and not target.exists():
                EpisodeStore.copy(source, stores[name], target)

    def _compare_machines(self) -> None:
        """Note what may change bits: another machine, other versions or other code."""
        recipe = self.run.recipe
        torch.set_num_threads(recipe.learner.threads)
        here = manifest.collect(
            "",
            {"learner": recipe.learner.threads},
            model=self.run.spec.model,
            code=user_code.compute_hashes(code_roots(recipe)),
        )
        made = self.folder.manifest()
        known = {n: v for n, v in made.items() if n in here and n not in ("exactness", "ranks")}
        for sentence in manifest.differences(known, {n: here[n] for n in known}).decisive:
            self.notes.append(f"Bits may differ from the run's: {sentence}")
        statement = str(made.get("exactness", ""))
        if statement.startswith("not exact"):
            self.notes.append(f"The run is {statement}.")

    def close(self) -> None:
        self._parts.close()


@contextmanager
def rewound(
    path: Path,
    iteration: int,
    watch: Watch | None = None,
    trust: bool = False,
    threads: int | None = None,
) -> Iterator[Rewound]:
    """A run that `forward` brings to the beginning of an iteration; see the module's docstring.

    threads: of the collector; by default as many as the run's.
    """
    folder = RunFolder.open(Path(path), write=False)
    with tempfile.TemporaryDirectory(prefix="etude-rewound-") as scratch:
        moment = Rewound(folder, iteration, watch or Watch(), Path(scratch), trust, threads)
        try:
            yield moment
        finally:
            moment.close()


def seconds_per_iteration(folder: RunFolder) -> float | None:
    """Mean seconds of an iteration with its evaluations, from the log; None without rows."""
    found, total = 0.0, 0
    for row, rows in DiskHistory(folder.metrics).thinned().weighted():
        phases = (float(row.get(f"time/{name}") or 0.0) for name in ("collect", "train", "test"))
        found, total = found + rows * sum(phases), max(total, int(row.get("iterations") or 0))
    return found / total if total else None


def plan_text(folder: RunFolder, start: Start, iteration: int, more: int = 1) -> str:
    """How long it takes to compute an iteration again, and where it begins, as a sentence."""
    count = max(iteration - start.iterations, 0) + more
    where = f"the checkpoint of step {start.step:,}" if start.path else "the start of the run"
    each = seconds_per_iteration(folder)
    time = "" if each is None else f", about {count * each:.0f} s ({each:.2g} s each in the log)"
    return f"Computing {amount(count, 'iteration')} again from {where}{time}."
