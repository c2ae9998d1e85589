"""`etude plan`: the steps, shapes, memory and time of a run before it starts."""

from __future__ import annotations

import sys

from pydantic import Field

from etude.api import plan
from etude.cli.options import Reporting, Trusting, parse, terminal_width
from etude.cli.target import Recipe_, find_target, fitted
from etude.core.errors import UsageError
from etude.planning.memory import misfits
from etude.planning.plan import compare_plans, render
from etude.planning.recipe import Recipe
from etude.runs.folder import default_path


class PlanCommand(Trusting, Reporting):
    """Show the steps, shapes, memory and time of a run before it starts."""

    recipe: Recipe_
    measure: bool = Field(
        False, description="Time a few iterations and estimate the time of the run."
    )
    time: str | None = Field(
        None,
        description="With --measure: the number of slices of this length that the run takes; "
        "4:00:00, 90 (minutes) or 1-12 (days-hours).",
    )
    compare: str | None = Field(
        None, description="Plans for several values of a field: section.key=a,b,c."
    )


def run(arguments: list[str]) -> None:
    """Print a plan, or several side by side."""
    command = _parsed(*find_target(arguments))
    if command.time is not None and (command.compare or not command.measure):
        raise UsageError(
            "--time counts the slices of one measured run: add --measure, and leave out --compare."
        )
    width = terminal_width()
    if command.compare is not None:
        field, variants = _variants(command.recipe, command.compare)
        plans = [(value, plan(variant, command.measure)) for value, variant in variants]
        documents = {value: plan.to_json() for value, plan in plans}
        command.show(documents, compare_plans(field, plans, width))
        return
    if command.time is not None:
        from etude.cli.slices import in_slices, limit_of

        limit_of(command.time)  # refuse a wrong limit before the measurement
    planned = plan(command.recipe, command.measure)
    document, text = planned.to_json(), render(planned, width, color=sys.stdout.isatty())
    refused, doubtful = misfits(planned.bytes, default_path(planned.recipe, planned.seed))
    document["misfits"] = [*refused, *doubtful]
    text += "".join(f"`etude train` would refuse this here: {sentence}\n" for sentence in refused)
    text += "".join(f"Warning: {sentence}\n" for sentence in doubtful)
    if command.time is not None:
        document["slices"], sentence = in_slices(planned.seconds["total"], command.time)
        text += f"That is {sentence}.\n"
    command.show(document, text)


def _parsed(recipe: Recipe, options: list[str]) -> PlanCommand:
    return parse(f"plan {recipe.name}", PlanCommand, options, PlanCommand(recipe=recipe))


def _variants(recipe: Recipe, text: str) -> tuple[str, list[tuple[str, Recipe]]]:
    """Recipes that differ in one field, from "section.key=a,b,c"."""
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise UsageError(f"--compare takes section.key=a,b,c, not '{text}'.")
    options = [(value, [f"--{field}", value]) for value in values.split(",")]
    return field, [
        (value, _parsed(fitted(recipe, given), given).recipe) for value, given in options
    ]
