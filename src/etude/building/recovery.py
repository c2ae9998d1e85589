"""What a run needs of its folder's texts: put back from the copies in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from etude.building import exactness
from etude.core.errors import Damaged, UsageError
from etude.core.trust import Untrusted
from etude.planning.page import render
from etude.planning.plan import Plan
from etude.planning.recipe import Recipe, load, parsed
from etude.runs import files
from etude.runs.folder import MANIFEST, PLAN, PLAN_JSON, RECIPE, RunFolder, pretty

Say = Callable[[str], None]
USED = "The copy in the newest checkpoint is used."


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
        folder.put_back(RECIPE, text)
    try:
        folder.manifest()
    except Damaged as error:
        copy = (exactness.copies(folder) or {}).get("manifest")
        if copy is None:
            say(f"{error} No checkpoint holds a copy: what the run was started with is lost.")
            folder.rewrite({}, {})
        else:
            say(f"{error} {USED}")
            folder.put_back(MANIFEST, copy)


def _copy_of_recipe(folder: RunFolder, error: UsageError) -> str:
    copy = (exactness.copies(folder) or {}).get("recipe")
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
