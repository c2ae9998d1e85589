"""The gallery: `python docs/_site/gallery.py` writes docs/about/gallery.md from the table below.

A task is one line. Its picture is docs/images/RECIPE.webp, .gif or .png, whichever there is, or the
one that its line names: to add a film, put it there and run this. A test fails where page and
table differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from etude.core.catalogue import RECIPES

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent / "gates"))
import figures  # noqa: E402
from faults_table import load  # noqa: E402

PAGE = DOCS / "about/gallery.md"


class Entry(NamedTuple):
    """A task; its figures are those of the gate that trains it, where a result is kept."""

    recipe: str
    page: str
    demo: bool = False
    options: str = ""
    note: str = ""
    picture: str = ""


FREE_PHYSICS = "The picture is in the fast training physics, which limits no torque."
TASKS = [
    Entry("reach", "first-run.md", demo=True),
    Entry("pick-place", "pick-place.md", demo=True),
    Entry("pick-place-anywhere", "pick-place.md"),
    Entry("pick-place-bc", "demonstrations.md", options="--algorithm.dataset data/pick"),
    Entry("walk-go1", "robots.md", demo=True),
    Entry("walk-go1-robust", "robots.md"),
    Entry("walk-go1-rough", "robots.md"),
    Entry("imitate-walk", "imitation.md", note=FREE_PHYSICS),
    Entry("imitate-backflip", "imitation.md", note=FREE_PHYSICS, picture="backflip.png"),
    Entry("imitate-all", "imitation.md", note=FREE_PHYSICS),
    Entry("amp-walk", "rewards.md", note=FREE_PHYSICS),
    Entry("reach-memory", "segments.md"),
    Entry("spread", "segments.md"),
    Entry("seek-pictures", "demonstrations.md"),
    Entry("episodic", "rewards.md"),
    *(Entry(name, "robots.md") for name in ("hopper", "halfcheetah", "walker2d", "ant")),
]
INTRODUCTION = """\
# Gallery

<!-- Made by `python docs/_site/gallery.py`: do not edit. -->

This page shows the recipes that come with Etude, with the command that trains each. `etude demo`
shows policies that are trained already, and `etude eval RUN --video` films your own run. `etude
train RECIPE --help-all` lists the fields of a recipe. If a recipe has been measured, the figures of
the gate follow the command; {OLDER} marks figures that are older than the code they measure.
""".replace("{OLDER}", figures.OLDER)


def picture(entry: Entry) -> str:
    """The picture of a task as Markdown; "" where there is none."""
    for name in (*(f"{entry.recipe}.{kind}" for kind in ("webp", "gif", "png")), entry.picture):
        if (DOCS / "images" / name).is_file():
            return f"![{RECIPES.purpose(entry.recipe)}](../images/{name})\n\n"
    return ""


def measured(recipe: str) -> str:
    """What the gate that trains a recipe has measured, as Markdown; "" without a result."""
    for (gate, variant), result in load().items():
        if gate == f"train_{recipe}" or (gate.startswith("train_") and variant == recipe):
            mark = figures.OLDER if figures.is_older(result) else ""
            shown = "; ".join(figures.figures(result))
            when = f"`{result['command']}` on {result['date'][:10]}"
            return f"{when}{mark}: {shown}.\n\n"
    return ""


def section(entry: Entry) -> str:
    """A task with picture, command, and where it is explained."""
    shown = picture(entry)
    command = f"etude train {entry.recipe} {entry.options}".rstrip()
    demo = f"    etude demo {entry.recipe}\n" if entry.demo else ""
    note = f"{entry.note}\n\n" if shown and entry.note else ""
    page = f"[{entry.page.removesuffix('.md')}](../{entry.page})"
    purpose = RECIPES.purpose(entry.recipe)
    rest = f"{measured(entry.recipe)}More: {page}."
    return f"## {entry.recipe}\n\n{purpose}\n\n{shown}{note}    {command}\n{demo}\n{rest}\n"


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *map(section, TASKS)])


if __name__ == "__main__":
    PAGE.write_text(page())
