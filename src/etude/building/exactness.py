"""What a run that goes on is held to, so that the word "exact" is kept: its recipe and machine.

A recipe that was changed is another run's, and refused. Another instruction set, library or result
of the standard computation gives other bits: the run goes on, and is not exact from then on.
"""

from __future__ import annotations

from collections.abc import Callable

from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.planning.recipe import Recipe, changes, parsed
from etude.runs import checkpoint, manifest
from etude.runs.documents import decode_json
from etude.runs.folder import NOT_EXACT, RECIPE, RunFolder
from etude.training.saving import RUN

Say = Callable[[str], None]


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
