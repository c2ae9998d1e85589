"""What a resume checks and repairs: the run's recipe, its machine, and the texts of its folder.

A recipe that was changed is another run's, and refused. Another instruction set, library or result
of the standard computation gives other bits: the run goes on, and is not exact from then on. A
damaged recipe or manifest is put back from the copies in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from etude.core.clock import Clock
from etude.core.errors import Damaged, UsageError
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.core.user_code import Untrusted
from etude.planning.page import render
from etude.planning.plan import Plan, make_plan
from etude.planning.recipe import Recipe, Resolved, changes, dump, load, parsed
from etude.runs import checkpoint, files, manifest
from etude.runs.documents import decode_json
from etude.runs.folder import MANIFEST, NOT_EXACT, PLAN, PLAN_JSON, RECIPE, RunFolder, pretty
from etude.training.saving import RUN

Say = Callable[[str], None]
USED = "The copy in the newest checkpoint is used."


def copies(folder: RunFolder) -> Tree | None:
    """{"recipe", "manifest"} as the newest checkpoint holds them; None without a checkpoint."""
    path = checkpoint.newest_verified(folder.checkpoints, lambda text: None, repair=False)
    if path is None:
        return None
    found = checkpoint.load_document(path).get(RUN, {})
    return found if isinstance(found, dict) else {}


def check_recipe(recipe: Recipe, saved: Tree, folder: RunFolder, say: Say) -> None:
    """Refuse a recipe that is not the one a checkpoint with the copies `saved` was made with."""
    if "recipe" not in saved:
        return
    source = f"The recipe in {folder.checkpoints}"
    was = parsed(str(saved["recipe"]).encode(), source, folder.recipe)
    refused, said = changes(was, recipe)
    if refused:
        raise UsageError(
            f"{folder.recipe} is not the recipe this run was saved with: {'; '.join(refused)}. Put "
            f"it back, or make a new run that starts from this one: `etude train {folder.recipe} "
            f"--from {folder.path}`."
        )
    for change in said:
        say(f"Since the last checkpoint, {change}.")


def begin_anew(folder: RunFolder, now: Tree, say: Say) -> None:
    """Nothing was saved yet: the run is all of this recipe and of this process."""
    # The digest is another one too where a version has renamed fields.
    same = folder.manifest().get("recipe", now["recipe"]) == now["recipe"]
    if not same and RECIPE in folder.changed_texts():
        say(f"{folder.recipe} was changed before anything was saved: the run is of the new one.")
    folder.rewrite(now, {})


def lost(folder: RunFolder, now: Tree, saved: Tree, say: Say) -> list[str]:
    """Why a run is not exact once it goes on; says that, and what else is not as it was.

    `now` is the manifest of this process, `saved` the copies in the newest checkpoint.
    """
    before = folder.manifest()
    found = manifest.differences(before, now)
    for sentence in found.possible:
        say(f"Not as it was when the run started, so bits may differ: {sentence}")
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
    """A run's recipe: where its file is damaged, the copy in the newest checkpoint."""
    try:
        return load(folder.recipe, trust)
    except Untrusted:
        raise
    except UsageError as error:
        text = _copy_of_recipe(folder, error)
        return parsed(text.encode(), "The copy of the recipe", folder.recipe, trust)


def restore(folder: RunFolder, say: Say, trust: bool = False) -> None:
    """Put back a damaged recipe and manifest; what was there is kept."""
    try:
        load(folder.recipe, trust)
    except Untrusted:
        raise
    except UsageError as error:
        text = _copy_of_recipe(folder, error)
        aside = files.free_path(folder.path / f"{RECIPE}.damaged")
        if folder.recipe.is_file():
            files.write_file(aside, [folder.recipe.read_bytes()])
            say(f"{error} {USED} The file as it was is kept as {aside.name}.")
        else:
            say(f"{error} {USED}")
        folder.restore_text(RECIPE, text)
    try:
        folder.manifest()
    except Damaged as error:
        copy = (copies(folder) or {}).get("manifest")
        if copy is None:
            say(f"{error} No checkpoint holds a copy: what the run was started with is lost.")
            folder.rewrite({}, {})
        else:
            say(f"{error} {USED}")
            folder.restore_text(MANIFEST, copy)


def _copy_of_recipe(folder: RunFolder, error: UsageError) -> str:
    copy = (copies(folder) or {}).get("recipe")
    if copy is None:
        raise UsageError(f"{error} No checkpoint holds a copy of it: put one back.") from error
    return str(copy)


def settle(folder: RunFolder, plan: Plan, say: Say) -> None:
    """Write a damaged plan anew, and let the manifest name the recipe that the run goes on with."""
    changed, texts = folder.changed_texts(), dict[str, str]()
    for name, text in ((PLAN, render(plan)), (PLAN_JSON, pretty(plan.to_json()))):
        if name in changed:
            say(f"{folder.path / name} was damaged, and is written anew.")
            texts[name] = text
    if RECIPE in changed:
        texts[RECIPE] = folder.copies()["recipe"]
    if texts:
        folder.rewrite(folder.manifest(), texts)


def longer(run: Resolved, total_timesteps: int, folder: RunFolder) -> Resolved:
    """The run with a larger budget."""
    recipe, now = run.recipe, run.loops
    least = now.total.timesteps + now.steps_per_iteration
    if total_timesteps < least:
        raise UsageError(
            f"{folder.path} is planned for {now.total.timesteps:,} steps already: "
            f"--total-timesteps must be {least:,} or more, which is one more iteration."
        )
    clock = recipe.clock.model_copy(update={"total_timesteps": total_timesteps, "epochs": None})
    recipe = recipe.model_copy(update={"clock": clock})
    return replace(run, recipe=recipe, loops=recipe.algorithm.loops(recipe, run.geometry))


def extend(run: Resolved, clock: Clock, folder: RunFolder, ranks: Ranks, say: Say) -> None:
    """Go on with the recipe's larger budget; the first rank writes it to the folder.

    Schedules are functions of the run's progress, steps over budget, and a larger budget sets the
    progress back: from here on they take the values of a run that was planned so from the start.
    """
    loops = run.loops
    at, done = clock.now.timesteps, clock.now.iterations
    clock.continue_to(loops)
    if not ranks.is_first:
        return
    before = load(folder.recipe)  # as it was asked, wherever its rollouts run this time
    longer = before.model_copy(update={"clock": run.recipe.clock})
    shorter, schedules = before.algorithm.loops(before, run.geometry), longer.algorithm.schedules
    was, now = (schedules(done / n.iterations) for n in (shorter, loops))
    jumps = [f"{k} {was[k]:.3g} becomes {now[k]:.3g}" for k in was if was[k] != now[k]]
    note = (
        f"The budget grows from {shorter.total.timesteps:,} to {loops.total.timesteps:,} steps at "
        f"step {at:,}; schedules follow the new length"
        f"{': ' + ', '.join(jumps) if jumps else ', and none of them jumps'}."
    )
    say(note)
    plan = make_plan(replace(run, recipe=longer), begun=True, ranks=ranks.size, notes=[note])
    texts = {RECIPE: dump(longer), PLAN: render(plan), PLAN_JSON: pretty(plan.to_json())}
    folder.rewrite(folder.manifest(), texts)
