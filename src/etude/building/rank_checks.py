"""What is refused when ranks start, before any of them has learned anything."""

from __future__ import annotations

import json

from etude.core.clock import Clock
from etude.core.code import differing
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.ranks import Ranks, named, was_restarted
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import manifest, standard
from etude.runs.folder import RunFolder


def compare_recipes(recipe: Recipe, ranks: Ranks) -> None:
    """Refuse ranks that were asked for another run than the first."""
    if not ranks.differing(lambda: recipes.digest(recipe)):
        return
    first = ranks.from_first(lambda: recipe.model_dump(mode="json"))
    refused, said = recipes.changes(recipes.validated(first, "the recipe of rank 0"), recipe)
    for rank, found in enumerate(ranks.gather(["; ".join([*refused, *said])])):
        if found:
            raise UsageError(
                f"Rank {rank} was given another recipe than rank 0: {found} there. Start all ranks "
                "with the same command and the same files."
            )


def compare_bits(ranks: Ranks) -> None:
    """Refuse ranks that would not stay together: each applies the updates to weights of its own."""
    if others := ranks.differing(standard.digest):
        cpus = ranks.gather([manifest.cpu_name()])
        raise UsageError(
            f"Rank 0, on {cpus[0]}, computes other bits than {named(others)}, on "
            f"{cpus[others[0]]}: start ranks on machines of one type, with the same versions of "
            "all libraries and the same environment variables."
        )


def compare_hashes(mine: dict[str, str], ranks: Ranks) -> None:
    """Refuse ranks whose code, by {name: hash}, is another than the first's."""
    first = ranks.from_first(lambda: mine)
    for rank, names in enumerate(ranks.gather([differing(first, mine)])):
        if names:
            raise UsageError(
                f"Rank {rank} computes with other code than rank 0: {', '.join(names)}. Install "
                "the same files and versions for all ranks."
            )


def refuse_to_repeat(folder: RunFolder, clock: Clock) -> None:
    """torchrun starts ranks again whatever they ended with: not into the same NaN, though."""
    found = folder.last_failure()
    if not was_restarted() or found is None:
        return
    try:
        context = json.loads((found / "context.json").read_text())
        again = context["counters"]["now"]["iterations"] >= clock.now.iterations
        refused = context["error"] == NonFinite.__name__ and again
    except (OSError, ValueError, KeyError, TypeError):
        return
    if refused:
        fault = EtudeError(
            f"torchrun has started this run again after a number that was not finite (see {found})."
            f" A run is exact, so the same would come again: change what caused it, then "
            f"`etude resume {folder.path}`."
        )
        fault.exit_code = NonFinite.exit_code
        raise fault
