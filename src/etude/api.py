"""Runs from Python: plan, train, resume, evaluate, load a policy."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from etude.building.build import Parts, build, start_policy
from etude.core import trust as trusted
from etude.core.contracts import LogWriter
from etude.core.errors import Damaged, EtudeError, NonFinite, UsageError
from etude.core.ranks import LostRank, Ranks, ReportedElsewhere, joined, was_restarted
from etude.core.seals import sealed, unsealed
from etude.core.trees import Tree, digest
from etude.logs.outputs import Outputs, check, open_logs
from etude.planning import recipes
from etude.planning.out_of_memory import check_plan, explained
from etude.planning.page import render
from etude.planning.plan import Plan, counted, make_plan, rank_notes
from etude.planning.recipe import Recipe, metrics_of
from etude.planning.resolve import Resolved, resolve
from etude.rollout.local import Placement
from etude.runs import checkpoint, files, manifest
from etude.runs.folder import RunFolder, default_path
from etude.runs.metrics_log import read_rows
from etude.training.callbacks import Callback
from etude.training.evaluation import summarise
from etude.training.saving import RUN

if TYPE_CHECKING:
    from etude.reports.acting import LoadedPolicy

Say = Callable[[str], None]
SUMMARY = "summary.json"


def silent(text: str) -> None:
    """Says nothing."""


def plan(recipe: Recipe, measure: bool = False) -> Plan:
    """What a run of the recipe would do: counts, shapes and bytes; raises where it cannot run.

    `measure`: also time a few iterations and estimate how long the run takes.
    """
    run = resolve(recipe)
    made = make_plan(run)
    if not measure:
        return made
    from etude.building.measure import measured

    return measured(run, made)


class Run:
    """A run on disk."""

    def __init__(self, path: str | Path, trust: bool = False) -> None:
        """trust: code that its recipe names may run, now and later."""
        self.folder = RunFolder.open(Path(path), write=False)
        try:
            self.recipe = recipes.load(self.folder.recipe, trust)
        except UsageError:
            from etude.building import resuming

            self.recipe = resuming.recipe_of(self.folder, trust)

    @property
    def path(self) -> Path:
        return self.folder.path

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_rows(self.folder.metrics)

    def summary(self) -> dict[str, Any]:
        """What a finished run did."""
        path = self.path / SUMMARY
        try:
            return unsealed(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise Damaged(path, f"{path} {error}: `etude resume` writes it anew.") from error

    @property
    def exactness(self) -> str:
        """ "exact: ..." or "not exact: ...", and why."""
        return str(self.folder.manifest().get("exactness", ""))

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of weights with normaliser, of training state, and of the metric rows.

        Two exact runs agree in all three: `time/` and `system/` columns, which may differ, are
        left out, and so is the position in metrics.jsonl, whose bytes they are part of, how often
        the run was saved, and the copies of recipe and manifest.
        """
        path = checkpoint.newest_verified(self.folder.checkpoints, repair=False)
        if path is None:
            raise UsageError(f"{self.path} has no checkpoint yet.")
        policy, _, training = checkpoint.load_training(path)
        del training["metrics"], training["saver"]["num_saved"]
        training.pop(RUN, None)
        free = ("time/", "system/")
        rows = [{k: v for k, v in r.items() if not k.startswith(free)} for r in self.rows()]
        text = json.dumps(rows, sort_keys=True).encode()
        return {
            "policy": digest(policy),
            "training": digest(training),
            "metrics": hashlib.sha256(text).hexdigest(),
        }

    def curves(self, *names: str) -> dict[str, tuple[list[int], list[float]]]:
        """{metric: (steps, values)} of the rows, of all metrics or of these; `eval/*` works."""
        from etude.planning.loading import curves

        return curves(self.rows(), names)

    def policies(self) -> dict[int, Path]:
        """{step: checkpoint} of every policy that was kept, the oldest first."""
        from etude.planning.loading import policies

        return policies(self.path)

    def policy(self, checkpoint: str | int = "best") -> LoadedPolicy:
        """A policy of the run, to act with: "best", "latest" or that of a step."""
        from etude.planning.loading import chosen_path
        from etude.reports.acting import load_policy

        return load_policy(chosen_path(self.path, str(checkpoint)))

    def evaluate(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        checkpoint: str | int = "best",
        stochastic: bool = False,
        **env: Any,
    ) -> dict[str, float]:
        """Metrics of fresh episodes; nothing is written.

        Without a count, 100 episodes; or every motion once, where motions are imitated. checkpoint:
        "best", "latest" or a step. stochastic: actions are drawn, as in training. env: fields of
        the environment that are changed, such as tolerance=0.05.
        """
        from etude.planning.loading import chosen_path
        from etude.reports import fresh

        policy = chosen_path(self.path, str(checkpoint))
        recipe = self.recipe.replace(**{f"env__{name}": value for name, value in env.items()})
        return summarise(fresh.play(recipe, policy, episodes, seed, stochastic).episodes)

    def film(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        checkpoint: str | int = "best",
        stochastic: bool = False,
    ) -> list[Path]:
        """Evaluates like `etude eval --video`, and gives the films and pictures that it made."""
        from etude.reports.evaluation import examine

        which = str(checkpoint)
        made = examine(self.recipe, self.path, episodes, seed, True, silent, which, stochastic)
        return [Path(name) for name in made["films"]]


def train(
    recipe: Recipe,
    path: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[LogWriter] = (),
    say: Say = silent,
    on_phase: Callable[[str], None] = silent,
    console: bool = False,
) -> Run:
    """Plan, then train a recipe in a new run folder.

    `console`: show the run on the screen, as the recipe's `logs.console` says. Processes that
    torchrun started together share the run's shards, and the first of them writes it; where
    torchrun has started them again, the run in the folder `path` goes on.
    """
    asked = Outputs(say, on_phase, [*logs], [*callbacks])
    trusted.vouch(recipes.texts(recipe))
    with joined() as ranks:
        if ranks.from_first(lambda: was_restarted() and _is_begun(path)):
            assert path is not None
            return _resume(ranks, Path(path), asked, console)
        recipe = _pinned(recipe, ranks)
        _compare(ranks, recipe)
        resolved: list[Resolved] = []  # the first rank's

        def create() -> RunFolder:
            resolved.append(resolve(recipe))
            return _create(resolved[0], path, ranks, say)

        with _folder(ranks, create) as folder, explained(folder.path):
            run = resolved[0] if resolved else resolve(recipe)
            out = _outputs(run, folder, console, asked, ranks)
            out.say(f"Run folder: {folder.path}")
            for note in rank_notes(recipe, ranks.size):
                out.say(note)
            parts = build(run, folder, out.logs, out.callbacks, out.on_phase, out.say, ranks)
            start_policy(recipe, parts.algorithm)
            _execute(parts, folder, out.say)
        return Run(folder.path)


def _compare(ranks: Ranks, recipe: Recipe | None = None) -> None:
    """Refuse ranks that were given another recipe than the first, or compute other bits."""
    if ranks.size > 1:
        from etude.building.rank_checks import compare_bits, compare_recipes

        if recipe is not None:
            compare_recipes(recipe, ranks)
        compare_bits(ranks)


def _pinned(recipe: Recipe, ranks: Ranks) -> Recipe:
    """The recipe with the checkpoint it starts from in place of that checkpoint's run.

    A run that still trains has another newest checkpoint soon: every rank, and a resume before
    this run's first save, must start from the same.
    """
    if recipe.start_from is None:
        return recipe
    from etude.planning.loading import start_path

    start = Path(recipe.start_from)
    chosen = ranks.from_first(lambda: str(start_path(start).resolve()))
    return recipe.model_copy(update={"start_from": chosen})


def _create(run: Resolved, path: str | Path | None, ranks: Ranks, say: Say) -> RunFolder:
    recipe = run.recipe
    check(recipe.logs)
    plan = make_plan(run, ranks=ranks.size)
    check_plan(plan, say)
    target = Path(path) if path else default_path(recipe.name, recipe.seed)
    document, text = _manifest(recipe, plan, ranks), recipes.dump(recipe)
    folder = RunFolder.create(target, text, render(plan), plan.to_json(), document)
    trusted.remember(folder.recipe, recipes.texts(recipe))
    return folder


def _is_begun(path: str | Path | None) -> bool:
    if path is None:
        raise UsageError(
            "torchrun has started this run again and cannot know its folder: name one with "
            "--folder, or continue with `etude resume RUN`."
        )
    return Path(path).exists()


def _folder(ranks: Ranks, make: Callable[[], RunFolder]) -> RunFolder:
    """The run's folder: the first rank makes or opens it, the others open it to read."""
    made: list[RunFolder] = []

    def first() -> str:
        made.append(make())
        return str(made[0].path.absolute())

    path = ranks.from_first(first)
    return made[0] if made else RunFolder.open(Path(path), write=False)


def resume(
    path: str | Path,
    total_timesteps: int | None = None,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[LogWriter] = (),
    say: Say = silent,
    on_phase: Callable[[str], None] = silent,
    console: bool = False,
    collector: Placement | None = None,
    checkpoint: int | None = None,
    trust: bool = False,
) -> Run:
    """Continue a run from its last good checkpoint, as if it had never stopped.

    `checkpoint`: from that of this step, and those after it are set aside. `total_timesteps` gives
    it a larger budget first; schedules that follow the run's progress then follow the new length.
    `console`: show the run on the screen. `collector`: where its rollouts run this time, which
    changes no bit; nor does the number of ranks it goes on with. `trust`: code that its recipe
    names may run, now and later.
    """
    asked = Outputs(say, on_phase, [*logs], [*callbacks])
    with joined() as ranks:
        return _resume(
            ranks, Path(path), asked, console, total_timesteps, collector, checkpoint, trust
        )


def _resume(
    ranks: Ranks,
    path: Path,
    asked: Outputs,
    console: bool,
    total_timesteps: int | None = None,
    collector: Placement | None = None,
    step: int | None = None,
    trust: bool = False,
) -> Run:
    _compare(ranks)
    with _folder(ranks, lambda: RunFolder.open(path)) as folder, explained(folder.path):
        resolved: list[Resolved] = []  # the first rank's

        def continued() -> tuple[Tree, list[str]]:
            from etude.building import resuming

            resuming.restore(folder, asked.say, trust)
            loaded = recipes.load(folder.recipe, trust)
            run, lost = _continued(loaded, folder, ranks, asked.say, total_timesteps, collector)
            resolved.append(run)
            return run.recipe.model_dump(mode="json"), lost

        plain, lost = ranks.from_first(continued)
        recipe = recipes.validated(plain, str(folder.recipe))
        run = resolved[0] if resolved else resolve(recipe)
        out = _outputs(run, folder, console, asked, ranks)
        say = out.say
        parts = build(run, folder, out.logs, out.callbacks, out.on_phase, out.say, ranks)
        clock = parts.loop.clock
        restored = parts.loop.saver.restore(clock, say, step)
        if total_timesteps is not None:
            from etude.building.resuming import extend

            extend(run, clock, folder, ranks, say)
        if restored:
            say(f"Resuming {folder.path} at step {clock.now.timesteps:,}.")
        else:
            # Nothing was saved yet: whatever was logged belongs to work that is done again.
            if parts.metrics is not None:
                parts.metrics.cut_back({"bytes": 0, "sha256": _NOTHING})
            start_policy(recipe, parts.algorithm)
            say(f"{folder.path} has no checkpoint yet: starting from the beginning.")
        if was_restarted():
            from etude.building.rank_checks import refuse_to_repeat

            ranks.from_first(lambda: refuse_to_repeat(folder, clock))
        if clock.finished:
            say("The run is finished already.")
        elif ranks.is_first:
            for reason in lost:
                folder.mark_not_exact(reason)
        for note in rank_notes(recipe, ranks.size):
            say(note)
        _execute(parts, folder, say)
    return Run(path)


def _continued(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    say: Say,
    total_timesteps: int | None,
    collector: Placement | None,
) -> tuple[Resolved, list[str]]:
    """What a run goes on with, and why it is not exact then; says what is not as it was."""
    from etude.building import resuming

    saved = resuming.copies(folder)
    resuming.check_recipe(recipe, saved or {}, folder, say)
    check(recipe.logs)
    if collector is not None:
        placed = {"collector": collector.applied(recipe.collector)}
        recipe = recipe.model_copy(update=placed)
    run = resolve(recipe)
    if total_timesteps is not None:
        run = resuming.longer(run, total_timesteps, folder)
    plan = make_plan(run, begun=True, ranks=ranks.size)
    now = _manifest(run.recipe, plan, ranks)
    if saved is None:
        resuming.begin_anew(folder, now, say)
    resuming.settle(folder, plan, say)
    if found := folder.last_failure():
        say(
            f"This run failed before (see {found}). A run is exact, so the same failure will "
            "come again unless something changes."
        )
    return run, [] if saved is None else resuming.lost(folder, now, saved, say)


def _outputs(
    run: Resolved, folder: RunFolder, console: bool, asked: Outputs, ranks: Ranks
) -> Outputs:
    """The logs of a run, with what the caller asked for; only the first rank has any."""
    if not ranks.is_first:
        return Outputs(silent, silent)
    recipe, iterations = run.recipe, run.loops.iterations
    plain, metrics = recipe.model_dump(mode="json"), metrics_of(recipe)
    return open_logs(
        recipe.logs,
        folder.path,
        plain,
        metrics,
        iterations,
        console,
        asked,
        lambda: recipes.changed(recipe),
    )


_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of no bytes."""


class Interrupted(EtudeError):
    """A signal ended the run at a boundary."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(f"Stopped and saved. Continue with: etude resume {path}")
        self.exit_code = 128 + number


def _execute(parts: Parts, folder: RunFolder, say: Say) -> None:
    """Run the loop; any failure leaves the last good checkpoint and a report."""
    loop, ranks = parts.loop, parts.ranks
    try:
        with loop.stop:
            finished = loop.run(read_rows(folder.metrics) if ranks.is_first else [])
    except (LostRank, ReportedElsewhere):
        raise  # It says nothing about this run that the next try should be warned of.
    except Exception as error:
        if ranks.is_first:  # where failures of other ranks are raised too
            _report(error, loop.clock.state_dict(), folder, say)
        raise
    finally:
        parts.close()
    if not finished:
        stopped = Interrupted(folder.path, loop.stop.signal or signal.SIGTERM)
        raise stopped if ranks.is_first else ReportedElsewhere(stopped.exit_code)
    ranks.from_first(lambda: _summarise(parts, folder))


def _report(error: Exception, counters: Tree, folder: RunFolder, say: Say) -> None:
    """Write a report of a failure; a full disk must not hide the failure itself."""
    arrays = error.arrays if isinstance(error, NonFinite) else {}
    context = {"counters": counters, "error": type(error).__name__}
    try:
        report = f"Report: {folder.write_failure(error, arrays, context)}"
    except EtudeError as fault:
        report = f"No report: {fault}"
    say(f"The run failed; the last good checkpoint is untouched. {report}")


def _summarise(parts: Parts, folder: RunFolder) -> None:
    """summary.json: what the run did, to hold against the plan."""
    loop = parts.loop
    now, rows = loop.clock.now, folder.metrics.read_text().count("\n")
    tester, saved = loop.evaluator, loop.saver.num_saved
    counts = counted(now, parts.spec.agents, rows, tester.num_done, tester.num_episodes, saved)
    summary = {"counts": counts, "episodes": loop.clock.episodes, "best": loop.evaluator.best}
    summary["exactness"] = folder.manifest().get("exactness", "unknown")
    files.replace_file(folder.path / SUMMARY, [sealed(summary)])


def _manifest(recipe: Recipe, plan: Plan, ranks: Ranks) -> Tree:
    torch.set_num_threads(recipe.learner.threads)
    verdict = "exact" if plan.exactness["exact"] else "not exact"
    return manifest.collect(
        f"{verdict}: {plan.exactness['reason']}",
        {"learner": recipe.learner.threads},
        ranks=ranks.size,
        recipe=recipes.digest(recipe),
    )
