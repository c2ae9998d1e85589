"""Continue a run from its last good checkpoint.

A changed recipe is refused, since it would be another run; settings that the caller of a resume
changes are others from its step on, and the manifest records them. With another instruction set,
another library or another result of the standard computation, bits may differ: the run continues
and is marked as not exact. A damaged recipe or manifest is restored from the copies in the
checkpoints.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from etude.building.build import (
    Interrupted,
    Parts,
    Say,
    build,
    compare,
    compare_code,
    device_line,
    execute,
    manifest_of,
    on_first,
    open_folder,
    outputs_of,
    refuse_to_repeat,
    start_policy,
)
from etude.core.clock import Clock
from etude.core.errors import Damaged, UsageError
from etude.core.ranks import Ranks, was_restarted
from etude.core.trees import Tree, is_array, leaves
from etude.core.user_code import Untrusted, remember_trust
from etude.planning import among
from etude.planning.memory import explain_out_of_memory
from etude.planning.plan import Plan, make_plan, rank_notes, render
from etude.planning.recipe import (
    CHANGEABLE,
    AlgorithmConfig,
    Recipe,
    Resolved,
    changes,
    differing_fields,
    dump,
    load,
    parsed,
    texts,
    validated,
    with_changes,
)
from etude.planning.resolve import resolve
from etude.rollout.placement import Placement
from etude.runs import checkpoint, file_system, files, manifest
from etude.runs.changes import CHANGES, Change, changes_of
from etude.runs.documents import decode_json
from etude.runs.files import store_url
from etude.runs.folder import MANIFEST, NOT_EXACT, PLAN, PLAN_JSON, RECIPE, RunFolder, pretty
from etude.runs.metrics_log import START
from etude.training.logs.outputs import Outputs, check
from etude.training.saving import RUN, step_of
from etude.training.stop import starting

Fields = dict[str, tuple[Any, Any]]
"""{section.key: (value before, value now)}."""
USED = "The copy in the newest checkpoint is used."


class ResumeOptions(NamedTuple):
    """Changes that a resume makes, see `etude.resume`."""

    total_timesteps: int | None = None
    collector: Placement | None = None
    checkpoint: int | None = None
    trust: bool = False
    pause_after: int | None = None
    changes: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple, never changed


def continue_run(
    ranks: Ranks,
    path: str | Path,
    outputs: Outputs,
    console: bool | None,
    options: ResumeOptions = ResumeOptions(),  # noqa: B008
) -> Path:
    """Continue a run, see `etude.resume`; outputs: the caller's. Returns its folder here."""
    compare(ranks)
    name = store_url(path) or str(path)
    early = Interrupted(name, "Stopped before training continued; nothing is lost.")
    with ExitStack() as held:
        with starting(early):
            folder = held.enter_context(open_folder(ranks, lambda: RunFolder.open(path)))
            held.enter_context(explain_out_of_memory(folder.path))
            parts, say = _restored_parts(ranks, folder, outputs, console, options)
        if parts is not None:
            execute(parts, folder, say)
    return folder.path


def _restored_parts(
    ranks: Ranks, folder: RunFolder, outputs: Outputs, console: bool | None, options: ResumeOptions
) -> tuple[Parts | None, Say]:
    """(parts in the state of the checkpoint, say); None if the run has reached its pause."""

    def resolve_on_first() -> tuple[Resolved, tuple[Tree, list[str], Fields]]:
        restore(folder, outputs.say, options.trust)
        run, reasons, changed = _resolve_resumed(folder, ranks, outputs.say, options)
        return run, (run.recipe.model_dump(mode="json"), reasons, changed)

    first, (content, reasons, changed) = on_first(ranks, resolve_on_first)
    recipe = validated(content, str(folder.recipe))
    run = first or resolve(recipe)
    compare_code(ranks, run)
    out = outputs_of(run, folder, console, outputs, ranks)
    say = out.say
    parts = build(run, folder, out.logs, out.callbacks, out.on_phase, out.say, ranks)
    with ExitStack() as closing:  # after a failure or a stop
        closing.callback(parts.close)
        _restore_state(parts, folder, run, say, options)
        _record_changes(parts, folder, ranks, changed, say)
        clock, stop = parts.loop.clock, parts.loop.stop
        stop.pause_after = options.pause_after
        is_paused = stop.pauses(clock.now.iterations) and not clock.finished
        if clock.finished:
            say("The run is finished already.")
        elif ranks.is_first and not is_paused:
            for reason in reasons:
                folder.mark_not_exact(reason)
        for note in rank_notes(recipe, ranks.size):
            say(note)
        if is_paused:
            say(
                f"The run has already reached its pause, after {clock.now.iterations:,} iterations."
            )
            return None, say
        closing.pop_all()
    return parts, say


def _restore_state(
    parts: Parts, folder: RunFolder, run: Resolved, say: Say, options: ResumeOptions
) -> None:
    """Restore all parts from the checkpoint; without one they stay at the beginning of the run."""
    clock, ranks = parts.loop.clock, parts.ranks
    restored = parts.loop.saver.restore(clock, say, options.checkpoint)
    if options.total_timesteps is not None:
        extend(run, clock, folder, ranks, say)
    if restored:
        say(f"Resuming {folder.name} at step {clock.now.timesteps:,}. {device_line(run)}")
    else:
        # Rows of iterations that will be repeated.
        if parts.metrics is not None:
            parts.metrics.cut_back(START)
        start_policy(run.recipe, parts.algorithm)
        say(f"{folder.name} has no checkpoint yet: starting from the beginning.")
        say(device_line(run))
    if was_restarted():
        ranks.from_first(lambda: refuse_to_repeat(folder, clock))


def _resolve_resumed(
    folder: RunFolder, ranks: Ranks, say: Say, options: ResumeOptions
) -> tuple[Resolved, list[str], Fields]:
    """(resolved recipe, reasons why the run is not exact any more, settings that the caller
    changes); says what has changed."""
    recipe = load(folder.recipe, options.trust)
    saved = copies(folder)
    check_recipe(recipe, saved or {}, folder, say)
    before = with_changes(recipe, folder, options.trust)
    recipe = before.replace(**{n.replace(".", "__"): v for n, v in options.changes.items()})
    changed = differing_fields(before, recipe)
    check_change(before, recipe, folder)
    check(recipe.logs)
    if options.collector is not None:
        recipe = recipe.replace(collector=options.collector.applied(recipe.collector))
    run = resolve(recipe)
    if options.total_timesteps is not None:
        run = longer(run, options.total_timesteps, folder)
    plan = make_plan(run, begun=True, ranks=ranks.size)
    file_system.check(folder.path, plan.bytes["checkpoint"], recipe.checkpoint.keep_last, say)
    now = manifest_of(run, plan, ranks)
    if saved is None:
        begin_again(folder, now, say)
    rewrite_texts(folder, plan, say)
    if found := folder.last_failure():
        say(
            f"This run failed before (see {found}). A run is exact, so the same failure will "
            "come again unless something changes."
        )
    return run, [] if saved is None else why_not_exact(folder, now, saved, say), changed


def copies(folder: RunFolder) -> Tree | None:
    """{"recipe", "manifest"} as the newest checkpoint holds them; None without a checkpoint."""
    path = checkpoint.newest_verified(folder.checkpoints, lambda text: None, repair=False)
    if path is None:
        return None
    found = checkpoint.load_document(path).get(RUN, {})
    return found if isinstance(found, dict) else {}


def check_recipe(recipe: Recipe, saved: Tree, folder: RunFolder, say: Say) -> None:
    """Refuse a recipe that differs from the copy in a checkpoint's copies `saved`."""
    if "recipe" not in saved:
        return
    source = f"The recipe in {folder.checkpoints}"
    was = parsed(str(saved["recipe"]).encode(), source, folder.recipe)
    refused, allowed = changes(was, recipe)
    if refused:
        raise UsageError(
            f"{folder.recipe} is not the recipe this run was saved with: {'; '.join(refused)}. Put "
            f"it back, or train a new run that starts from this one: `etude train {folder.recipe} "
            f"--from {folder.name}`."
        )
    for change in allowed:
        say(f"Since the last checkpoint, {change}.")


def begin_again(folder: RunFolder, now: Tree, say: Say) -> None:
    """Make this recipe and this process those of a run without a checkpoint."""
    # The digest also changes if a version has renamed fields.
    same = folder.manifest().get("recipe", now["recipe"]) == now["recipe"]
    if not same and RECIPE in folder.changed_texts():
        say(f"{folder.recipe} was changed before the first checkpoint: the run uses the new one.")
    kept = {CHANGES: folder.manifest()[CHANGES]} if CHANGES in folder.manifest() else {}
    folder.rewrite(now | kept, {})


def check_change(old: Recipe, new: Recipe, folder: RunFolder) -> None:
    """Refuse a change that the state of the run does not fit.

    Settings of `CHANGEABLE` may change if the geometry, the loops and the shapes of the algorithm's
    state stay the same.
    """
    changed = differing_fields(old, new)
    for name in changed:
        section, _, field = name.partition(".")
        if not among(name, CHANGEABLE) or field == "kind":
            raise _refusal(changed, [name], folder, "belongs to what the run was built for")
        part = getattr(new, section)
        if isinstance(part, AlgorithmConfig) and field in part.read_at_start():
            raise _refusal(changed, [name], folder, "is read at the start of a run only")
    learning = [name for name in changed if name.partition(".")[0] in ("algorithm", "rewards")]
    if not learning:
        return
    was, now = resolve(old), resolve(new)
    for part, why in ((_structure, "geometry and the loops"), (_shapes, "shapes of the state")):
        if (known := part(was)) != part(now):
            alone = {n: resolve(old.replace(n, changed[n][1])) for n in learning}
            wrong = [name for name, run in alone.items() if part(run) != known]
            raise _refusal(changed, wrong or learning, folder, f"decides the {why} of a run")


def _structure(run: Resolved) -> Any:
    return run.geometry, run.loops


def _shapes(run: Resolved) -> dict[str, Any]:
    """{path: (shape, type)} of the arrays in the state of a run's algorithm, and other names."""
    state = leaves(run.recipe.algorithm.plan(run).training)
    return {
        path: (tuple(leaf.shape), str(leaf.dtype)) if is_array(leaf) else None
        for path, leaf in state
    }


def _refusal(changed: Fields, wrong: list[str], folder: RunFolder, why: str) -> UsageError:
    """A change that is refused, with the command that trains it as another run."""
    several = " or ".join(wrong) if len(wrong) < 4 else f"{wrong[0]} or {len(wrong) - 1} others"
    earlier = {n: pair for c in changes_of(folder.manifest()) for n, pair in c.fields.items()}
    wanted = {name: pair[1] for name, pair in (earlier | changed).items()}
    options = [f"--{name.replace('_', '-')} {_text(value)}" for name, value in wanted.items()]
    # Another policy or reward network does not start from this one.
    start = [] if "policy" in {n.partition(".")[0] for n in wrong} else [f"--from {folder.name}"]
    command = " ".join([f"etude train {folder.recipe}", *start, *options])
    return UsageError(
        f"{several} cannot change within a run, since it {why}. Train another one: `{command}`."
    )


def _text(value: Any) -> str:
    """A value of a recipe as an option has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _record_changes(
    parts: Parts, folder: RunFolder, ranks: Ranks, changed: Fields, say: Say
) -> None:
    """Record the caller's changes in the manifest and the plan, with the present step.

    Earlier changes after this step, of a checkpoint that was set aside, count from here.
    """
    step = step_of(parts.loop.clock)
    if changed and parts.loop.clock.finished:
        raise UsageError(
            f"{folder.name} is finished, so nothing is left to train with other settings: add "
            "--total-timesteps with a larger budget."
        )
    if not ranks.is_first:
        return
    known = changes_of(folder.manifest())
    lineage = [change for change in known if change.step < step]
    for change in [*known[len(lineage) :], Change(step, changed)]:
        here = change._replace(step=step)
        is_same_step = bool(lineage) and lineage[-1].step == step
        lineage = [*lineage[:-1], here.after(lineage[-1])] if is_same_step else [*lineage, here]
    lineage = [change for change in lineage if change.fields]
    if lineage == known:
        return
    for change in lineage:
        say(f"{change.words()[:1].upper()}{change.words()[1:]}.")
    record = {CHANGES: [{"step": each.step, "fields": each.fields} for each in lineage]}
    folder.rewrite(folder.manifest() | record, {})
    recipe = with_changes(load(folder.recipe), folder)
    remember_trust(folder.recipe, texts(recipe))
    notes = [f"The run was {each.words()}." for each in lineage]
    plan = make_plan(resolve(recipe), begun=True, ranks=ranks.size, notes=notes)
    folder.rewrite(folder.manifest(), {PLAN: render(plan), PLAN_JSON: pretty(plan.to_json())})


def why_not_exact(folder: RunFolder, now: Tree, saved: Tree, say: Say) -> list[str]:
    """New reasons why a resumed run is not exact; says them and other differences.

    now: the manifest of this process; saved: the copies in the newest checkpoint.
    """
    before = folder.manifest()
    found = manifest.differences(before, now)
    for sentence in found.possible:
        say(f"Changed since the run started, so bits may differ: {sentence}")
    reasons = [f"resumed where {s[0].lower()}{s[1:].rstrip('.')}" for s in found.decisive]
    marked = decode_json(saved["manifest"].encode()) if "manifest" in saved else {}
    for other in (marked, now):
        verdict, _, reason = str(other.get("exactness", "")).partition(": ")
        if verdict == NOT_EXACT:
            reasons.append(reason)
    statement = str(before.get("exactness", ""))
    if statement.startswith(NOT_EXACT):
        say(f"This run is {statement}.")
    new = [reason for reason in dict.fromkeys(reasons) if reason not in statement]
    for reason in new:
        say(f"From here on this run is {NOT_EXACT}: {reason}.")
    return new


def recipe_of(folder: RunFolder, trust: bool = False) -> Recipe:
    """A run's recipe; if its file is damaged, the copy in the newest checkpoint."""
    try:
        return load(folder.recipe, trust)
    except Untrusted:
        raise
    except UsageError as error:
        text = _copy_of_recipe(folder, error)
        return parsed(text.encode(), "The copy of the recipe", folder.recipe, trust)


def restore(folder: RunFolder, say: Say, trust: bool = False) -> None:
    """Restore a damaged recipe and manifest; the damaged recipe is kept under another name."""
    try:
        load(folder.recipe, trust)
    except Untrusted:
        raise
    except UsageError as error:
        text = _copy_of_recipe(folder, error)
        aside = files.free_path(folder.path / f"{RECIPE}.damaged")
        if folder.recipe.is_file():
            files.write_file(aside, [folder.recipe.read_bytes()])
            say(f"{error} {USED} The damaged file is kept as {aside.name}.")
        else:
            say(f"{error} {USED}")
        folder.restore_text(RECIPE, text)
    try:
        folder.manifest()
    except Damaged as error:
        copy = (copies(folder) or {}).get("manifest")
        if copy is None:
            say(f"{error} No checkpoint holds a copy: the manifest is lost.")
            folder.rewrite({}, {})
        else:
            say(f"{error} {USED}")
            folder.restore_text(MANIFEST, copy)


def _copy_of_recipe(folder: RunFolder, error: UsageError) -> str:
    copy = (copies(folder) or {}).get("recipe")
    if copy is None:
        raise UsageError(f"{error} No checkpoint holds a copy: put one back.") from error
    return str(copy)


def rewrite_texts(folder: RunFolder, plan: Plan, say: Say) -> None:
    """Rewrite a damaged plan, and record a changed recipe in the manifest."""
    changed, texts = folder.changed_texts(), dict[str, str]()
    for name, text in ((PLAN, render(plan)), (PLAN_JSON, pretty(plan.to_json()))):
        if name in changed:
            say(f"{folder.path / name} was damaged and is written again.")
            texts[name] = text
    if RECIPE in changed:
        texts[RECIPE] = folder.copies()["recipe"]
    if texts:
        folder.rewrite(folder.manifest(), texts)


def longer(run: Resolved, total_timesteps: int, folder: RunFolder) -> Resolved:
    """The run with a larger budget."""
    recipe, now = run.recipe, run.loops
    total, size, unit = now.budget
    least = total + size
    if total_timesteps < least:
        raise UsageError(
            f"{folder.name} is already planned for {total:,} {unit}: "
            f"--total-timesteps must be {least:,} or more, which is one more iteration."
        )
    recipe = recipe.replace(clock__total_timesteps=total_timesteps, clock__epochs=None)
    return replace(run, recipe=recipe, loops=recipe.algorithm.loops(recipe, run.geometry))


def extend(run: Resolved, clock: Clock, folder: RunFolder, ranks: Ranks, say: Say) -> None:
    """Extend the clock to the recipe's larger budget; the first rank writes it to the folder.

    Schedules are functions of progress, steps over budget: from here on they have the values of a
    run that was planned with the larger budget.
    """
    loops = run.loops
    at, done = step_of(clock), clock.now.iterations
    clock.continue_to(loops)
    if not ranks.is_first:
        return
    asked = load(folder.recipe)  # without this resume's placement of rollouts
    before = with_changes(asked, folder)
    longer = before.replace(clock=run.recipe.clock)
    shorter = before.algorithm.loops(before, run.geometry)
    was = before.algorithm.schedules(done / shorter.iterations)
    now = run.recipe.algorithm.schedules(done / loops.iterations)
    jumps = [f"{k} {was[k]:.3g} becomes {now[k]:.3g}" for k in was if was[k] != now[k]]
    note = (
        f"The budget grows from {shorter.budget[0]:,} to {loops.budget[0]:,} {loops.budget[2]} at "
        f"step {at:,}; schedules follow the new length"
        f"{': ' + ', '.join(jumps) if jumps else ', and none of them jumps'}."
    )
    say(note)
    plan = make_plan(replace(run, recipe=longer), begun=True, ranks=ranks.size, notes=[note])
    recipe = dump(asked.replace(clock=run.recipe.clock))
    new = {RECIPE: recipe, PLAN: render(plan), PLAN_JSON: pretty(plan.to_json())}
    folder.rewrite(folder.manifest(), new)
