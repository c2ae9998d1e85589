"""`etude plan`: what a run would do, without doing it."""

from __future__ import annotations

import json
import shutil
import sys

from pydantic import Field

from etude.api import plan
from etude.cli.options import Json, parse
from etude.cli.target import Recipe_, Trusting, find_target
from etude.core.errors import UsageError
from etude.planning import page
from etude.planning.recipe import Recipe


class PlanCommand(Trusting):
    """What a run would do, without doing it."""

    recipe: Recipe_
    measure: bool = Field(False, description="Time a few steps and say how long the run takes.")
    compare: str | None = Field(None, description="Variants side by side: section.key=a,b,c.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


def run(arguments: list[str]) -> None:
    """Print a plan, or several side by side."""
    command = _parsed(*find_target(arguments))
    width = shutil.get_terminal_size((100, 24)).columns
    if command.compare is not None:
        field, variants = _variants(command.recipe, command.compare)
        plans = [(value, plan(variant, command.measure)) for value, variant in variants]
        if command.json_output:
            print(json.dumps({value: plan.to_json() for value, plan in plans}, indent=2))
        else:
            print(page.compare(field, plans, width), end="")
        return
    made = plan(command.recipe, command.measure)
    if command.json_output:
        print(json.dumps(made.to_json(), indent=2))
    else:
        print(page.render(made, width, color=sys.stdout.isatty()), end="")


def _parsed(recipe: Recipe, options: list[str]) -> PlanCommand:
    return parse(f"plan {recipe.name}", PlanCommand, options, PlanCommand(recipe=recipe))


def _variants(recipe: Recipe, text: str) -> tuple[str, list[tuple[str, Recipe]]]:
    """Recipes that differ in one field, from "section.key=a,b,c"."""
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise UsageError(f"--compare takes section.key=a,b,c, not '{text}'.")
    options = [(value, [f"--{field}", value]) for value in values.split(",")]
    return field, [(value, _parsed(recipe, given).recipe) for value, given in options]
