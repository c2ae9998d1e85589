"""A run that goes on from its last good checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from etude.building import resuming
from etude.building.build import Parts, build, start_policy
from etude.building.executing import (
    Interrupted,
    Say,
    compare,
    compare_code,
    device_line,
    execute,
    manifest_of,
    open_folder,
    outputs_of,
)
from etude.core.ranks import Ranks, was_restarted
from etude.core.trees import Tree
from etude.planning import recipes
from etude.planning.out_of_memory import explained
from etude.planning.plan import make_plan, rank_notes
from etude.planning.recipe import Recipe, Resolved
from etude.planning.resolve import resolve
from etude.rollout.local import Placement
from etude.runs import file_system
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import START
from etude.training.logs.outputs import Outputs, check
from etude.training.stop import starting


def continue_run(
    ranks: Ranks,
    path: Path,
    asked: Outputs,
    console: bool,
    total_timesteps: int | None = None,
    collector: Placement | None = None,
    step: int | None = None,
    trust: bool = False,
    pause_after: int | None = None,
) -> Path:
    """See `etude.resume`, of which this is the work: the run's folder.

    asked: where its caller wants messages and metrics to go.
    """
    compare(ranks)
    early = Interrupted(path, "Stopped before training went on; nothing is lost.")
    with ExitStack() as held:
        with starting(early):
            folder = held.enter_context(open_folder(ranks, lambda: RunFolder.open(path)))
            held.enter_context(explained(folder.path))
            how = (total_timesteps, collector, step, trust, pause_after)
            parts, say = _ready(ranks, folder, asked, console, *how)
        if parts is not None:
            execute(parts, folder, say)
    return path


def _ready(
    ranks: Ranks,
    folder: RunFolder,
    asked: Outputs,
    console: bool,
    total_timesteps: int | None,
    collector: Placement | None,
    step: int | None,
    trust: bool,
    pause_after: int | None,
) -> tuple[Parts | None, Say]:
    """The run as its checkpoint left it; None where it was to pause by then."""
    resolved: list[Resolved] = []  # the first rank's

    def continued() -> tuple[Tree, list[str]]:
        resuming.restore(folder, asked.say, trust)
        loaded = recipes.load(folder.recipe, trust)
        run, lost = _continued(loaded, folder, ranks, asked.say, total_timesteps, collector)
        resolved.append(run)
        return run.recipe.model_dump(mode="json"), lost

    plain, lost = ranks.from_first(continued)
    recipe = recipes.validated(plain, str(folder.recipe))
    run = resolved[0] if resolved else resolve(recipe)
    compare_code(ranks, run)
    out = outputs_of(run, folder, console, asked, ranks)
    say = out.say
    parts = build(run, folder, out.logs, out.callbacks, out.on_phase, out.say, ranks)
    with ExitStack() as closing:  # where it fails, or is stopped
        closing.callback(parts.close)
        _restore(parts, folder, run, say, step, total_timesteps)
        clock, stop = parts.loop.clock, parts.loop.stop
        stop.pause_after = pause_after
        is_paused = stop.pauses(clock.now.iterations) and not clock.finished
        if clock.finished:
            say("The run is finished already.")
        elif ranks.is_first and not is_paused:
            for reason in lost:
                folder.mark_not_exact(reason)
        for note in rank_notes(recipe, ranks.size):
            say(note)
        if is_paused:
            say(f"It has done {clock.now.iterations:,} iterations, and was to pause by then.")
            return None, say
        closing.pop_all()
    return parts, say


def _restore(
    parts: Parts,
    folder: RunFolder,
    run: Resolved,
    say: Say,
    step: int | None,
    total_timesteps: int | None,
) -> None:
    """Put all parts back to the checkpoint, or to the run's beginning where there is none."""
    clock, ranks = parts.loop.clock, parts.ranks
    restored = parts.loop.saver.restore(clock, say, step)
    if total_timesteps is not None:
        resuming.extend(run, clock, folder, ranks, say)
    if restored:
        say(f"Resuming {folder.path} at step {clock.now.timesteps:,}. {device_line(run)}")
    else:
        # Nothing was saved yet: whatever was logged belongs to work that is done again.
        if parts.metrics is not None:
            parts.metrics.cut_back(START)
        start_policy(run.recipe, parts.algorithm)
        say(f"{folder.path} has no checkpoint yet: starting from the beginning.")
        say(device_line(run))
    if was_restarted():
        from etude.building.executing import refuse_to_repeat

        ranks.from_first(lambda: refuse_to_repeat(folder, clock))


def _continued(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    say: Say,
    total_timesteps: int | None,
    collector: Placement | None,
) -> tuple[Resolved, list[str]]:
    """What a run goes on with, and why it is not exact then; says what is not as it was."""
    saved = resuming.copies(folder)
    resuming.check_recipe(recipe, saved or {}, folder, say)
    check(recipe.logs)
    if collector is not None:
        recipe = recipe.replace(collector=collector.applied(recipe.collector))
    run = resolve(recipe)
    if total_timesteps is not None:
        run = resuming.longer(run, total_timesteps, folder)
    plan = make_plan(run, begun=True, ranks=ranks.size)
    file_system.check(folder.path, plan.bytes["checkpoint"], recipe.checkpoint.keep_last, say)
    now = manifest_of(run, plan, ranks)
    if saved is None:
        resuming.begin_anew(folder, now, say)
    resuming.settle(folder, plan, say)
    if found := folder.last_failure():
        say(
            f"This run failed before (see {found}). A run is exact, so the same failure will "
            "come again unless something changes."
        )
    return run, [] if saved is None else resuming.lost(folder, now, saved, say)
